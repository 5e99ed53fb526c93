// Kernels for WebAssembly with 128-bit vectors. Flags of this file: -msimd128, and -mrelaxed-simd for the module that uses it.
//
// One file of more than 400 lines, because all kernels use its few helpers for the two kinds of modules.
//
// x86 has only 16 such registers, so tiles are computed in parts. The tile of look_up.h is that of neon.cpp, in two halves.
//
// Relaxed instructions may give one of several results, but always the same one on one machine. Shuffles and selections are used
// only where all results are equal. A multiply-add may round once or twice. If it rounds twice, the relaxed kernels cannot be used,
// and the others compute fused multiply-adds in double precision: exact, but slow.
#include "kernels.h"

#if defined(__wasm_simd128__)
#include <wasm_simd128.h>

#include "activations.h"
#include "bytes.h"
#include "depthwise.h"
#include "epilogue.h"
#include "fused.h"
#include "look_up.h"
#include "stem.h"
#include "sum_abs.h"
#include "whole_stem.h"

// Small code is preferred to fast code, but loops over registers must be unrolled.
#define UNFLIP_UNROLL _Pragma("clang loop unroll(full)")

namespace unflip {
namespace {

#if defined(__wasm_relaxed_simd__)
UNFLIP_INLINE v128_t look_up16(v128_t table, v128_t index) { return wasm_i8x16_relaxed_swizzle(table, index); }
UNFLIP_INLINE v128_t select(v128_t mask, v128_t a, v128_t b) { return wasm_i32x4_relaxed_laneselect(a, b, mask); }
#else
UNFLIP_INLINE v128_t look_up16(v128_t table, v128_t index) { return wasm_i8x16_swizzle(table, index); }
UNFLIP_INLINE v128_t select(v128_t mask, v128_t a, v128_t b) { return wasm_v128_bitselect(a, b, mask); }
#endif

// -------------------------------------------------------------------------------------------------- fused multiply-adds

#if !defined(__wasm_relaxed_simd__)

// Lane by lane. Not inlined, because it is rarely needed.
__attribute__((noinline)) v128_t fused_lanes(v128_t a, v128_t b, v128_t c) {
  float x[4], y[4], z[4];
  wasm_v128_store(x, a);
  wasm_v128_store(y, b);
  wasm_v128_store(z, c);
  for (int i = 0; i < 4; i++) z[i] = fused_in_double(x[i], y[i], z[i]);
  return wasm_v128_load(z);
}

// Whether rounding a sum in double precision to a float may differ from rounding the exact sum: it looks like a tie of floats, or
// it is so small that floats have fewer digits.
UNFLIP_INLINE v128_t suspect(v128_t sum) {
  const v128_t digits = wasm_v128_and(sum, wasm_i64x2_const_splat(0x1FFFFFFF));
  const v128_t tie = wasm_i64x2_eq(digits, wasm_i64x2_const_splat(0x10000000));
  const v128_t small = wasm_f64x2_lt(wasm_f64x2_abs(sum), wasm_f64x2_const_splat(0x1p-125));
  return wasm_v128_or(tie, wasm_v128_and(small, wasm_f64x2_ne(sum, wasm_f64x2_const_splat(0))));
}

// Not inlined, for a small module.
struct InDouble {
  static __attribute__((noinline)) v128_t fused(v128_t a, v128_t b, v128_t c) {
    const v128_t low = sum_of(a, b, c), high = sum_of(upper(a), upper(b), upper(c));
    if (wasm_v128_any_true(wasm_v128_or(suspect(low), suspect(high)))) return fused_lanes(a, b, c);
    return wasm_i32x4_shuffle(wasm_f32x4_demote_f64x2_zero(low), wasm_f32x4_demote_f64x2_zero(high), 0, 1, 4, 5);
  }

