// Kernels in plain C++, for any CPU. They define what the other sets compute faster. No special flags.
#include <cmath>

#include "activations.h"
#include "bytes.h"
#include "epilogue.h"
#include "fused.h"
#include "look_up.h"
#include "popcount.h"
#include "stem.h"
#include "sum_abs.h"

namespace unflip {
namespace {

// 8 floats in plain C++, for epilogue.h.
struct Plain {
  static constexpr int kWidth = 8;
  using Eight = Plain;
  using Bits = uint8_t;
  static constexpr int kTile = 4;
  static constexpr bool kFixedSteps = false;
  static constexpr bool kKeepsSteps = false;
  using Mask = unsigned;
  float x[kLanes];

  static Plain load(const float* p) {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = p[i];
    return r;
  }
  static Plain set(float v) {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = v;
    return r;
  }
  static Plain from_counts(const uint16_t* p) {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = p[i];
    return r;
  }
  // Used only if the result is exact, so rounding twice does not matter.
  static Plain fused(Plain a, Plain b, Plain c) { return a * b + c; }
  void store(float* p) const {
    for (int i = 0; i < kLanes; i++) p[i] = x[i];
  }
  Plain operator+(const Plain& o) const {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = x[i] + o.x[i];
    return r;
  }
  Plain operator-(const Plain& o) const {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = x[i] - o.x[i];
    return r;
  }
  Plain operator*(const Plain& o) const {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = x[i] * o.x[i];
    return r;
  }
  Plain operator/(const Plain& o) const {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = x[i] / o.x[i];
    return r;
  }
  static Plain larger(const Plain& a, const Plain& b) {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
    return r;
  }
  static Mask above(const Plain& a, const Plain& b) {
    Mask m = 0;
    for (int i = 0; i < kLanes; i++) m |= static_cast<Mask>(a.x[i] > b.x[i]) << i;
    return m;
  }
  static Mask at_least(const Plain& a, const Plain& b) {
    Mask m = 0;
    for (int i = 0; i < kLanes; i++) m |= static_cast<Mask>(a.x[i] >= b.x[i]) << i;
    return m;
  }
  static Plain choose(Mask m, const Plain& a, const Plain& b) {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = m >> i & 1 ? a.x[i] : b.x[i];
    return r;
  }
  static uint8_t bits(Mask m) { return static_cast<uint8_t>(m); }

  struct Number {
    uint8_t n[kLanes];
    static Number zero() { return Number{}; }
    static Number whole(const Plain& v) {
      Number r;
      for (int i = 0; i < kLanes; i++) r.n[i] = static_cast<uint8_t>(v.x[i]);
      return r;
    }
    static Number count(Number v, Mask m) {
      for (int i = 0; i < kLanes; i++) v.n[i] = static_cast<uint8_t>(v.n[i] + (m >> i & 1));
      return v;
    }
    Plain floats() const {
      Plain r;
      for (int i = 0; i < kLanes; i++) r.x[i] = n[i];
      return r;
    }
    static uint8_t digit(const Number& v, int p) {
      unsigned r = 0;
      for (int i = 0; i < kLanes; i++) r |= (v.n[i] >> p & 1u) << i;
      return static_cast<uint8_t>(r);
    }
  };

  struct Sums {
    double x[kLanes];
    static Sums zero() { return Sums{}; }
    void add(const Plain& v) {
      for (int i = 0; i < kLanes; i++) x[i] += std::fabs(v.x[i]);
    }
    Sums operator+(const Sums& o) const {
      Sums r;
      for (int i = 0; i < kLanes; i++) r.x[i] = x[i] + o.x[i];
      return r;
    }
    double total() const {
      const double even = (x[0] + x[4]) + (x[2] + x[6]), odd = (x[1] + x[5]) + (x[3] + x[7]);
      return even + odd;
    }
  };
  static Plain look_up(const float* table, const int* first, const Number& n) {
    Plain r;
    for (int i = 0; i < kLanes; i++) r.x[i] = table[first[i] + n.n[i]];
    return r;
  }
};

void float_tile(const FloatTile& t) {
  const int64_t block = int64_t{t.segment_count} * t.segment_length * kFloatBlock;
  for (int p = 0; p < t.pixels; p++)
    for (int f = 0; f < t.filters; f++) {
      const float* w = t.weights + f / kFloatBlock * block + f % kFloatBlock;
      float sum = 0;
      for (int s = 0; s < t.segment_count; s++)
        for (int k = 0; k < t.segment_length; k++, w += kFloatBlock) sum = fused(t.input[p][t.segments[s] + k], *w, sum);
      t.out[p][f] = sum;
    }
}

// One tile and filter of stem.h.
struct PlainStem {
  const StemTile& t;
  int64_t tile;    // its position in a line
  const float* w;  // advances while weights are used

