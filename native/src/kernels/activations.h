// Activations, element by element. Each is computed from one exponential in plain floats, which compilers vectorize. A library's
// exp is not used, because its last digit depends on the machine. Errors are a few units in the last place. The sign of a result
// near 0 is PyTorch's, because a quantizer after it reads only the sign: where PyTorch's factor of a negative x rounds to 0, the
// result is -0, which counts as positive.
#pragma once

#include "kernels.h"
#include "register_tile.h"

namespace unflip {
namespace {

// e^x for x clamped to -87 .. 88, as 2^n * e^r with |r| <= ln(2) / 2. The polynomial is that of Cephes' expf (Moshier).
UNFLIP_INLINE float exponential(float x) {
  x = x > -87.f ? x : -87.f;  // also for NaN: the cast below needs a number
  x = x < 88.f ? x : 88.f;
  const float shifted = x * 1.44269504f + 12582912.f;  // adding 1.5 * 2^23 rounds to a whole number
  const float n = shifted - 12582912.f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts, the first with few digits
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return (p * r * r + r + 1.f) * power;
}

// x * factor, or -0 for x below `least`, where PyTorch's factor is 0.
UNFLIP_INLINE float scaled(float x, float factor, float least) { return x * (x < least ? 0.f : factor); }

UNFLIP_INLINE float absolute(float x) { return x < 0 ? -x : x; }

UNFLIP_INLINE float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }

// Near 0 it uses the Taylor series, which keeps all digits there.
UNFLIP_INLINE float tangent(float x) {
  const float s = x * x;
  const float near = x + x * s * (-1.f / 3 + s * (2.f / 15 + s * (-17.f / 315 + s * (62.f / 2835))));
  const float far = 1.f - 2.f / (exponential(2.f * absolute(x)) + 1.f);
  return absolute(x) < 0.25f ? near : x < 0 ? -far : far;
}

struct Sigmoid {
  static UNFLIP_INLINE float of(float x) { return sigmoid(x); }
};
struct Tanh {
  static UNFLIP_INLINE float of(float x) { return tangent(x); }
};
struct Silu {
  static UNFLIP_INLINE float of(float x) { return scaled(x, sigmoid(x), -88.722f); }
};
// x times the normal distribution function. Its tail is formula 7.1.26 of Abramowitz and Stegun (error 7.5e-8).
struct Gelu {
  static UNFLIP_INLINE float of(float x) {
    const float z = absolute(x) * 0.70710678f, t = 1.f / (1.f + 0.3275911f * z);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = 0.5f * p * t * exponential(-z * z);
    return scaled(x, x < 0 ? tail : 1.f - tail, -5.52f);
  }
};
struct GeluTanh {
  static UNFLIP_INLINE float of(float x) { return scaled(x, sigmoid(1.59576912f * (x + 0.044715f * x * x * x)), -5.06137f); }
};
struct Elu {  // e^x - 1 = tanh(x / 2) (e^x + 1) avoids the difference of two numbers near 1
  static UNFLIP_INLINE float of(float x) {
    const float below = tangent(0.5f * x) * (exponential(x) + 1.f);
    return x > 0 ? x : below;
  }
};
struct Mish {  // tanh(ln(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2), which is 1 for x >= 20
  static UNFLIP_INLINE float of(float x) {
    const float e = exponential(x < 20.f ? x : 20.f), n = e * (e + 2.f);
    return scaled(x, n / (n + 2.f), -102.87f);
  }
};

template <class F>
void activation_of(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i++) {
    const float x = from[i], y = F::of(x);
    to[i] = x == x ? y : x;  // NaN stays NaN
  }
}

void activation(Activation function, const float* from, int64_t count, float* to) {
  switch (function) {
    case Activation::Sigmoid: return activation_of<Sigmoid>(from, count, to);
    case Activation::Tanh: return activation_of<Tanh>(from, count, to);
    case Activation::Silu: return activation_of<Silu>(from, count, to);
    case Activation::Gelu: return activation_of<Gelu>(from, count, to);
    case Activation::GeluTanh: return activation_of<GeluTanh>(from, count, to);
    case Activation::Elu: return activation_of<Elu>(from, count, to);
    case Activation::Mish: return activation_of<Mish>(from, count, to);
  }
}

}  // namespace
}  // namespace unflip
