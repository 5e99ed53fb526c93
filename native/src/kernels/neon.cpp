// Kernels for aarch64, where NEON is always available. No special flags. neon_dot.cpp has what needs an extension.
//
// The tile of look_up.h: a byte shuffle (TBL) looks up 16 filters, so there are eight vectors of 16 instead of AVX2's four of 32.
// One instruction (USRA) shifts and adds: it does for the high halves what avx2_look_up.cpp explains.
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#include "activations.h"
#include "bytes.h"
#include "depthwise.h"
#include "epilogue.h"
#include "look_up.h"
#include "neon_bytes.h"
#include "stem.h"
#include "sum_abs.h"

namespace unflip {
namespace {

// 8 floats, for epilogue.h.
struct Double {
  static constexpr int kWidth = 8;
  using Eight = Double;
  using Bits = uint8_t;
  static constexpr int kTile = 8;
  static constexpr bool kFixedSteps = true;
  static constexpr bool kKeepsSteps = false;
  struct Mask {
    uint32x4_t a, b;
  };
  float32x4_t a, b;

  static Double load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static Double set(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
  static Double from_counts(const uint16_t* p) {
    const uint16x8_t n = vld1q_u16(p);
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(n))), vcvtq_f32_u32(vmovl_high_u16(n))};
  }
  static Double fused(Double x, Double y, Double z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
  void store(float* p) const {
    vst1q_f32(p, a);
    vst1q_f32(p + 4, b);
  }
  Double operator+(Double o) const { return {vaddq_f32(a, o.a), vaddq_f32(b, o.b)}; }
  Double operator-(Double o) const { return {vsubq_f32(a, o.a), vsubq_f32(b, o.b)}; }
  Double operator*(Double o) const { return {vmulq_f32(a, o.a), vmulq_f32(b, o.b)}; }
  Double operator/(Double o) const { return {vdivq_f32(a, o.a), vdivq_f32(b, o.b)}; }
  static Double larger(Double x, Double y) { return choose(above(x, y), x, y); }
  static Mask above(Double x, Double y) { return {vcgtq_f32(x.a, y.a), vcgtq_f32(x.b, y.b)}; }
  static Mask at_least(Double x, Double y) { return {vcgeq_f32(x.a, y.a), vcgeq_f32(x.b, y.b)}; }
  static Double choose(Mask m, Double x, Double y) { return {vbslq_f32(m.a, x.a, y.a), vbslq_f32(m.b, x.b, y.b)}; }
  static uint8_t bits(Mask m) {
    const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
    return static_cast<uint8_t>(vaddvq_u32(vorrq_u32(vandq_u32(m.a, low), vandq_u32(m.b, high))));
  }

  struct Number {
    uint32x4_t a, b;
    static Number zero() { return {vdupq_n_u32(0), vdupq_n_u32(0)}; }
    static Number whole(Double v) { return {vcvtq_u32_f32(v.a), vcvtq_u32_f32(v.b)}; }
    static Number count(Number n, Mask m) { return {vsubq_u32(n.a, m.a), vsubq_u32(n.b, m.b)}; }
    Double floats() const { return {vcvtq_f32_u32(a), vcvtq_f32_u32(b)}; }
    static uint8_t digit(Number n, int p) {
      const uint32x4_t bit = vdupq_n_u32(1u << p);
      return bits(Mask{vtstq_u32(n.a, bit), vtstq_u32(n.b, bit)});
    }
  };

  struct Sums {
    float64x2_t x[4];
    static Sums zero() { return {{vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)}}; }
    void add(Double v) {
      const float32x4_t low = vabsq_f32(v.a), high = vabsq_f32(v.b);
      x[0] = vaddq_f64(x[0], vcvt_f64_f32(vget_low_f32(low)));
      x[1] = vaddq_f64(x[1], vcvt_high_f64_f32(low));
      x[2] = vaddq_f64(x[2], vcvt_f64_f32(vget_low_f32(high)));
      x[3] = vaddq_f64(x[3], vcvt_high_f64_f32(high));
    }
    Sums operator+(Sums o) const {
      return {{vaddq_f64(x[0], o.x[0]), vaddq_f64(x[1], o.x[1]), vaddq_f64(x[2], o.x[2]), vaddq_f64(x[3], o.x[3])}};
    }
    double total() const { return vpaddd_f64(vaddq_f64(vaddq_f64(x[0], x[2]), vaddq_f64(x[1], x[3]))); }
  };
  static Double look_up(const float* table, const int* first, Number n) {
    uint32_t at[kWidth];
    float t[kWidth];
    vst1q_u32(at, n.a);
    vst1q_u32(at + 4, n.b);
    for (int i = 0; i < kWidth; i++) t[i] = table[first[i] + static_cast<int>(at[i])];
    return load(t);
  }
};

