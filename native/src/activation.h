// Element-wise functions of the op "curve". The loader reads their names, the kernels compute them.
#pragma once

namespace unflip {

enum class Activation { Sigmoid, Tanh, Silu, Gelu, GeluTanh, Elu, Mish };

}  // namespace unflip
