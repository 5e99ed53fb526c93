// Tiles of popcount.h with AVX-512. Flags of this file: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vpopcntdq
// -mavx2 -mfma -mbmi2 -mpopcnt
//
// A tile has eight vectors of ones and eight of counted carries in registers: 32 filters (two vectors) of four pixels, or 16
// filters of eight pixels. One pair of words does this for each of the eight:
//
//     x     = w0 ^ a0                                          a0, a0 ^ a1: one word of memory in all lanes
//     next  = (w0 ^ w1) ^ ones ^ (a0 ^ a1)
//     carry = next == ones ? x : ones
//     twos += popcount(carry)
//
// `next` and `ones` change places from one pair to the next, and the carry takes the place of the old ones. So no vector is copied
// but w0 ^ w1. Instructions in assembly, because the compiler would write their results to other registers and copy these.
#include "avx512.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "avx512_vectors.h"
#include "epilogue.h"
#include "popcount.h"

namespace unflip {
namespace {

// Truth tables for ternary logic: the result for input bits abc = 111, 110, ... 000.
constexpr int kXor = 0b10010110;
constexpr int kCarry = 0b11010100;  // b == c ? a : b

UNFLIP_INLINE __m512i load(const uint32_t* p) { return _mm512_load_si512(p); }
UNFLIP_INLINE __m512i spread(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }

UNFLIP_INLINE void xor_both(__m512i& a, __m512i b, __m512i c) {
  asm("vpternlogd %3, %2, %1, %0" : "+v"(a) : "v"(b), "v"(c), "i"(kXor));
}

// ones becomes the number of carries in each lane.
UNFLIP_INLINE void count_carries(__m512i& ones, __m512i x, __m512i next) {
  asm("vpternlogd %3, %2, %1, %0\n\tvpopcntd %0, %0" : "+v"(ones) : "v"(x), "v"(next), "i"(kCarry));
}

UNFLIP_INLINE void add(__m512i& sum, __m512i a) { asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(a)); }

// P pixels by F vectors of 16 filters: vector i belongs to pixel i / F.
template <int P, int F>
struct Sums {
  static constexpr int N = P * F;
  __m512i ones[N], twos[N];
};

// Leaves the new ones in `next`; `ones` has no use afterwards. a: the windows of the pixels. k: the place of the pair.
template <int P, int F>
UNFLIP_INLINE void add_pair(__m512i* ones, __m512i* next, __m512i* twos, const uint32_t* const* a, int64_t k, const uint32_t* w) {
#pragma GCC unroll 8
  for (int i = 0; i < P * F; i++) {
    const __m512i x = _mm512_xor_si512(load(w + i % F * 16), spread(a[i / F] + k));
    next[i] = load(w + (F + i % F) * 16);
    xor_both(next[i], ones[i], spread(a[i / F] + k + 1));
    count_carries(ones[i], x, next[i]);
    add(twos[i], ones[i]);
  }
}

// The ones start with the single word before the pairs, if there is one.
template <int P, int F>
UNFLIP_INLINE void begin(Sums<P, F>& s, const uint32_t* const* a, const uint32_t* w, bool single) {
#pragma GCC unroll 8
  for (int i = 0; i < P * F; i++) {
    s.ones[i] = s.twos[i] = _mm512_setzero_si512();
    if (single) s.ones[i] = _mm512_xor_si512(load(w + i % F * 16), spread(a[i / F] + 1));
  }
}

// Leaves the counts of P pixels by 16 * F filters in `sum`.
template <int P, int F>
UNFLIP_INLINE void count(const PopcountTile& t, const uint32_t* const* windows, __m512i* sum) {
  Sums<P, F> sums;
  const uint32_t *a[P], *w = t.weights;
#pragma GCC unroll 8
  for (int p = 0; p < P; p++) a[p] = windows[p];
  if (t.words % 2) {
    begin(sums, a, w, true);
    w += 16 * F;
  } else {
    begin(sums, a, w, false);
  }
  __m512i next[P * F];
  const int32_t* pair = t.pairs;
  int pairs = t.words / 2;
  for (; pairs > 1; pairs -= 2, pair += 2, w += 64 * F) {
    add_pair<P, F>(sums.ones, next, sums.twos, a, pair[0], w);
    add_pair<P, F>(next, sums.ones, sums.twos, a, pair[1], w + 32 * F);
  }
  if (pairs) {
    add_pair<P, F>(sums.ones, next, sums.twos, a, pair[0], w);
#pragma GCC unroll 8
    for (int i = 0; i < P * F; i++) sums.ones[i] = next[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < P * F; i++)
    sum[i] = _mm512_add_epi32(_mm512_add_epi32(sums.twos[i], sums.twos[i]), _mm512_popcnt_epi32(sums.ones[i]));
}

template <int P, int F>
void run_tile(const PopcountTile& t) {
  __m512i sum[P * F];
  count<P, F>(t, t.windows, sum);
#pragma GCC unroll 8
  for (int i = 0; i < P * F; i++)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(t.counts + i * 16), _mm512_cvtepi32_epi16(sum[i]));
}

// ------------------------------------------------------------------------------------------------------------------- epilogue

// The counts of a tile, as a source of epilogue.h.
template <int F>
struct TileSource {
  const __m512i* sum;
  const Counts& counts;
  const uint16_t* class_of;  // of the first pixel
  template <class V>
  UNFLIP_INLINE V get(int64_t p, int c) const {
    const float* base = counts.bases + class_of[p] * counts.base_stride;
    const V count{_mm512_cvtepi32_ps(sum[p * F + c / 16])};
    return V::load(counts.scale + c) * V::fused(V::set(-counts.multiple), count, V::load(base + c));
  }
};

// The places that the epilogue writes. Often it also reads them, because a sum replaces its shortcut.
template <int P, int F>
UNFLIP_INLINE void prefetch(const float* pixel, int64_t stride) {
#pragma GCC unroll 8
  for (int i = 0; i < P * F; i++) _mm_prefetch(pixel + i / F * stride + i % F * 16, _MM_HINT_T0);
}

// Not inlined, and with local copies as in epilogue_rows().
template <int P, int F, class Steps>
__attribute__((noinline)) void count_and_finish(const Job& job_, const Steps& steps_, const Counts& counts_,
                                                const PopcountTile& tile_, int first, int last, int channel) {
  const Job job = job_;
  const Steps steps = steps_;
  const Counts counts = counts_;
  const PopcountTile tile = tile_;
  const EpilogueParams& f = job.params;
  for (int pixel = first; pixel < last; pixel += P) {
    if (job.target.out) prefetch<P, F>(job.target.out + int64_t{pixel} * f.stride + channel, f.stride);
    __m512i sum[P * F];
    count<P, F>(tile, tile.windows + (pixel - first), sum);
    asm volatile("" ::: "memory");  // otherwise parameters of the epilogue take registers while the tile is counted
    const int y = pixel / f.width, x = pixel - y * f.width;
    const Place at{pixel, channel, f.code.at(y, x) + channel / 8};
    epilogue_vectors<Wide16, P, F>(job, steps, TileSource<F>{sum, counts, counts.class_of + pixel}, 0, 0, at);
  }
}

// ------------------------------------------------------------------------------------------------------------------- windows

// Every second word ^= the one before.
UNFLIP_INLINE __m512i paired(__m512i v) { return _mm512_xor_si512(v, _mm512_slli_epi64(v, 32)); }
UNFLIP_INLINE __m256i paired(__m256i v) { return _mm256_xor_si256(v, _mm256_slli_epi64(v, 32)); }

// Writes up to 15 words more.
UNFLIP_INLINE void pair_all(uint32_t* words, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) _mm512_storeu_si512(words + i, paired(_mm512_loadu_si512(words + i)));
}

