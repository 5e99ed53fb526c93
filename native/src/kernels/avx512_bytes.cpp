// The 8-bit convolution with AVX-512. Flags of this file: as of avx512.cpp.
#include "avx512.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "register_tile.h"

namespace unflip {
namespace {

constexpr int kStep = kFloatBlock * kByteGroup;  // weights of a step of a block

// The sums of 16 filters.
struct ByteSums {
  static constexpr int kWidth = kFloatBlock;
  __m512i v;
};

UNFLIP_INLINE __m512i broadcast_four(const uint8_t* in) {
  int32_t four;
  __builtin_memcpy(&four, in, sizeof four);
  return _mm512_set1_epi32(four);
}

// Multiplies four unsigned bytes with four signed ones and adds the products to a sum. In assembly, because gcc 12 copies the sums
// of the intrinsic between registers and memory.
UNFLIP_INLINE void add_products(__m512i& sum, __m512i x, __m512i w) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }

template <int Pixels, int Blocks>
void byte_tile(const ByteTile& t) {
  const int64_t block = int64_t{t.step_count + t.rest_count} * kStep;
  RegisterTile<ByteSums, Pixels, Blocks> all;
  all.each([&](ByteSums& sums, int, int c)
               UNFLIP_LAMBDA_INLINE { sums.v = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(t.minus + c)); });
  const int8_t* w = t.weights;
  const uint8_t* in[Pixels];
#pragma GCC unroll 6
  for (int p = 0; p < Pixels; p++) in[p] = t.input[p];
  for (int s = 0; s < t.step_count; s++, w += kStep) {
    const int64_t step = t.steps[s];
    all.each([&](ByteSums& sums, int p, int c) UNFLIP_LAMBDA_INLINE {
      add_products(sums.v, broadcast_four(in[p] + step), _mm512_loadu_si512(w + c / kFloatBlock * block));
    });
  }
  const uint8_t* rest = t.rest;
  for (int s = 0; s < t.rest_count; s++, w += kStep, rest += t.rest_stride)
    all.each([&](ByteSums& sums, int p, int c) UNFLIP_LAMBDA_INLINE {
      add_products(sums.v, broadcast_four(rest + p * kByteGroup), _mm512_loadu_si512(w + c / kFloatBlock * block));
    });
  const bool half = t.filters % kFloatBlock != 0;  // of the last block
  all.each([&](ByteSums& sums, int p, int c) UNFLIP_LAMBDA_INLINE {
    const __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sums.v), _mm512_loadu_ps(t.scale + c));
    if (half && c == (Blocks - 1) * kFloatBlock)
      _mm256_storeu_ps(t.out[p] + c, _mm512_castps512_ps256(y));
    else
      _mm512_storeu_ps(t.out[p] + c, y);
  });
}

template <int Pixels>
void byte_tile(const ByteTile& t) {
  switch ((t.filters + kFloatBlock - 1) / kFloatBlock) {
    case 1: return byte_tile<Pixels, 1>(t);
    case 2: return byte_tile<Pixels, 2>(t);
    case 3: return byte_tile<Pixels, 3>(t);
    default: return byte_tile<Pixels, 4>(t);
  }
}

// -------------------------------------------------------------------------------------------------------- with a max pool

// The pixels of a tile: two rows by two columns.
enum Corner { kTopEven, kTopOdd, kBottomEven, kBottomOdd, kCorners };

UNFLIP_INLINE __m512i larger(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }

// One window after another, with N blocks of filters. The sums of a tile are in registers, [corner][block].
template <int N>
void byte_pool_row(const BytePoolRow& r) {
  const int64_t block = int64_t{r.step_count + r.rest_count} * kStep;
  __m512i top[N], bottom[N];  // of the odd column before
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) top[n] = bottom[n] = _mm512_set1_epi32(INT32_MIN);
  const __mmask16 last = r.filters % kFloatBlock ? 0xFF : 0xFFFF;  // of the last block's floats
  const uint8_t *even[2] = {r.input[0], r.input[1]}, *rest[2] = {r.rest[0], r.rest[1]};
  int32_t* partial = r.partial;
  float* out = r.out;
  for (int x = 0; x < r.pixels; x += 2) {
    const bool two = x + 1 < r.pixels;
    const int64_t right = two ? r.right : 0, rest_right = two ? kByteGroup : 0;
    RegisterTile<ByteSums, kCorners, N> all;
    all.each([](ByteSums& sums, int, int) UNFLIP_LAMBDA_INLINE { sums.v = _mm512_setzero_si512(); });
    const int8_t* w = r.weights;
    for (int s = 0; s < r.step_count; s++, w += kStep) {
      const int64_t step = r.steps[s];
      all.each([&](ByteSums& sums, int corner, int c) UNFLIP_LAMBDA_INLINE {
        const uint8_t* in = even[corner / 2] + corner % 2 * right + step;
        add_products(sums.v, broadcast_four(in), _mm512_loadu_si512(w + c / kFloatBlock * block));
      });
    }
    for (int s = 0; s < r.rest_count; s++, w += kStep)
      all.each([&](ByteSums& sums, int corner, int c) UNFLIP_LAMBDA_INLINE {
        const uint8_t* in = rest[corner / 2] + corner % 2 * rest_right + s * r.rest_stride;
        add_products(sums.v, broadcast_four(in), _mm512_loadu_si512(w + c / kFloatBlock * block));
      });
    __m512i v[kCorners * N];
    all.each([&](ByteSums& sums, int corner, int c) UNFLIP_LAMBDA_INLINE { v[corner * N + c / kFloatBlock] = sums.v; });
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const __m512i te = v[kTopEven * N + n], to = v[kTopOdd * N + n], be = v[kBottomEven * N + n], bo = v[kBottomOdd * N + n];
      const __m512i odd = larger(to, bo), own = larger(larger(te, be), larger(odd, top[n]));
      const __m512i sum = larger(own, _mm512_load_si512(partial + n * kFloatBlock));
      _mm512_store_si512(partial + n * kFloatBlock, larger(larger(be, bo), bottom[n]));
      top[n] = odd;
      bottom[n] = bo;
      if (out) {
        const __m512i flipped = _mm512_xor_si512(sum, _mm512_loadu_si512(r.flip + n * kFloatBlock));
        const __m512i whole = _mm512_add_epi32(flipped, _mm512_loadu_si512(r.plus + n * kFloatBlock));
        const __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_loadu_ps(r.scale + n * kFloatBlock));
        _mm512_mask_storeu_ps(out + n * kFloatBlock, n + 1 < N ? 0xFFFF : last, y);
      }
    }
    for (int i = 0; i < 2; i++) even[i] += 2 * r.right, rest[i] += 2 * kByteGroup;
    partial += r.partial_stride;
    if (out) out += r.out_stride;
  }
}

}  // namespace

void avx512_byte_tile(const ByteTile& t) {
  switch (t.pixels) {
    case 1: return byte_tile<1>(t);
    case 2: return byte_tile<2>(t);
    case 3: return byte_tile<3>(t);
    case 4: return byte_tile<4>(t);
    case 5: return byte_tile<5>(t);
    default: return byte_tile<6>(t);
  }
}

// 16 pixels at a time: the words that contain their bytes, one per lane of 32 bits, rotated to the byte's place.
void avx512_gather_bytes(const ByteGather& g) {
  alignas(64) uint16_t word[32] = {};
  alignas(64) int32_t rotation[16];
  for (int i = 0; i < 16; i++) {
    word[2 * i] = static_cast<uint16_t>(i * g.step / 2);
    rotation[i] = 32 - i * g.step % 2 * 8;
  }
  const __m512i words = _mm512_load_si512(word), low = _mm512_set1_epi32(0xFF);
  for (int first = 0; first < g.pixels; first += 16) {
    const int pixels = g.pixels - first < 16 ? g.pixels - first : 16, bytes = (pixels - 1) * g.step + 1;
    const __mmask64 front = bytes < 64 ? (uint64_t{1} << bytes) - 1 : ~uint64_t{0};
    const __mmask64 back = bytes > 64 ? (uint64_t{1} << (bytes - 64)) - 1 : 0;
    __m512i four = _mm512_setzero_si512(), place = low, rotations = _mm512_load_si512(rotation);
    for (int i = 0; i < g.count; i++) {
      const uint8_t* from = g.from[i] + first * g.step;
      const __m512i a = _mm512_maskz_loadu_epi8(front, from), b = _mm512_maskz_loadu_epi8(back, from + 64);
      const __m512i byte = _mm512_rolv_epi32(_mm512_permutex2var_epi16(a, words, b), rotations);
      four = _mm512_or_si512(four, _mm512_and_si512(byte, place));
      place = _mm512_slli_epi32(place, 8);
      rotations = _mm512_add_epi32(rotations, _mm512_set1_epi32(8));
    }
    _mm512_mask_storeu_epi32(g.to + first * kByteGroup, static_cast<__mmask16>((1u << pixels) - 1), four);
  }
}

void avx512_byte_pool_row(const BytePoolRow& r) {
  switch ((r.filters + kFloatBlock - 1) / kFloatBlock) {
    case 1: return byte_pool_row<1>(r);
    case 2: return byte_pool_row<2>(r);
    case 3: return byte_pool_row<3>(r);
    default: return byte_pool_row<4>(r);
  }
}

}  // namespace unflip
#endif
