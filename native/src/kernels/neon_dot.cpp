// The 8-bit convolution for aarch64 with the dot-product extension. Flags of this file: -march=armv8.2-a+dotprod
#if defined(__aarch64__)
#include "neon_bytes.h"

namespace unflip {
namespace {

struct DotSums {
  int32x4_t sum;
  UNFLIP_INLINE void clear() { sum = vdupq_n_s32(0); }
  UNFLIP_INLINE void add(int8x16_t weights, int8x16_t x) { sum = vdotq_s32(sum, weights, x); }
  UNFLIP_INLINE int32x4_t total() const { return sum; }
};

}  // namespace

void neon_dot_byte_tile(const ByteTile& tile) { any_byte_tile<DotSums>(tile); }

}  // namespace unflip
#endif