// Copies a run of bytes, which is paired later or immediately. All write somewhat more than the run.
template <int Bytes>
struct ShortRun {  // up to `Bytes` bytes
  static constexpr bool kPairs = false;
  static UNFLIP_INLINE void copy(uint8_t* to, const uint8_t* from, int64_t) { __builtin_memcpy(to, from, Bytes); }
};

struct PairedRun32 {  // up to 32 bytes, a multiple of 8
  static constexpr bool kPairs = true;
  static UNFLIP_INLINE void copy(uint8_t* to, const uint8_t* from, int64_t) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), paired(v));
  }
};

template <bool kPairNow>
struct LongRun {
  static constexpr bool kPairs = kPairNow;
  static UNFLIP_INLINE void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
      const __m512i v = _mm512_loadu_si512(from + i);
      _mm512_storeu_si512(to + i, kPairs ? paired(v) : v);
    }
  }
};

// Rows: the number of rows with one run each, or 0 to use the copy's own numbers. Windows are copied in order, because copying a
// window may overwrite the first bytes of the next.
template <class Run, int Rows>
void copy_windows(const WindowCopy& c) {
  const int words = popcount_words(c), step = popcount_window(words), rows = Rows ? Rows : c.rows, runs = Rows ? 1 : c.runs;
  const int64_t run = c.run, row_step = c.row_step, run_step = c.run_step, pixel_step = c.pixel_step;
  const uint8_t* from = c.from;
  uint32_t* window = c.to;
  for (int p = c.pixels; p; p--, from += pixel_step, window += step) {
    if (!Run::kPairs) window[0] = 0;  // before a single word
    uint8_t* to = reinterpret_cast<uint8_t*>(window + words % 2);
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < runs; i++, to += run) Run::copy(to, from + r * row_step + i * run_step, run);
    if (!Run::kPairs) __builtin_memset(to, 0, 8);  // the rest of the last word
  }
  if (!Run::kPairs) pair_all(c.to, int64_t{c.pixels} * step);
}

