// Smooth functions, element by element. Every one is made of one exponential, in plain floats that a compiler turns into vectors:
// no library's exp, whose last digit would depend on the machine. Errors are a few units of the last digit, and the sign of a result
// near 0 is right, so that a quantizer behind it sees the right side.
#pragma once

#include "kernels.h"
#include "several.h"

namespace unflip {
namespace {

// e^x for x in -87 .. 88; beyond, that of the nearest of them. 2^n * e^r with |r| <= ln(2) / 2, where the polynomial is that of
// Cephes' expf (Moshier).
UNFLIP_INLINE float exponential(float x) {
  x = x > -87.f ? x : -87.f;  // a NaN too: the cast below must have a number
  x = x < 88.f ? x : 88.f;
  const float shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the digits behind the point are rounded away
  const float n = shifted - 12582912.f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts, the first of few digits
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

UNFLIP_INLINE float size_of(float x) { return x < 0 ? -x : x; }

UNFLIP_INLINE float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }

// Near 0 the series, which keeps all digits there.
UNFLIP_INLINE float tangent(float x) {
  const float s = x * x;
  const float near = x + x * s * (-1.f / 3 + s * (2.f / 15 + s * (-17.f / 315 + s * (62.f / 2835))));
  const float far = 1.f - 2.f / (exponential(2.f * size_of(x)) + 1.f);
  return size_of(x) < 0.25f ? near : x < 0 ? -far : far;
}

struct Sigmoid {
  static UNFLIP_INLINE float of(float x) { return sigmoid(x); }
};
struct Tanh {
  static UNFLIP_INLINE float of(float x) { return tangent(x); }
};
struct Silu {
  static UNFLIP_INLINE float of(float x) { return x * sigmoid(x); }
};
// x times the normal distribution, whose tail is Abramowitz and Stegun's 7.1.26 (to 7.5e-8).
struct Gelu {
  static UNFLIP_INLINE float of(float x) {
    const float z = size_of(x) * 0.70710678f, t = 1.f / (1.f + 0.3275911f * z);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = 0.5f * p * t * exponential(-z * z);
    return x * (x < 0 ? tail : 1.f - tail);
  }
};
struct GeluTanh {
  static UNFLIP_INLINE float of(float x) { return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); }
};
struct Elu {  // e^x - 1 = tanh(x / 2) (e^x + 1), without the difference of two numbers near 1
  static UNFLIP_INLINE float of(float x) {
    const float below = tangent(0.5f * x) * (exponential(x) + 1.f);
    return x > 0 ? x : below;
  }
};
struct Mish {  // tanh(ln(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2), which is 1 from 20 on
  static UNFLIP_INLINE float of(float x) {
    const float e = exponential(x < 20.f ? x : 20.f), n = e * (e + 2.f);
    return x * (n / (n + 2.f));
  }
};

template <class F>
void curve_of(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i++) {
    const float x = from[i], y = F::of(x);
    to[i] = x == x ? y : x;  // a NaN stays one
  }
}

void curve(Curve function, const float* from, int64_t count, float* to) {
  switch (function) {
    case Curve::Sigmoid: return curve_of<Sigmoid>(from, count, to);
    case Curve::Tanh: return curve_of<Tanh>(from, count, to);
    case Curve::Silu: return curve_of<Silu>(from, count, to);
    case Curve::Gelu: return curve_of<Gelu>(from, count, to);
    case Curve::GeluTanh: return curve_of<GeluTanh>(from, count, to);
    case Curve::Elu: return curve_of<Elu>(from, count, to);
    case Curve::Mish: return curve_of<Mish>(from, count, to);
  }
}

}  // namespace
}  // namespace unflip