// ----------------------------------------------------------------------------------------------------- float convolution

// The sums of 16 filters.
struct FloatSums {
  static constexpr int kWidth = kLanes;  // RegisterTile counts vectors in steps of 8 channels
  float32x4_t v[4];
  UNFLIP_INLINE void clear() { v[0] = v[1] = v[2] = v[3] = vdupq_n_f32(0); }
  UNFLIP_INLINE void add(float32x4_t x, const float32x4_t* w) {
    v[0] = vfmaq_f32(v[0], x, w[0]);
    v[1] = vfmaq_f32(v[1], x, w[1]);
    v[2] = vfmaq_f32(v[2], x, w[2]);
    v[3] = vfmaq_f32(v[3], x, w[3]);
  }
  UNFLIP_INLINE void store(float* out, int filters) const {
    if (filters <= 0) return;
    vst1q_f32(out, v[0]);
    vst1q_f32(out + 4, v[1]);
    if (filters <= 8) return;
    vst1q_f32(out + 8, v[2]);
    vst1q_f32(out + 12, v[3]);
  }
};

// P pixels by B blocks of 16 filters.
template <int P, int B>
void float_tile_of(const FloatTile& t) {
  const int64_t block = int64_t{t.segment_count} * t.segment_length * kFloatBlock;
  RegisterTile<FloatSums, P, B> all;
  all.each([](FloatSums& s, int, int) UNFLIP_LAMBDA_INLINE { s.clear(); });
  const float* weights = t.weights;
  for (int s = 0; s < t.segment_count; s++) {
    const float* in[P];
    for (int p = 0; p < P; p++) in[p] = t.input[p] + t.segments[s];
    for (int64_t k = 0; k < t.segment_length; k++, weights += kFloatBlock) {
      float32x4_t w[B][4];
      for (int b = 0; b < B; b++)
        for (int i = 0; i < 4; i++) w[b][i] = vld1q_f32(weights + b * block + 4 * i);
      all.each([&](FloatSums& sums, int p, int c) UNFLIP_LAMBDA_INLINE { sums.add(vld1q_dup_f32(in[p] + k), w[c / kLanes]); });
    }
  }
  all.each([&](FloatSums& sums, int p, int c) UNFLIP_LAMBDA_INLINE {
    const int first = c / kLanes * kFloatBlock;
    sums.store(t.out[p] + first, t.filters - first);
  });
}

void float_tile(const FloatTile& t) {
  switch (t.pixels) {
    case 1: break;
    case 2: return float_tile_of<2, 1>(t);
    case 3: return float_tile_of<3, 1>(t);
    case 4: return float_tile_of<4, 1>(t);
    case 5: return float_tile_of<5, 1>(t);
    default: return float_tile_of<6, 1>(t);
  }
  switch ((t.filters + kFloatBlock - 1) / kFloatBlock) {
    case 1: return float_tile_of<1, 1>(t);
    case 2: return float_tile_of<1, 2>(t);
    case 3: return float_tile_of<1, 3>(t);
    default: return float_tile_of<1, 4>(t);
  }
}

// ----------------------------------------------------------------------------------------------------- 8-bit convolution