template <class Run>
void copy_any_windows(const WindowCopy& c) {
  if (c.rows == 3 && c.runs == 1) return copy_windows<Run, 3>(c);
  copy_windows<Run, 0>(c);
}

}  // namespace

void avx512_popcount_tile(const PopcountTile& t) {
  if (t.filters == 32) switch (t.pixels) {
      case 1: return run_tile<1, 2>(t);
      case 2: return run_tile<2, 2>(t);
      case 3: return run_tile<3, 2>(t);
      default: return run_tile<4, 2>(t);
    }
  switch (t.pixels) {
    case 1: return run_tile<1, 1>(t);
    case 2: return run_tile<2, 1>(t);
    case 3: return run_tile<3, 1>(t);
    case 4: return run_tile<4, 1>(t);
    case 5: return run_tile<5, 1>(t);
    case 6: return run_tile<6, 1>(t);
    case 7: return run_tile<7, 1>(t);
    default: return run_tile<8, 1>(t);
  }
}

void avx512_popcount_epilogue(const EpilogueParams& f, const EpilogueTarget& target, const Counts& counts,
                              const PopcountTile& tile, int first, int last, int channel) {
  const Job job{f, target};
  with_steps<Wide16>(job, [&](const auto& steps) {
    if (tile.filters == 32)
      count_and_finish<4, 2>(job, steps, counts, tile, first, last, channel);
    else
      count_and_finish<8, 1>(job, steps, counts, tile, first, last, channel);
  });
}

void avx512_copy_windows(const WindowCopy& c) {
  if (c.run <= 8) return copy_any_windows<ShortRun<8>>(c);
  if (c.run <= 16) return copy_any_windows<ShortRun<16>>(c);
  const bool pairs = c.run % 8 == 0;  // then no pair spans two runs
  if (pairs && c.run <= 32) return copy_any_windows<PairedRun32>(c);
  if (pairs) return copy_any_windows<LongRun<true>>(c);
  copy_any_windows<LongRun<false>>(c);
}

}  // namespace unflip
#endif