 private:
  static UNFLIP_INLINE v128_t upper(v128_t v) { return wasm_i32x4_shuffle(v, v, 2, 3, 2, 3); }
  static UNFLIP_INLINE v128_t sum_of(v128_t a, v128_t b, v128_t c) {
    const v128_t product = wasm_f64x2_mul(wasm_f64x2_promote_low_f32x4(a), wasm_f64x2_promote_low_f32x4(b));
    return wasm_f64x2_add(product, wasm_f64x2_promote_low_f32x4(c));
  }
};

#endif

// For epilogue.h, which needs `fused` only where the result is exact.
struct NotFused {
  static UNFLIP_INLINE v128_t fused(v128_t a, v128_t b, v128_t c) { return wasm_f32x4_add(wasm_f32x4_mul(a, b), c); }
};

#if defined(__wasm_relaxed_simd__)
struct Relaxed {
  static UNFLIP_INLINE v128_t fused(v128_t a, v128_t b, v128_t c) { return wasm_f32x4_relaxed_madd(a, b, c); }
};

// (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, whose last term is lost if the product is rounded.
bool rounds_once() {
  volatile float factor = 0x1.001p0f, rest = -0x1.002p0f;
  const v128_t x = wasm_f32x4_splat(factor);
  const v128_t found = wasm_f32x4_relaxed_madd(x, x, wasm_f32x4_splat(rest));
  return wasm_i32x4_all_true(wasm_f32x4_eq(found, wasm_f32x4_const_splat(0x1p-24f)));
}
#endif

// 8 floats, for epilogue.h.
template <class Fused>
struct Double {
  static constexpr int kWidth = 8;
  using Eight = Double;
  using Bits = uint8_t;
  static constexpr int kTile = 4;
  static constexpr bool kFixedSteps = false;  // for a small module
  static constexpr bool kKeepsSteps = false;
  struct Mask {
    v128_t a, b;
  };
  v128_t a, b;

  static Double load(const float* p) { return {wasm_v128_load(p), wasm_v128_load(p + 4)}; }
  static Double set(float v) { return {wasm_f32x4_splat(v), wasm_f32x4_splat(v)}; }
  static Double from_counts(const uint16_t* p) {
    const v128_t n = wasm_v128_load(p);
    return {wasm_f32x4_convert_i32x4(wasm_u32x4_extend_low_u16x8(n)), wasm_f32x4_convert_i32x4(wasm_u32x4_extend_high_u16x8(n))};
  }
  static Double fused(Double x, Double y, Double z) { return {Fused::fused(x.a, y.a, z.a), Fused::fused(x.b, y.b, z.b)}; }
  void store(float* p) const {
    wasm_v128_store(p, a);
    wasm_v128_store(p + 4, b);
  }
  Double operator+(Double o) const { return {wasm_f32x4_add(a, o.a), wasm_f32x4_add(b, o.b)}; }
  Double operator-(Double o) const { return {wasm_f32x4_sub(a, o.a), wasm_f32x4_sub(b, o.b)}; }
  Double operator*(Double o) const { return {wasm_f32x4_mul(a, o.a), wasm_f32x4_mul(b, o.b)}; }
  Double operator/(Double o) const { return {wasm_f32x4_div(a, o.a), wasm_f32x4_div(b, o.b)}; }
  static Double larger(Double x, Double y) { return {wasm_f32x4_pmax(y.a, x.a), wasm_f32x4_pmax(y.b, x.b)}; }
  static Mask above(Double x, Double y) { return {wasm_f32x4_gt(x.a, y.a), wasm_f32x4_gt(x.b, y.b)}; }
  static Mask at_least(Double x, Double y) { return {wasm_f32x4_ge(x.a, y.a), wasm_f32x4_ge(x.b, y.b)}; }
  static Double choose(Mask m, Double x, Double y) { return {select(m.a, x.a, y.a), select(m.b, x.b, y.b)}; }
  static uint8_t bits(Mask m) { return static_cast<uint8_t>(wasm_i32x4_bitmask(m.a) | wasm_i32x4_bitmask(m.b) << 4); }