// The sum of two products fits 16 bits, because weights are -127 .. 127.
struct PairProducts {
  int32x4_t low, high;  // two sums for each of two filters
  UNFLIP_INLINE void clear() { low = high = vdupq_n_s32(0); }
  UNFLIP_INLINE void add(int8x16_t weights, int8x16_t x) {
    low = vpadalq_s16(low, vmull_s8(vget_low_s8(weights), vget_low_s8(x)));
    high = vpadalq_s16(high, vmull_high_s8(weights, x));
  }
  UNFLIP_INLINE int32x4_t total() const { return vpaddq_s32(low, high); }
};

constexpr int kPixelsWithoutDot = 2;

bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#else
  return true;  // all of Apple's
#endif
}

// ---------------------------------------------------------------------------------------------------- binary convolution

void differences(const uint64_t* window, const uint64_t* weights, int words, int filters, int32_t* out) {
  for (int f = 0; f < filters; f++, weights += words) {
    uint32x4_t sum = vdupq_n_u32(0);
    int k = 0;
    for (; k + 2 <= words; k += 2) {
      const uint8x16_t x = vreinterpretq_u8_u64(veorq_u64(vld1q_u64(window + k), vld1q_u64(weights + k)));
      sum = vpadalq_u16(sum, vpaddlq_u8(vcntq_u8(x)));
    }
    int32_t total = static_cast<int32_t>(vaddvq_u32(sum));
    if (k < words) total += vaddv_u8(vcnt_u8(vcreate_u8(window[k] ^ weights[k])));
    out[f] = total;
  }
}

void pair_numbers(const uint8_t* first, const uint8_t* second, int64_t bytes, uint16_t* out) {
  for (int64_t i = 0; i < bytes; i += 16) {
    const uint8x16_t a = vld1q_u8(first + i), b = vld1q_u8(second + i);
    const uint8x16_t low = vsliq_n_u8(a, b, 4), high = vsriq_n_u8(b, a, 4);  // b's nibble above a's
    const uint8x16_t n0 = vzip1q_u8(low, high), n1 = vzip2q_u8(low, high);
    vst1q_u16(out + 2 * i, vshll_n_u8(vget_low_u8(n0), 4));
    vst1q_u16(out + 2 * i + 8, vshll_high_n_u8(n0, 4));
    vst1q_u16(out + 2 * i + 16, vshll_n_u8(vget_low_u8(n1), 4));
    vst1q_u16(out + 2 * i + 24, vshll_high_n_u8(n1, 4));
  }
}

// The sums of 16 filters and one pair.
struct PairSums {
  static constexpr int kWidth = kLanes;  // RegisterTile counts vectors in steps of 8 channels; each holds 16 filters
  uint8x16_t low, group;
  uint16x8_t high;
};

template <int Filters>
struct LookUp {
  static constexpr int kPairs = look_up_pairs(Filters), kVectors = Filters / 16;
  using All = RegisterTile<PairSums, kPairs, kVectors>;

  static UNFLIP_INLINE void clear(All& all) {
    all.each([](PairSums& s, int, int) UNFLIP_LAMBDA_INLINE {
      s.low = vdupq_n_u8(0);
      s.high = vdupq_n_u16(0);
    });
  }

  static UNFLIP_INLINE uint8x16_t table(uint16_t number) { return vld1q_u8(&kLookUpTable.at[0][0] + number); }

  static UNFLIP_INLINE void add_group(All& all, const uint16_t* const* numbers, int64_t at, int64_t tap, const uint8_t* w) {
#pragma GCC unroll 3
    for (int k = 0; k < 3; k++) {
      const int64_t n = at + k * tap;
      const uint8_t* weights = w + k * look_up_row(Filters);
      all.each([=](PairSums& s, int pair, int c) UNFLIP_LAMBDA_INLINE {
        const uint8x16_t found = vqtbl1q_u8(table(numbers[pair][n]), vld1q_u8(weights + c / kLanes * 16));
        s.group = k ? vaddq_u8(s.group, found) : found;
      });
    }
    const uint8x16_t mask = vdupq_n_u8(15);
    all.each([=](PairSums& s, int, int) UNFLIP_LAMBDA_INLINE {
      s.low = vaddq_u8(s.low, vandq_u8(s.group, mask));
      s.high = vsraq_n_u16(s.high, vreinterpretq_u16_u8(s.group), 4);
    });
  }

