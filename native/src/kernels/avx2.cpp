// Kernels for x86-64 with AVX2, FMA, BMI2 and POPCNT. Flags of this file: -mavx2 -mfma -mbmi2 -mpopcnt
#include "avx2.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "activations.h"
#include "avx2_stem.h"
#include "bytes.h"
#include "cpu.h"
#include "depthwise.h"
#include "epilogue.h"
#include "stem.h"
#include "sum_abs.h"

namespace unflip {
namespace {

// 8 floats, for epilogue.h.
struct Wide {
  static constexpr int kWidth = 8;
  using Eight = Wide;
  using Bits = uint8_t;
  static constexpr int kTile = 8;
  static constexpr bool kFixedSteps = true;
  static constexpr bool kKeepsSteps = true;
  using Mask = __m256;
  __m256 x;

  static Wide load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Wide set(float v) { return {_mm256_set1_ps(v)}; }
  static Wide from_counts(const uint16_t* p) {
    __m128i counts = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(counts))};
  }
  static Wide fused(Wide a, Wide b, Wide c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
  void store(float* p) const { _mm256_storeu_ps(p, x); }
  Wide operator+(Wide o) const { return {_mm256_add_ps(x, o.x)}; }
  Wide operator-(Wide o) const { return {_mm256_sub_ps(x, o.x)}; }
  Wide operator*(Wide o) const { return {_mm256_mul_ps(x, o.x)}; }
  Wide operator/(Wide o) const { return {_mm256_div_ps(x, o.x)}; }
  static Wide larger(Wide a, Wide b) { return {_mm256_max_ps(a.x, b.x)}; }
  static Mask above(Wide a, Wide b) { return _mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ); }
  static Mask at_least(Wide a, Wide b) { return _mm256_cmp_ps(a.x, b.x, _CMP_GE_OQ); }
  static Wide choose(Mask m, Wide a, Wide b) { return {_mm256_blendv_ps(b.x, a.x, m)}; }
  static uint8_t bits(Mask m) { return static_cast<uint8_t>(_mm256_movemask_ps(m)); }

  struct Number {
    __m256i n;
    static Number zero() { return {_mm256_setzero_si256()}; }
    static Number whole(Wide v) { return {_mm256_cvttps_epi32(v.x)}; }
    static Number count(Number v, Mask m) { return {_mm256_sub_epi32(v.n, _mm256_castps_si256(m))}; }
    Wide floats() const { return {_mm256_cvtepi32_ps(n)}; }
    static uint8_t digit(Number v, int p) {  // moves bit p to the sign bit
      __m256i top = _mm256_sll_epi32(v.n, _mm_cvtsi32_si128(31 - p));
      return static_cast<uint8_t>(_mm256_movemask_ps(_mm256_castsi256_ps(top)));
    }
  };

  struct Sums {
    __m256d low, high;
    static Sums zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
    void add(Wide v) {
      const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.f), v.x);
      low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(size)));
      high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(size, 1)));
    }
    Sums operator+(Sums o) const { return {_mm256_add_pd(low, o.low), _mm256_add_pd(high, o.high)}; }
    double total() const {
      const __m256d four = _mm256_add_pd(low, high);
      const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
      return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }
  };
  static Wide look_up(const float* table, const int* first, Number n) {
    const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    return {_mm256_i32gather_ps(table, _mm256_add_epi32(at, n.n), sizeof(float))};
  }
};

// The sums of a float tile. A chain of structures instead of an array, because compilers keep arrays of vectors in memory.

// N pixels by 16 filters.
template <int N>
struct Rows : Rows<N - 1> {
  const float* in;
  __m256 low, high;

  UNFLIP_INLINE void clear() {
    Rows<N - 1>::clear();
    low = high = _mm256_setzero_ps();
  }
  UNFLIP_INLINE void aim(const FloatTile& t, int segment) {
    Rows<N - 1>::aim(t, segment);
    in = t.input[N - 1] + t.segments[segment];
  }
  UNFLIP_INLINE void add(int64_t k, __m256 w0, __m256 w1) {
    Rows<N - 1>::add(k, w0, w1);
    const __m256 x = _mm256_broadcast_ss(in + k);
    low = _mm256_fmadd_ps(x, w0, low);
    high = _mm256_fmadd_ps(x, w1, high);
  }
  UNFLIP_INLINE void store(const FloatTile& t) const {
    Rows<N - 1>::store(t);
    _mm256_storeu_ps(t.out[N - 1], low);
    if (t.filters > 8) _mm256_storeu_ps(t.out[N - 1] + 8, high);
  }
};

