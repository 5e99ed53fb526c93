// Exponential and logarithm of a softmax, in plain double precision. A library's are not used, because their last digit depends on
// the machine. Errors are about 1e-16, so rounding to a float nearly always gives the nearest one.
#pragma once

#include <cstdint>
#include <cstring>

namespace unflip {

constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33;  // ln(2); the first has 21 zeros at its end

// 2^n, -1022 <= n <= 1023.
inline double power_of_two(int64_t n) {
  const int64_t bits = (n + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// e^x for x <= 0, as 2^n * e^r with |r| <= ln(2) / 2. Below e^-200 it is 0, as in floats. NaN gives NaN.
inline double exp_below_zero(double x) {
  if (x < -200) return 0;
  if (!(x <= 0)) return x;
  const int64_t n = static_cast<int64_t>(x * 1.4426950408889634 - 0.5);
  const double r = (x - static_cast<double>(n) * kLn2High) - static_cast<double>(n) * kLn2Low;
  double sum = 1;
  for (int k = 14; k > 0; k--) sum = 1 + r * sum / k;
  return sum * power_of_two(n);
}

// ln(x) for a finite x >= 1, as n ln(2) + ln(m) with m in sqrt(1/2) .. sqrt(2): ln(m) = 2 artanh((m - 1) / (m + 1)).
inline double log_above_one(double x) {
  if (!(x >= 1) || x > 1e300) return x;
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  int64_t n = (bits >> 52) - 1023;
  double m = x * power_of_two(-n);
  if (m > 1.4142135623730951) m *= 0.5, n++;
  const double s = (m - 1) / (m + 1), square = s * s;
  double sum = 0;
  for (int k = 25; k > 0; k -= 2) sum = 1.0 / k + square * sum;
  return static_cast<double>(n) * kLn2High + (2 * s * sum + static_cast<double>(n) * kLn2Low);
}

}  // namespace unflip
