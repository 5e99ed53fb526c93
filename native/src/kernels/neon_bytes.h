// The 8-bit convolution for NEON. Inputs become signed by subtracting 128 (kNeonBias), which `minus` makes up for.
#pragma once

#include <arm_neon.h>

#include "kernels.h"
#include "register_tile.h"

namespace unflip {

constexpr int kNeonBias = 128;

// With dot-product instructions, in its own file because not every CPU has them.
constexpr int kNeonDotPixels = 4;
void neon_dot_byte_tile(const ByteTile& tile);

namespace {

// `Sums` are those of four filters: clear(), add(four bytes of weights of each, the input's four bytes four times), total().
template <class Sums>
struct FilterSums {
  static constexpr int kWidth = kLanes;  // RegisterTile counts vectors in steps of 8 channels; each holds 16 filters
  Sums v[4];
};

// P pixels by B blocks of 16 filters.
template <class Sums, int P, int B>
void byte_tile_of(const ByteTile& t) {
  constexpr int kStep = kFloatBlock * kByteGroup;
  const int64_t block = int64_t{t.step_count} * kStep;
  RegisterTile<FilterSums<Sums>, P, B> all;
  all.each([](FilterSums<Sums>& s, int, int) UNFLIP_LAMBDA_INLINE {
    for (int i = 0; i < 4; i++) s.v[i].clear();
  });
  const int8_t* w = t.weights;
  const uint8_t* in[P];
  for (int p = 0; p < P; p++) in[p] = t.input[p];
  for (int s = 0; s < t.step_count; s++, w += kStep) {
    int8x16_t x[P];
    for (int p = 0; p < P; p++) {
      uint32_t four;
      __builtin_memcpy(&four, in[p] + t.steps[s], sizeof four);
      x[p] = vreinterpretq_s8_u32(vdupq_n_u32(four ^ 0x80808080u));
    }
    all.each([&](FilterSums<Sums>& sums, int p, int c) UNFLIP_LAMBDA_INLINE {
      const int8_t* weights = w + c / kLanes * block;
      for (int i = 0; i < 4; i++) sums.v[i].add(vld1q_s8(weights + 16 * i), x[p]);
    });
  }
  all.each([&](FilterSums<Sums>& sums, int p, int c) UNFLIP_LAMBDA_INLINE {
    const int first = c / kLanes * kFloatBlock;
    for (int i = 0; i < 4; i++) {
      const int f = first + 4 * i;
      if (f >= t.filters) return;
      const int32x4_t sum = vsubq_s32(sums.v[i].total(), vld1q_s32(t.minus + f));
      vst1q_f32(t.out[p] + f, vmulq_f32(vcvtq_f32_s32(sum), vld1q_f32(t.scale + f)));
    }
  });
}

// Up to four pixels; with one, up to four blocks.
template <class Sums>
void any_byte_tile(const ByteTile& t) {
  switch (t.pixels) {
    case 1: break;
    case 2: return byte_tile_of<Sums, 2, 1>(t);
    case 3: return byte_tile_of<Sums, 3, 1>(t);
    default: return byte_tile_of<Sums, 4, 1>(t);
  }
  switch ((t.filters + kFloatBlock - 1) / kFloatBlock) {
    case 1: return byte_tile_of<Sums, 1, 1>(t);
    case 2: return byte_tile_of<Sums, 1, 2>(t);
    case 3: return byte_tile_of<Sums, 1, 3>(t);
    default: return byte_tile_of<Sums, 1, 4>(t);
  }
}

}  // namespace
}  // namespace unflip