template <>
struct Rows<0> {
  UNFLIP_INLINE void clear() {}
  UNFLIP_INLINE void aim(const FloatTile&, int) {}
  UNFLIP_INLINE void add(int64_t, __m256, __m256) {}
  UNFLIP_INLINE void store(const FloatTile&) const {}
};

template <int Pixels>
void float_rows(const FloatTile& t) {
  Rows<Pixels> rows;
  rows.clear();
  const float* w = t.weights;
  for (int s = 0; s < t.segment_count; s++) {
    rows.aim(t, s);
    for (int64_t k = 0; k < t.segment_length; k++, w += kFloatBlock) rows.add(k, _mm256_loadu_ps(w), _mm256_loadu_ps(w + 8));
  }
  rows.store(t);
}

// One pixel by N blocks of 16 filters. With a single block each addition would wait for the one before.
template <int N>
struct Columns : Columns<N - 1> {
  __m256 low, high;

  UNFLIP_INLINE void clear() {
    Columns<N - 1>::clear();
    low = high = _mm256_setzero_ps();
  }
  UNFLIP_INLINE void add(__m256 x, const float* w, int64_t block) {
    Columns<N - 1>::add(x, w, block);
    low = _mm256_fmadd_ps(x, _mm256_loadu_ps(w + (N - 1) * block), low);
    high = _mm256_fmadd_ps(x, _mm256_loadu_ps(w + (N - 1) * block + 8), high);
  }
  UNFLIP_INLINE void store(const FloatTile& t) const {
    Columns<N - 1>::store(t);
    const int first = (N - 1) * kFloatBlock;
    if (first < t.filters) _mm256_storeu_ps(t.out[0] + first, low);
    if (first + 8 < t.filters) _mm256_storeu_ps(t.out[0] + first + 8, high);
  }
};

template <>
struct Columns<0> {
  UNFLIP_INLINE void clear() {}
  UNFLIP_INLINE void add(__m256, const float*, int64_t) {}
  UNFLIP_INLINE void store(const FloatTile&) const {}
};

template <int Blocks>
void float_columns(const FloatTile& t) {
  const int64_t block = int64_t{t.segment_count} * t.segment_length * kFloatBlock;
  Columns<Blocks> columns;
  columns.clear();
  const float* w = t.weights;
  for (int s = 0; s < t.segment_count; s++) {
    const float* in = t.input[0] + t.segments[s];
    for (int64_t k = 0; k < t.segment_length; k++, w += kFloatBlock) columns.add(_mm256_broadcast_ss(in + k), w, block);
  }
  columns.store(t);
}

void float_tile(const FloatTile& t) {
  switch (t.pixels) {
    case 1: break;
    case 2: return float_rows<2>(t);
    case 3: return float_rows<3>(t);
    case 4: return float_rows<4>(t);
    case 5: return float_rows<5>(t);
    default: return float_rows<6>(t);
  }
  switch ((t.filters + kFloatBlock - 1) / kFloatBlock) {
    case 1: return float_columns<1>(t);
    case 2: return float_columns<2>(t);
    case 3: return float_columns<3>(t);
    default: return float_columns<4>(t);
  }
}

// ----------------------------------------------------------------------------------------------------- 8-bit convolution
// Products of unsigned and signed bytes may exceed 16 bits, where the instruction for them saturates. So bytes are widened to 16
// bits. An instruction then sums two products in 32 bits.

// The sums of 8 filters.
struct ByteSums {
  static constexpr int kWidth = kLanes;
  __m256i v;

  void put(const int32_t* minus, const float* scale, float* to) const {
    const __m256i sum = _mm256_sub_epi32(v, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(minus)));
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(scale)));
  }
};

// One pixel: the even numbers (0 and 2 of each four) and the odd ones separately.
struct Widened {
  __m256i even, odd;
  static UNFLIP_INLINE Widened of_weights(const int8_t* w) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
  }
  static UNFLIP_INLINE Widened of_input(const uint8_t* in) {
    int32_t four;
    __builtin_memcpy(&four, in, sizeof four);
    const __m256i bytes = _mm256_set1_epi32(four);
    return {_mm256_and_si256(bytes, _mm256_set1_epi16(255)), _mm256_srli_epi16(bytes, 8)};
  }
};