  static UNFLIP_INLINE void put(uint16_t* to, uint16x8_t words, bool first) {
    vst1q_u16(to, first ? words : vaddq_u16(words, vld1q_u16(to)));
  }

  // The positions of the two halves of a vector of 16 filters: the order of look_up_position.
  static UNFLIP_INLINE void put_bytes(uint16_t* row, int vector, uint8x16_t bytes, bool first) {
    uint16_t* low = Filters == 16 ? row : row + vector / 2 * 32 + vector % 2 * 8;
    put(low, vmovl_u8(vget_low_u8(bytes)), first);
    put(low + (Filters == 16 ? 8 : 16), vmovl_high_u8(bytes), first);
  }

  static UNFLIP_INLINE void flush(All& all, uint16_t* counts, bool first) {
    all.each([=](PairSums& s, int pair, int c) UNFLIP_LAMBDA_INLINE {
      const uint16x8_t above = vshlq_n_u16(vshrq_n_u16(vreinterpretq_u16_u8(s.low), 8), 4);
      uint16_t* row = counts + 2 * pair * Filters;
      put_bytes(row, c / kLanes, s.low, first);
      put_bytes(row + Filters, c / kLanes, vreinterpretq_u8_u16(vsubq_u16(s.high, above)), first);
    });
  }

  static void tile(const LookUpTile& t) {
    const uint16_t* numbers[kPairs];
    for (int i = 0; i < kPairs; i++) numbers[i] = look_up_stream(t, i);
    const uint8_t* w = t.weights;
    All all;
    clear(all);
    int since = 0;
    bool first = true;
    for (int segment = 0; segment < t.segments; segment++) {
      for (int g = 0; g < t.groups; g++, w += 3 * look_up_row(Filters)) {
        if (since == kGroupsPerFlush) {
          flush(all, t.counts, first);
          clear(all);
          since = 0;
          first = false;
        }
        add_group(all, numbers, g, t.tap, w);
        since++;
      }
      for (int i = 0; i < kPairs; i++) numbers[i] += t.segment_step;
    }
    flush(all, t.counts, first);
  }
};

void look_up_tile(const LookUpTile& t) {
  if (t.filters == 64) return LookUp<64>::tile(t);
  if (t.filters == 32) return LookUp<32>::tile(t);
  LookUp<16>::tile(t);
}

constexpr Kernels make_kernels(const char* name, void (*byte_tile)(const ByteTile&), int byte_pixels) {
  Kernels kernels = {name,
                     epilogue<Double>,
                     epilogue_counts<Double>,
                     sum_counts<Double>,
                     pool<Double>,
                     sum_abs<Double>,
                     activation,
                     float_tile,
                     stem_tile<Double, 2>,
                     stem_lines<Double>,
                     depthwise_tile<Double, 2>,
                     to_bytes,
                     interleave_bytes,
                     byte_tile,
                     differences,
                     pair_numbers,
                     look_up_tile,
                     true};
  kernels.byte_pixels = byte_pixels;
  kernels.byte_bias = kNeonBias;
  return kernels;
}

constexpr Kernels kNeon = make_kernels("neon", any_byte_tile<PairProducts>, kPixelsWithoutDot);
constexpr Kernels kNeonBase = make_kernels("neon-base", any_byte_tile<PairProducts>, kPixelsWithoutDot);
constexpr Kernels kNeonDot = make_kernels("neon", neon_dot_byte_tile, kNeonDotPixels);

}  // namespace

const Kernels* neon_kernels() { return has_dot_products() ? &kNeonDot : &kNeon; }
const Kernels* neon_base_kernels() { return &kNeonBase; }

}  // namespace unflip
#endif