  struct Number {
    v128_t a, b;
    static Number zero() { return {wasm_i32x4_const_splat(0), wasm_i32x4_const_splat(0)}; }
    static Number whole(Double v) { return {wasm_i32x4_trunc_sat_f32x4(v.a), wasm_i32x4_trunc_sat_f32x4(v.b)}; }
    static Number count(Number n, Mask m) { return {wasm_i32x4_sub(n.a, m.a), wasm_i32x4_sub(n.b, m.b)}; }
    Double floats() const { return {wasm_f32x4_convert_i32x4(a), wasm_f32x4_convert_i32x4(b)}; }
    static uint8_t digit(Number n, int p) {  // moves bit p to the sign bit
      return bits(Mask{wasm_i32x4_shl(n.a, 31 - p), wasm_i32x4_shl(n.b, 31 - p)});
    }
  };

  struct Sums {
    v128_t x[4];
    static Sums zero() {
      const v128_t z = wasm_f64x2_const_splat(0);
      return {{z, z, z, z}};
    }
    void add(Double v) {
      const v128_t low = wasm_f32x4_abs(v.a), high = wasm_f32x4_abs(v.b);
      x[0] = wasm_f64x2_add(x[0], wasm_f64x2_promote_low_f32x4(low));
      x[1] = wasm_f64x2_add(x[1], wasm_f64x2_promote_low_f32x4(wasm_i32x4_shuffle(low, low, 2, 3, 2, 3)));
      x[2] = wasm_f64x2_add(x[2], wasm_f64x2_promote_low_f32x4(high));
      x[3] = wasm_f64x2_add(x[3], wasm_f64x2_promote_low_f32x4(wasm_i32x4_shuffle(high, high, 2, 3, 2, 3)));
    }
    Sums operator+(Sums o) const {
      return {{wasm_f64x2_add(x[0], o.x[0]), wasm_f64x2_add(x[1], o.x[1]), wasm_f64x2_add(x[2], o.x[2]),
               wasm_f64x2_add(x[3], o.x[3])}};
    }
    double total() const {
      const v128_t two = wasm_f64x2_add(wasm_f64x2_add(x[0], x[2]), wasm_f64x2_add(x[1], x[3]));
      return wasm_f64x2_extract_lane(two, 0) + wasm_f64x2_extract_lane(two, 1);
    }
  };
  static Double look_up(const float* table, const int* first, Number n) {
    int32_t at[kWidth];
    float t[kWidth];
    wasm_v128_store(at, n.a);
    wasm_v128_store(at + 4, n.b);
    for (int i = 0; i < kWidth; i++) t[i] = table[first[i] + at[i]];
    return load(t);
  }
};

using Wide = Double<NotFused>;

// ----------------------------------------------------------------------------------------------------- float convolution

// The sums of 16 filters.
template <class Fused>
struct FloatSums {
  static constexpr int kWidth = kLanes;  // RegisterTile counts vectors in steps of 8 channels
  v128_t v[4];
  UNFLIP_INLINE void clear() { v[0] = v[1] = v[2] = v[3] = wasm_f32x4_const_splat(0); }
  UNFLIP_INLINE void add(v128_t x, const float* w) {
    UNFLIP_UNROLL
    for (int i = 0; i < 4; i++) v[i] = Fused::fused(x, wasm_v128_load(w + 4 * i), v[i]);
  }
  UNFLIP_INLINE void store(float* out, int filters) const {
    wasm_v128_store(out, v[0]);
    wasm_v128_store(out + 4, v[1]);
    if (filters <= 8) return;
    wasm_v128_store(out + 8, v[2]);
    wasm_v128_store(out + 12, v[3]);
  }
};

constexpr int kFloatPart = 3;  // pixels by 16 filters, in 12 registers

// P pixels from `pixel` on, by the 16 filters from `filter` on.
template <class Fused, int P>
void float_part(const FloatTile& t, int pixel, int filter) {
  const int64_t block = int64_t{t.segment_count} * t.segment_length * kFloatBlock;
  RegisterTile<FloatSums<Fused>, P, 1> all;
  all.each([](FloatSums<Fused>& s, int, int) UNFLIP_LAMBDA_INLINE { s.clear(); });
  const float* w = t.weights + filter / kFloatBlock * block;
  for (int s = 0; s < t.segment_count; s++) {
    const float* in[P];
    UNFLIP_UNROLL
    for (int p = 0; p < P; p++) in[p] = t.input[pixel + p] + t.segments[s];
    for (int64_t k = 0; k < t.segment_length; k++, w += kFloatBlock)
      all.each([&](FloatSums<Fused>& sums, int p, int) UNFLIP_LAMBDA_INLINE { sums.add(wasm_v128_load32_splat(in[p] + k), w); });
  }
  all.each([&](FloatSums<Fused>& sums, int p, int)
               UNFLIP_LAMBDA_INLINE { sums.store(t.out[pixel + p] + filter, t.filters - filter); });
}

template <class Fused>
void float_tile(const FloatTile& t) {
  for (int filter = 0; filter < t.filters; filter += kFloatBlock)
    for (int pixel = 0; pixel < t.pixels; pixel += kFloatPart) switch (t.pixels - pixel) {
        case 1: float_part<Fused, 1>(t, pixel, filter); break;
        case 2: float_part<Fused, 2>(t, pixel, filter); break;
        default: float_part<Fused, kFloatPart>(t, pixel, filter);
      }
}

constexpr int kStemPart = 2;  // tiles by 16 filters, in 8 registers

// A tile in parts.
template <class One, class Most, class Tile>
void stem_parts(const Tile& t) {
  Tile part = t;
  for (int done = 0; done < t.tiles; done += kStemPart) {
    part.first = t.first + done;
    part.tiles = t.tiles - done < kStemPart ? t.tiles - done : kStemPart;
    if (part.tiles == 1)
      One(part).run();
    else
      Most(part).run();
  }
}

// ----------------------------------------------------------------------------------------------------- 8-bit convolution
// As in avx2.cpp: bytes are widened to 16 bits, the even ones and the odd ones separately, and an instruction sums two products.

struct Widened {
  v128_t even, odd;
  static UNFLIP_INLINE Widened of_weights(const int8_t* w) {
    const v128_t bytes = wasm_v128_load(w);
    return {wasm_i16x8_shr(wasm_i16x8_shl(bytes, 8), 8), wasm_i16x8_shr(bytes, 8)};
  }
  static UNFLIP_INLINE Widened of_input(const uint8_t* in) {
    const v128_t bytes = wasm_v128_load32_splat(in);
    return {wasm_v128_and(bytes, wasm_i16x8_const_splat(255)), wasm_u16x8_shr(bytes, 8)};
  }
};

// The sums of 16 filters.
struct ByteSums {
  static constexpr int kWidth = kLanes;
  v128_t v[4];
};

constexpr int kBytePart = 2;  // pixels by 16 filters, in 8 registers

template <int P>
void byte_part(const ByteTile& t, int filter) {
  constexpr int kStep = kFloatBlock * kByteGroup;
  const int64_t block = int64_t{t.step_count} * kStep;
  RegisterTile<ByteSums, P, 1> all;
  all.each([&](ByteSums& sums, int, int) UNFLIP_LAMBDA_INLINE {
    UNFLIP_UNROLL
    for (int i = 0; i < 4; i++) sums.v[i] = wasm_i32x4_const_splat(0);
  });
  const int8_t* w = t.weights + filter / kFloatBlock * block;
  const uint8_t* in[P];
  UNFLIP_UNROLL
  for (int p = 0; p < P; p++) in[p] = t.input[p];
  for (int s = 0; s < t.step_count; s++, w += kStep) {
    Widened x[P];
    UNFLIP_UNROLL
    for (int p = 0; p < P; p++) x[p] = Widened::of_input(in[p] + t.steps[s]);
    UNFLIP_UNROLL
    for (int i = 0; i < 4; i++) {
      const Widened y = Widened::of_weights(w + 16 * i);
      all.each([&](ByteSums& sums, int p, int) UNFLIP_LAMBDA_INLINE {
        sums.v[i] = wasm_i32x4_add(sums.v[i], wasm_i32x4_dot_i16x8(x[p].even, y.even));
        sums.v[i] = wasm_i32x4_add(sums.v[i], wasm_i32x4_dot_i16x8(x[p].odd, y.odd));
      });
    }
  }
  all.each([&](ByteSums& sums, int p, int) UNFLIP_LAMBDA_INLINE {
    UNFLIP_UNROLL
    for (int i = 0; i < 4; i++) {
      const int f = filter + 4 * i;
      if (f >= t.filters) return;
      const v128_t sum = wasm_i32x4_sub(sums.v[i], wasm_v128_load(t.minus + f));
      wasm_v128_store(t.out[p] + f, wasm_f32x4_mul(wasm_f32x4_convert_i32x4(sum), wasm_v128_load(t.scale + f)));
    }
  });
}

void byte_tile(const ByteTile& t) {
  for (int filter = 0; filter < t.filters; filter += kFloatBlock)
    if (t.pixels == 1)
      byte_part<1>(t, filter);
    else
      byte_part<kBytePart>(t, filter);
}

// 8 sums of whole numbers, for whole_stem.h.
struct WholeSums {
  static constexpr int kWidth = 8;
  v128_t a, b;
  static UNFLIP_INLINE WholeSums set(int32_t v) { return {wasm_i32x4_splat(v), wasm_i32x4_splat(v)}; }
  static UNFLIP_INLINE WholeSums load(const int32_t* p) { return {wasm_v128_load(p), wasm_v128_load(p + 4)}; }
  UNFLIP_INLINE void store(int32_t* p) const {
    wasm_v128_store(p, a);
    wasm_v128_store(p + 4, b);
  }
  UNFLIP_INLINE WholeSums operator+(WholeSums o) const { return {wasm_i32x4_add(a, o.a), wasm_i32x4_add(b, o.b)}; }
  UNFLIP_INLINE WholeSums operator-(WholeSums o) const { return {wasm_i32x4_sub(a, o.a), wasm_i32x4_sub(b, o.b)}; }
  UNFLIP_INLINE WholeSums times(uint32_t v) const {
    const v128_t all = wasm_u32x4_splat(v);
    return {wasm_i32x4_mul(a, all), wasm_i32x4_mul(b, all)};
  }
  template <int Bits>
  UNFLIP_INLINE WholeSums shifted() const {
    return {wasm_i32x4_shl(a, Bits), wasm_i32x4_shl(b, Bits)};
  }
};

struct WholeStem {
  using Vector = WholeSums;
  template <int Tiles, int N>
  static UNFLIP_INLINE void add_products(const StemProducts& p, int32_t* to) {
    add_stem_products<WholeStem, Tiles, N>(p, to);
  }
  static UNFLIP_INLINE void add(WholeSums& sum, const int16_t* x, const int16_t* w) {
    const v128_t two = wasm_v128_load32_splat(x);
    sum.a = wasm_i32x4_add(sum.a, wasm_i32x4_dot_i16x8(two, wasm_v128_load(w)));
    sum.b = wasm_i32x4_add(sum.b, wasm_i32x4_dot_i16x8(two, wasm_v128_load(w + 8)));
  }
  static UNFLIP_INLINE void put(WholeSums sum, const float* scale, float* to) {
    const v128_t low = wasm_f32x4_convert_i32x4(wasm_i32x4_shr(sum.a, 4));
    const v128_t high = wasm_f32x4_convert_i32x4(wasm_i32x4_shr(sum.b, 4));
    wasm_v128_store(to, wasm_f32x4_mul(low, wasm_v128_load(scale)));
    wasm_v128_store(to + 4, wasm_f32x4_mul(high, wasm_v128_load(scale + 4)));
  }
};

// 8 numbers of 16 bits.
struct Shorts {
  static constexpr int kWidth = 8;
  v128_t x;
  static Shorts load(const int16_t* p) { return {wasm_v128_load(p)}; }
  void store(int16_t* p) const { wasm_v128_store(p, x); }
  Shorts operator+(Shorts o) const { return {wasm_i16x8_add(x, o.x)}; }
  Shorts operator-(Shorts o) const { return {wasm_i16x8_sub(x, o.x)}; }
};

// ---------------------------------------------------------------------------------------------------- binary convolution

void differences(const uint64_t* window, const uint64_t* weights, int words, int filters, int32_t* out) {
  for (int f = 0; f < filters; f++, weights += words) {
    v128_t sum = wasm_i32x4_const_splat(0);
    int k = 0;
    for (; k + 2 <= words; k += 2) {
      const v128_t x = wasm_v128_xor(wasm_v128_load(window + k), wasm_v128_load(weights + k));
      const v128_t pairs = wasm_u16x8_extadd_pairwise_u8x16(wasm_i8x16_popcnt(x));
      sum = wasm_i32x4_add(sum, wasm_u32x4_extadd_pairwise_u16x8(pairs));
    }
    int32_t total = 0;
    if (k < words) total = __builtin_popcountll(window[k] ^ weights[k]);
    total += wasm_i32x4_extract_lane(sum, 0) + wasm_i32x4_extract_lane(sum, 1);
    out[f] = total + wasm_i32x4_extract_lane(sum, 2) + wasm_i32x4_extract_lane(sum, 3);
  }
}

void pair_numbers(const uint8_t* first, const uint8_t* second, int64_t bytes, uint16_t* out) {
  const v128_t mask = wasm_i8x16_const_splat(15);
  for (int64_t i = 0; i < bytes; i += 16) {
    const v128_t a = wasm_v128_load(first + i), b = wasm_v128_load(second + i);
    const v128_t low = wasm_v128_or(wasm_v128_and(a, mask), wasm_i8x16_shl(b, 4));  // b's nibble above a's
    const v128_t high = wasm_v128_or(wasm_u8x16_shr(a, 4), wasm_v128_andnot(b, mask));
    const v128_t n0 = wasm_i8x16_shuffle(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const v128_t n1 = wasm_i8x16_shuffle(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    wasm_v128_store(out + 2 * i, wasm_i16x8_shl(wasm_u16x8_extend_low_u8x16(n0), 4));
    wasm_v128_store(out + 2 * i + 8, wasm_i16x8_shl(wasm_u16x8_extend_high_u8x16(n0), 4));
    wasm_v128_store(out + 2 * i + 16, wasm_i16x8_shl(wasm_u16x8_extend_low_u8x16(n1), 4));
    wasm_v128_store(out + 2 * i + 24, wasm_i16x8_shl(wasm_u16x8_extend_high_u8x16(n1), 4));
  }
}

// The sums of 16 filters and one pair.
struct PairSums {
  static constexpr int kWidth = kLanes;  // RegisterTile counts vectors in steps of 8 channels; each holds 16 filters
  v128_t low, high;
};

// Half of the pairs of a tile: four vectors, in 8 registers. Their high sums are as in avx2_look_up.cpp.
template <int Filters>
struct LookUp {
  static constexpr int kPairs = look_up_pairs(Filters) / 2, kVectors = Filters / 16;
  using All = RegisterTile<PairSums, kPairs, kVectors>;

  static UNFLIP_INLINE void clear(All& all) {
    all.each([](PairSums& s, int, int) UNFLIP_LAMBDA_INLINE { s.low = s.high = wasm_i32x4_const_splat(0); });
  }

  static UNFLIP_INLINE v128_t table(uint16_t number) { return wasm_v128_load(&kLookUpTable.at[0][0] + number); }

  static UNFLIP_INLINE void add_group(All& all, const uint16_t* const* numbers, int64_t at, int64_t tap, const uint8_t* w) {
    constexpr int kRow = look_up_row(Filters);
    v128_t tables[kPairs][3];
    UNFLIP_UNROLL
    for (int pair = 0; pair < kPairs; pair++) UNFLIP_UNROLL
    for (int k = 0; k < 3; k++) tables[pair][k] = table(numbers[pair][at + k * tap]);
    const v128_t mask = wasm_i8x16_const_splat(15);
    all.each([&](PairSums& s, int pair, int c) UNFLIP_LAMBDA_INLINE {
      const uint8_t* indices = w + c / kLanes * 16;
      v128_t sum = look_up16(tables[pair][0], wasm_v128_load(indices));
      sum = wasm_i8x16_add(sum, look_up16(tables[pair][1], wasm_v128_load(indices + kRow)));
      sum = wasm_i8x16_add(sum, look_up16(tables[pair][2], wasm_v128_load(indices + 2 * kRow)));
      s.low = wasm_i8x16_add(s.low, wasm_v128_and(sum, mask));
      s.high = wasm_i16x8_add(s.high, wasm_u16x8_shr(sum, 4));
    });
  }

  static UNFLIP_INLINE void put(uint16_t* to, v128_t words, bool first) {
    wasm_v128_store(to, first ? words : wasm_i16x8_add(words, wasm_v128_load(to)));
  }

  // The positions of the two halves of a vector of 16 filters: the order of look_up_position.
  static UNFLIP_INLINE void put_bytes(uint16_t* row, int vector, v128_t bytes, bool first) {
    uint16_t* low = Filters == 16 ? row : row + vector / 2 * 32 + vector % 2 * 8;
    put(low, wasm_u16x8_extend_low_u8x16(bytes), first);
    put(low + (Filters == 16 ? 8 : 16), wasm_u16x8_extend_high_u8x16(bytes), first);
  }

  static UNFLIP_INLINE void flush(All& all, uint16_t* counts, bool first) {
    all.each([=](PairSums& s, int pair, int c) UNFLIP_LAMBDA_INLINE {
      const v128_t above = wasm_i16x8_shl(wasm_u16x8_shr(s.low, 8), 4);
      uint16_t* row = counts + 2 * pair * Filters;
      put_bytes(row, c / kLanes, s.low, first);
      put_bytes(row + Filters, c / kLanes, wasm_i16x8_sub(s.high, above), first);
    });
  }

  // The pairs from first_pair on.
  static void half(const LookUpTile& t, int first_pair) {
    const uint16_t* numbers[kPairs];
    UNFLIP_UNROLL
    for (int i = 0; i < kPairs; i++) numbers[i] = look_up_stream(t, first_pair + i);
    uint16_t* counts = t.counts + 2 * first_pair * Filters;
    const uint8_t* w = t.weights;
    All all;
    clear(all);
    int since = 0;
    bool first = true;
    for (int segment = 0; segment < t.segments; segment++) {
      for (int g = 0; g < t.groups; g++, w += 3 * look_up_row(Filters)) {
        if (since == kGroupsPerFlush) {
          flush(all, counts, first);
          clear(all);
          since = 0;
          first = false;
        }
        add_group(all, numbers, g, t.tap, w);
        since++;
      }
      UNFLIP_UNROLL
      for (int i = 0; i < kPairs; i++) numbers[i] += t.segment_step;
    }
    flush(all, counts, first);
  }

  static void tile(const LookUpTile& t) {
    half(t, 0);
    half(t, kPairs);
  }
};

void look_up_tile(const LookUpTile& t) {
  if (t.filters == 64) return LookUp<64>::tile(t);
  if (t.filters == 32) return LookUp<32>::tile(t);
  LookUp<16>::tile(t);
}

template <class Fused>
constexpr Kernels make_kernels(const char* name) {
  Kernels kernels = {name,
                     epilogue<Wide>,
                     epilogue_counts<Wide>,
                     sum_counts<Wide>,
                     pool<Wide>,
                     sum_abs<Wide>,
                     activation,
                     float_tile<Fused>,
                     stem_parts<StemSums<Double<Fused>, 1, 2>, StemSums<Double<Fused>, kStemPart, 2>>,
                     stem_lines<Wide>,
                     depthwise_tile<Double<Fused>, 1>,
                     to_bytes,
                     interleave_bytes,
                     byte_tile,
                     differences,
                     pair_numbers,
                     look_up_tile,
                     true};
  kernels.byte_pixels = kBytePart;
  kernels.whole_stem_tile = stem_parts<WholeStemSums<WholeStem, 1, 2>, WholeStemSums<WholeStem, kStemPart, 2>>;
  kernels.whole_stem_lines = stem_lines<Shorts, int16_t>;
  return kernels;
}

#if defined(__wasm_relaxed_simd__)
constexpr Kernels kKernels = make_kernels<Relaxed>("relaxed-simd");
bool usable() { return rounds_once(); }
#else
constexpr Kernels kKernels = make_kernels<InDouble>("simd128");
bool usable() { return true; }
#endif

}  // namespace

const Kernels* wasm_kernels() { return usable() ? &kKernels : nullptr; }

}  // namespace unflip
#endif
