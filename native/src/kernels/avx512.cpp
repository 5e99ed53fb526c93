// Kernels for x86-64 with AVX-512 F, BW, VL, DQ, VPOPCNTDQ and VNNI. Flags of this file: -mavx512f -mavx512bw -mavx512vl
// -mavx512dq -mavx512vpopcntdq -mavx512vnni -mavx2 -mfma -mbmi2 -mpopcnt
#include "avx512.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "activations.h"
#include "avx2.h"
#include "avx512_vectors.h"
#include "bytes.h"
#include "cpu.h"
#include "depthwise.h"
#include "epilogue.h"
#include "stem.h"
#include "sum_abs.h"

namespace unflip {
namespace {

// Pixels by blocks of 16 filters, with the sums in registers: up to 6 x 4.
template <int Pixels, int Blocks>
void float_tile(const FloatTile& t) {
  const int64_t block = int64_t{t.segment_count} * t.segment_length * kFloatBlock;
  __m512 sum[Pixels * Blocks];
#pragma GCC unroll 24
  for (int i = 0; i < Pixels * Blocks; i++) sum[i] = _mm512_setzero_ps();
  const float* w = t.weights;
  for (int s = 0; s < t.segment_count; s++) {
    const float* in[Pixels];
#pragma GCC unroll 6
    for (int p = 0; p < Pixels; p++) in[p] = t.input[p] + t.segments[s];
    for (int64_t k = 0; k < t.segment_length; k++, w += kFloatBlock) {
      __m512 row[Blocks];
#pragma GCC unroll 4
      for (int b = 0; b < Blocks; b++) row[b] = _mm512_loadu_ps(w + b * block);
#pragma GCC unroll 24
      for (int i = 0; i < Pixels * Blocks; i++)
        sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(in[i / Blocks][k]), row[i % Blocks], sum[i]);
    }
  }
  const int last = t.filters - (Blocks - 1) * kFloatBlock;  // filters of the last block: 8 or 16
#pragma GCC unroll 24
  for (int i = 0; i < Pixels * Blocks; i++) {
    float* out = t.out[i / Blocks] + i % Blocks * kFloatBlock;
    if (i % Blocks < Blocks - 1 || last == kFloatBlock)
      _mm512_storeu_ps(out, sum[i]);
    else
      _mm256_storeu_ps(out, _mm512_castps512_ps256(sum[i]));
  }
}

template <int Pixels>
void float_tile(const FloatTile& t) {
  switch ((t.filters + kFloatBlock - 1) / kFloatBlock) {
    case 1: return float_tile<Pixels, 1>(t);
    case 2: return float_tile<Pixels, 2>(t);
    case 3: return float_tile<Pixels, 3>(t);
    default: return float_tile<Pixels, 4>(t);
  }
}

void any_float_tile(const FloatTile& t) {
  switch (t.pixels) {
    case 1: return float_tile<1>(t);
    case 2: return float_tile<2>(t);
    case 3: return float_tile<3>(t);
    case 4: return float_tile<4>(t);
    case 5: return float_tile<5>(t);
    default: return float_tile<6>(t);
  }
}

void any_stem_tile(const StemTile& t) {
  switch ((t.filters + kFloatBlock - 1) / kFloatBlock) {
    case 1: return stem_tile<Wide16, 1>(t);
    case 2: return stem_tile<Wide16, 2>(t);
    case 3: return stem_tile<Wide16, 3>(t);
    default: return stem_tile<Wide16, 4>(t);
  }
}

// 16 values of each of three channels to three vectors: permute a and b, then insert every third lane from c.
//
//     a0 b0 c0 a1 b1 c1 a2 b2 c2 a3 b3 c3 a4 b4 c4 a5 | b5 c5 a6 b6 ... a10 b10 | c10 a11 b11 c11 ... c15
struct Interleave {
  __m512i first[3], second[3];  // for the permutation of a and b, and of the result and c

  Interleave() {
    alignas(64) int one[3][16], two[3][16];
    for (int i = 0; i < 48; i++) {
      const int lane = i % 16, channel = i % 3, from = i / 3;
      one[i / 16][lane] = channel < 2 ? 16 * channel + from : 0;
      two[i / 16][lane] = channel < 2 ? lane : 16 + from;
    }
    for (int v = 0; v < 3; v++) {
      first[v] = _mm512_load_si512(one[v]);
      second[v] = _mm512_load_si512(two[v]);
    }
  }
};

void interleave3(const float* from, int64_t plane, int64_t count, float* to) {
  const Interleave lanes;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16, to += 48) {
    const __m512 a = _mm512_loadu_ps(from + i), b = _mm512_loadu_ps(from + plane + i);
    const __m512 c = _mm512_loadu_ps(from + 2 * plane + i);
#pragma GCC unroll 3
    for (int v = 0; v < 3; v++)
      _mm512_storeu_ps(to + 16 * v, _mm512_permutex2var_ps(_mm512_permutex2var_ps(a, lanes.first[v], b), lanes.second[v], c));
  }
  for (; i < count; i++)
    for (int c = 0; c < 3; c++) *to++ = from[c * plane + i];
}

// Eight words of a filter at a time. Used only for windows that popcount.h does not support.
void differences(const uint64_t* window, const uint64_t* weights, int words, int filters, int32_t* out) {
  for (int f = 0; f < filters; f++, weights += words) {
    __m512i sum = _mm512_setzero_si512();
    for (int k = 0; k < words; k += 8) {
      const __mmask8 mask = static_cast<__mmask8>(words - k >= 8 ? 0xFF : (1 << (words - k)) - 1);
      const __m512i a = _mm512_maskz_loadu_epi64(mask, window + k), w = _mm512_maskz_loadu_epi64(mask, weights + k);
      sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(_mm512_xor_si512(a, w)));
    }
    out[f] = static_cast<int32_t>(_mm512_reduce_add_epi64(sum));
  }
}

constexpr int kFloatFilters = kFloatBlock * kFloatBlocks;

constexpr Kernels kAvx512 = {"avx512",
                             epilogue<Wide16>,
                             epilogue_counts<Wide16>,
                             sum_counts<Wide16>,
                             pool<Wide16>,
                             sum_abs<Wide16>,
                             activation,
                             any_float_tile,
                             any_stem_tile,
                             stem_lines<Wide16>,
                             depthwise_tile<Wide16, 2>,
                             to_bytes,
                             interleave_bytes,
                             avx512_byte_tile,
                             differences,
                             avx2_pair_numbers,  // for small groups; otherwise popcount is preferred to look-up
                             avx2_look_up_tile,
                             true,
                             avx512_copy_windows,
                             avx512_popcount_tile,
                             kFloatFilters,
                             kBytePixels,
                             0,        // no bias
                             nullptr,  // byte_tile needs no wider numbers
                             nullptr,  // and is as fast for a stem
                             nullptr,
                             interleave3,
                             avx512_gather_bytes,
                             avx512_popcount_epilogue,
                             avx512_byte_pool_row};

}  // namespace

const Kernels* avx512_kernels() { return cpu_has_avx512() ? &kAvx512 : nullptr; }

}  // namespace unflip
#endif
