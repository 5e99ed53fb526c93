// Element-wise functions of the op "curve", with their names in the file. kernels/activations.h computes them.
#pragma once

#define UNFLIP_ACTIVATIONS(A) \
  A(Sigmoid, "sigmoid")       \
  A(Tanh, "tanh")             \
  A(Silu, "silu")             \
  A(Gelu, "gelu")             \
  A(GeluTanh, "gelu_tanh")    \
  A(Elu, "elu")               \
  A(Mish, "mish")

namespace unflip {

enum class Activation {
#define UNFLIP_ACTIVATION(activation, name) activation,
  UNFLIP_ACTIVATIONS(UNFLIP_ACTIVATION)
#undef UNFLIP_ACTIVATION
};

}  // namespace unflip
