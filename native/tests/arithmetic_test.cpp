// Arithmetic that must not depend on the machine: multiply-adds in double precision, and the functions of a softmax.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "engine/exp_log.h"
#include "kernels/fused.h"

namespace {

uint64_t state = 1;

uint64_t next() {
  uint64_t z = state += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

bool same(float a, float b, float c) {
  const float expected = std::fma(a, b, c), found = unflip::fused_in_double(a, b, c);
  if (bits_of(expected) == bits_of(found) || (std::isnan(expected) && std::isnan(found))) return true;
  std::printf("fused(%a, %a, %a) is %a, not %a\n", a, b, c, found, expected);
  return false;
}

// A float whose exponent is near `exponent`, with few digits or with all. Few digits make ties and cancellation likely.
float near(int exponent) {
  const uint32_t e = static_cast<uint32_t>(exponent + static_cast<int>(next() % 5)) & 255, digits = next() & 0x7FFFFF;
  return float_of(static_cast<uint32_t>(next() & 1) << 31 | e << 23 | (next() & 1 ? digits : digits & 0x7FF000));
}

bool check_fused() {
  for (int i = 0; i < 300000; i++) {
    const uint64_t x = next(), y = next();
    if (!same(float_of(static_cast<uint32_t>(x)), float_of(static_cast<uint32_t>(x >> 32)), float_of(static_cast<uint32_t>(y))))
      return false;
    const int a = static_cast<int>(y >> 32 & 255), b = static_cast<int>(y >> 40 & 255), sum = a + b - 127;
    const float c = near(sum + static_cast<int>(next() % 60) - 30);
    if (!same(near(a), near(b), c)) return false;
    if (!same(near(60), near(static_cast<int>(next() % 10)), near(0))) return false;  // results near the smallest floats
  }
  // c + p is a tie of floats plus or minus little. Rounding twice gives a wrong last digit.
  return same(0x1.000002p0f, 0x1.000002p-25f, 1.f) && same(0x1.000002p0f, -0x1.000002p-25f, 1.f) &&
         same(0x1.000002p-75f, 0x1p-75f, 0x1p-130f) && same(0x1p-75f, 0x1p-75f, 0x1p-149f);
}

bool check_close(const char* what, double x, double found, long double expected) {
  const long double error = std::fabs(found - expected);
  if (error <= 4e-16L * std::fabs(expected) + 1e-300L) return true;
  std::printf("%s(%.17g) is %.17g, not %.17Lg\n", what, x, found, expected);
  return false;
}

bool check_softmax_functions() {
  for (int i = 0; i < 20000; i++) {
    const double part = static_cast<double>(next() >> 11) * 0x1p-53;
    const double x = -199.9 * part * part, y = 1 + std::pow(10.0, 7 * part) * (i % 2);
    if (!check_close("exp", x, unflip::exp_below_zero(x), std::exp(static_cast<long double>(x)))) return false;
    if (!check_close("log", y, unflip::log_above_one(y), std::log(static_cast<long double>(y)))) return false;
  }
  return unflip::exp_below_zero(0) == 1 && unflip::exp_below_zero(-1e30) == 0 && unflip::log_above_one(1) == 0 &&
         std::isnan(unflip::exp_below_zero(NAN));
}

}  // namespace

int main() {
  if (!check_fused() || !check_softmax_functions()) return 1;
  std::printf("all right\n");
  return 0;
}