// One pixel by N vectors of 8 filters.
template <int N>
void byte_column(const ByteTile& t, const uint8_t* in, float* out) {
  constexpr int kStep = kFloatBlock * kByteGroup, kHalf = kStep / 2;
  const int64_t block = int64_t{t.step_count} * kStep;
  RegisterTile<ByteSums, 1, N> all;
  all.each([](ByteSums& sums, int, int) UNFLIP_LAMBDA_INLINE { sums.v = _mm256_setzero_si256(); });
  const int8_t* w = t.weights;
  for (int s = 0; s < t.step_count; s++, w += kStep) {
    const Widened x = Widened::of_input(in + t.steps[s]);
    all.each([&](ByteSums& sums, int, int c) UNFLIP_LAMBDA_INLINE {
      const Widened y = Widened::of_weights(w + c / kFloatBlock * block + c / kLanes % 2 * kHalf);
      sums.v = _mm256_add_epi32(sums.v, _mm256_madd_epi16(x.even, y.even));
      sums.v = _mm256_add_epi32(sums.v, _mm256_madd_epi16(x.odd, y.odd));
    });
  }
  all.each([&](ByteSums& sums, int, int c) UNFLIP_LAMBDA_INLINE {
    if (c < t.filters) sums.put(t.minus + c, t.scale + c, out + c);
  });
}

void byte_tile(const ByteTile& t) {
  for (int p = 0; p < t.pixels; p++) switch ((t.filters + kFloatBlock - 1) / kFloatBlock) {
      case 1: byte_column<2>(t, t.input[p], t.out[p]); break;
      case 2: byte_column<4>(t, t.input[p], t.out[p]); break;
      case 3: byte_column<6>(t, t.input[p], t.out[p]); break;
      default: byte_column<8>(t, t.input[p], t.out[p]);
    }
}

// Four steps of a segment at a time.
void widen(const uint8_t* in, const ByteTile& t, int16_t* to) {
  for (int s = 0; s < t.step_count; s += t.segment_steps) {
    const uint8_t* from = in + t.steps[s];
    int k = 0;
    for (; k + 4 <= t.segment_steps; k += 4, from += 4 * kByteGroup, to += 4 * kByteGroup) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_cvtepu8_epi16(bytes));
    }
    for (; k < t.segment_steps; k++, from += kByteGroup, to += kByteGroup) {
      int32_t four;
      __builtin_memcpy(&four, from, sizeof four);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_cvtepu8_epi16(_mm_cvtsi32_si128(four)));
    }
  }
}

// The sums of 16 filters at a time are those of one line of a stem.
template <int P>
void wide_byte_tile_of(const ByteTile& t) {
  const int64_t numbers = int64_t{t.step_count} * kByteGroup;
  for (int p = 0; p < P; p++) widen(t.input[p], t, t.wide_input + p * numbers);
  const int16_t* line = t.wide_input;
  StemProducts products;
  products.lines = &line;
  products.line_count = 1;
  products.tile = numbers;
  products.steps = static_cast<int>(numbers / kWideGroup);
  products.weights = t.wide_weights;
  for (int f = 0; f < t.filters; f += kFloatBlock, products.weights += numbers * kFloatBlock) {
    alignas(32) int32_t sums[P * kFloatBlock];
    WholeStem::add_products<P, 2>(products, sums);
    for (int p = 0; p < P; p++)
      for (int c = f; c < f + kFloatBlock && c < t.filters; c += kLanes) {
        const ByteSums part = {_mm256_load_si256(reinterpret_cast<const __m256i*>(sums + p * kFloatBlock + c - f))};
        part.put(t.minus + c, t.scale + c, t.out[p] + c);
      }
  }
}

void wide_byte_tile(const ByteTile& t) {
  switch (t.pixels) {
    case 1: return wide_byte_tile_of<1>(t);
    case 2: return wide_byte_tile_of<2>(t);
    case 3: return wide_byte_tile_of<3>(t);
    case 4: return wide_byte_tile_of<4>(t);
    case 5: return wide_byte_tile_of<5>(t);
    default: return wide_byte_tile_of<6>(t);
  }
}

