// Functions of the op "curve": the loader names them, the kernels compute them.
#pragma once

namespace unflip {

enum class Curve { Sigmoid, Tanh, Silu, Gelu, GeluTanh, Elu, Mish };

}  // namespace unflip
