// a * b + c in floats, rounded once.
#pragma once

#include <cmath>
#include <cstdint>

namespace unflip {
namespace {

// In double precision, for CPUs without the instruction. The product is exact. The sum is rounded to odd: if it is not exact, its
// last digit becomes 1, so the second rounding, to a float, sees on which side of a tie the exact sum is.
inline float fused_in_double(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, sum = product + c;
  const double other = sum - product;
  const double error = (product - (sum - other)) + (c - other);  // of the sum, exactly; NaN if the sum is not finite
  if (!(error < 0) && !(error > 0)) return static_cast<float>(sum);
  int64_t bits;
  __builtin_memcpy(&bits, &sum, sizeof bits);
  if ((bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
  double odd;
  __builtin_memcpy(&odd, &bits, sizeof odd);
  return static_cast<float>(odd);
}

#if defined(__wasm__)  // whose library rounds twice near the smallest floats
inline float fused(float a, float b, float c) { return fused_in_double(a, b, c); }
#else
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
#endif

}  // namespace
}  // namespace unflip