// Four filters at a time, so that the window's words are loaded once for all four.
void differences(const uint64_t* window, const uint64_t* weights, int words, int filters, int32_t* out) {
  int f = 0;
  for (; f + 4 <= filters; f += 4, weights += int64_t{4} * words) {
    int64_t a = 0, b = 0, c = 0, d = 0;
    for (int k = 0; k < words; k++) {
      a += __builtin_popcountll(window[k] ^ weights[k]);
      b += __builtin_popcountll(window[k] ^ weights[words + k]);
      c += __builtin_popcountll(window[k] ^ weights[2 * words + k]);
      d += __builtin_popcountll(window[k] ^ weights[3 * words + k]);
    }
    out[f] = static_cast<int32_t>(a);
    out[f + 1] = static_cast<int32_t>(b);
    out[f + 2] = static_cast<int32_t>(c);
    out[f + 3] = static_cast<int32_t>(d);
  }
  for (; f < filters; f++, weights += words) {
    int64_t sum = 0;
    for (int k = 0; k < words; k++) sum += __builtin_popcountll(window[k] ^ weights[k]);
    out[f] = static_cast<int32_t>(sum);
  }
}

// Vector v of three holds element (8 v + lane) / 3 of channel (8 v + lane) % 3: permute each channel the same way, then select.
//
//     a0 b0 c0 a1 b1 c1 a2 b2 | c2 a3 b3 c3 a4 b4 c4 a5 | b5 c5 a6 b6 c6 a7 b7 c7
template <int V>
UNFLIP_INLINE __m256 interleaved(__m256 a, __m256 b, __m256 c) {
  constexpr int kFirst = 8 * V;
  constexpr auto lanes_of = [](int channel) {
    int mask = 0;
    for (int lane = 0; lane < 8; lane++) mask |= ((kFirst + lane) % 3 == channel) << lane;
    return mask;
  };
  constexpr int kOfB = lanes_of(1), kOfC = lanes_of(2);
  const __m256i from = _mm256_setr_epi32(kFirst / 3, (kFirst + 1) / 3, (kFirst + 2) / 3, (kFirst + 3) / 3, (kFirst + 4) / 3,
                                         (kFirst + 5) / 3, (kFirst + 6) / 3, (kFirst + 7) / 3);
  const __m256 ab = _mm256_blend_ps(_mm256_permutevar8x32_ps(a, from), _mm256_permutevar8x32_ps(b, from), kOfB);
  return _mm256_blend_ps(ab, _mm256_permutevar8x32_ps(c, from), kOfC);
}

void interleave3(const float* from, int64_t plane, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8, to += 24) {
    const __m256 a = _mm256_loadu_ps(from + i), b = _mm256_loadu_ps(from + plane + i);
    const __m256 c = _mm256_loadu_ps(from + 2 * plane + i);
    _mm256_storeu_ps(to, interleaved<0>(a, b, c));
    _mm256_storeu_ps(to + 8, interleaved<1>(a, b, c));
    _mm256_storeu_ps(to + 16, interleaved<2>(a, b, c));
  }
  for (; i < count; i++)
    for (int c = 0; c < 3; c++) *to++ = from[c * plane + i];
}

constexpr Kernels make_kernels(const char* name, void (*look_up_tile)(const LookUpTile&)) {
  Kernels kernels = {name,
                     epilogue<Wide>,
                     epilogue_counts<Wide>,
                     sum_counts<Wide>,
                     pool<Wide>,
                     sum_abs<Wide>,
                     activation,
                     float_tile,
                     stem_tile<Wide, 2>,
                     stem_lines<Wide>,
                     depthwise_tile<Wide, 2>,
                     to_bytes,
                     interleave_bytes,
                     byte_tile,
                     differences,
                     avx2_pair_numbers,
                     look_up_tile,
                     true};
  kernels.wide_byte_tile = wide_byte_tile;
  kernels.whole_stem_tile = whole_stem_tile<WholeStem, 2>;
  kernels.whole_stem_lines = stem_lines<Shorts, int16_t>;
  kernels.interleave3 = interleave3;
  return kernels;
}

constexpr Kernels kAvx2 = make_kernels("avx2", avx2_look_up_tile);
constexpr Kernels kAvx2Intrinsics = make_kernels("avx2-intrinsics", avx2_look_up_tile_intrinsics);

}  // namespace

const Kernels* avx2_kernels() { return cpu_has_avx2() ? &kAvx2 : nullptr; }
const Kernels* avx2_intrinsics_kernels() { return cpu_has_avx2() ? &kAvx2Intrinsics : nullptr; }

}  // namespace unflip
#endif