  float sum(int kind, int column_kind, float from) {
    for (int line = stem_first(kind); line < stem_first(kind) + stem_terms(kind); line++) {
      const float* in = t.lines[line] + tile + stem_first(column_kind) * t.channels;
      for (int k = 0; k < stem_terms(column_kind) * t.channels; k++, w += kFloatBlock) from = fused(in[k], *w, from);
    }
    return from;
  }

  // Of the left and the right output.
  void sums(int kind, float* z) {
    const float q = sum(kind, kStemQ, 0), r = sum(kind, kStemR, 0);
    z[0] = sum(kind, kStemP, q + r);
    z[1] = sum(kind, kStemS, q - r);
  }
};

void plain_stem_tile(const StemTile& t) {
  for (int i = t.first; i < t.first + t.tiles; i++)
    for (int f = 0; f < t.filters; f++) {
      PlainStem stem{t, int64_t{i} * kStemTerms * t.channels,
                     t.weights + f / kFloatBlock * stem_block(t.channels) + f % kFloatBlock};
      float z[kStemKinds][2];
      for (int kind = 0; kind < kStemKinds; kind++) stem.sums(kind, z[kind]);
      for (int side = 0; side < 2 && 2 * i + side < t.width; side++) {
        const int64_t at = (2 * i + side) * t.out_stride + f;
        t.out[0][at] = (z[kStemQ][side] + z[kStemR][side]) + z[kStemP][side];
        if (t.out[1]) t.out[1][at] = (z[kStemQ][side] - z[kStemR][side]) + z[kStemS][side];
      }
    }
}

void depthwise_tile(const DepthwiseTile& t) {
  for (int p = 0; p < t.pixels; p++)
    for (int c = 0; c < t.channels; c++) {
      float sum = 0;
      for (int k = 0; k < t.tap_count; k++) {
        const float* in = t.columns ? t.taps[k * t.pixels + p] : t.taps[k] + p * t.pixel_step;
        sum = fused(in[c], t.weights[int64_t{k} * t.channels + c], sum);
      }
      t.out[int64_t{t.columns ? t.columns[p] : p} * t.channels + c] = sum;
    }
}

void differences(const uint64_t* window, const uint64_t* weights, int words, int filters, int32_t* out) {
  for (int f = 0; f < filters; f++, weights += words) {
    int32_t sum = 0;
    for (int k = 0; k < words; k++) sum += popcount_plain(window[k] ^ weights[k]);
    out[f] = sum;
  }
}

constexpr Kernels make_kernels(const char* name, bool prefer_look_up) {
  return {
      name,        epilogue<Plain>,    epilogue_counts<Plain>, sum_counts<Plain>, pool<Plain>, sum_abs<Plain>,   activation,
      float_tile,  plain_stem_tile,    stem_lines<Plain>,      depthwise_tile,    to_bytes,    interleave_bytes, plain_byte_tile,
      differences, pair_numbers_plain, look_up_tile_plain,     prefer_look_up};
}

constexpr Kernels kPortable = make_kernels("portable", false);
constexpr Kernels kPortableLookUp = make_kernels("portable-look-up", true);

constexpr Kernels make_popcount_kernels() {
  Kernels k = make_kernels("portable-popcount", true);
  k.copy_windows = copy_windows_plain;
  k.popcount_tile = popcount_tile_plain;
  return k;
}

constexpr Kernels kPortablePopcount = make_popcount_kernels();

}  // namespace

const Kernels* portable_kernels() { return &kPortable; }
const Kernels* portable_look_up_kernels() { return &kPortableLookUp; }
const Kernels* portable_popcount_kernels() { return &kPortablePopcount; }

// The files of other CPUs are not part of the build.
#if !defined(__x86_64__)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* avx2_intrinsics_kernels() { return nullptr; }
#endif
#if !defined(__aarch64__)
const Kernels* neon_kernels() { return nullptr; }
const Kernels* neon_base_kernels() { return nullptr; }
#endif
#if !defined(__wasm_simd128__)
const Kernels* wasm_kernels() { return nullptr; }
#endif

}  // namespace unflip
