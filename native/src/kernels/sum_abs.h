// Sums of absolute values in double precision, over V::Eight, a type of 8 floats (see epilogue.h) with
//
//   V::Eight::Sums   8 doubles: zero(), add(x), which adds the absolute value of each float, a + b, and
//                    total(), which adds sums i and i + 4, then i and i + 2, then the last two
#pragma once

#include "kernels.h"
#include "register_tile.h"

namespace unflip {
namespace {

// Four sets of eight sums, so that additions do not wait for each other. The rest is added after the sets are combined.
template <class V>
UNFLIP_INLINE double sum_abs_run(const float* x, int64_t count) {
  using Sums = typename V::Sums;
  Sums a = Sums::zero();
  int64_t i = 0;
  if (count >= 32) {
    Sums b = a, c = a, d = a;
    for (; i + 32 <= count; i += 32) {
      a.add(V::load(x + i));
      b.add(V::load(x + i + 8));
      c.add(V::load(x + i + 16));
      d.add(V::load(x + i + 24));
    }
    a = (a + b) + (c + d);
  }
  for (; i + 8 <= count; i += 8) a.add(V::load(x + i));
  if (i < count) {
    float rest[8] = {};
    for (int k = 0; i + k < count; k++) rest[k] = x[i + k];
    a.add(V::load(rest));
  }
  return a.total();
}

template <class V>
void sum_abs(const float* from, int64_t step, int runs, int64_t count, double* sums) {
  for (int r = 0; r < runs; r++) sums[r] = sum_abs_run<typename V::Eight>(from + r * step, count);
}

}  // namespace
}  // namespace unflip
