// The stem of stem.h for whole numbers, with a third of the multiplications.
//
// Integers do not round. So larger tiles, with factors other than 1 and 1/2, are exact here. A tile has two rows of four outputs.
// From row to row the terms are those of stem.h. Along a row, a tile has 13 products instead of 28: four taps on even columns
// e0 .. e6 need seven, three on odd columns o0 .. o5 need six (Toom-Cook, as in Winograd's convolutions). Each product belongs to
// a *point*: filters are evaluated there as polynomials. Six points are common to both, and their products are added up:
//
//     point            0    1   -1    2   -2   infinity   1/2
//     even columns     *    *    *    *    *      *        *       seven sums m0 .. m6 of a row term
//     odd columns      *    *    *    *    *      *
//
// Left factors of d0 .. d5, which are o0 .. o5, or f0 .. f5 with fk = 2 e(k+1) - ek:
//
//     0         4 d0 - 5 d2 + d4
//     1, -1     (d4 - 4 d2) + (d3 - 4 d1), (d4 - 4 d2) - (d3 - 4 d1)
//     2, -2     (d4 - d2) + 2 (d3 - d1), (d4 - d2) - 2 (d3 - d1)
//     infinity  4 d1 - 5 d3 + d5
//     1/2       4 e1 - 5 e3 + e5
//
// Right factors, of the filter's polynomials a and b:
//
//     point            0       1       -1       2          -2      infinity    1/2
//     a0 .. a3       -a(0)   -a(1)    a(-1)    a(2)      -a(-2)       a3     8 a(1/2)
//     b0 .. b2        b(0)   -b(1) -3 b(-1)  3 b(2)     5 b(-2)     2 b2
//     sum times         90      60       20       5           3      180         32        = 360 point^j of output j
//
// With another factor of 2 from the rows, sums are 720 = 16 * 45 times too large. They may exceed 32 bits, so all is computed
// modulo 2^32, also the division by 45: 90 / 45 = 2, 60 / 45 = 4 * (1/3), with 3 * (1/3) = 1 modulo 2^32, and so on. Then they are
// 16 times too large and fit, because |output| <= 49 * 4 channels * 255 * 128 < 2^27.
//
// Left factors are integers of 16 bits, at most 2 * 30 * 255; right ones at most 4 * 35 * 128. Their products are summed two at a
// time. The numbers of a tile in a line are those of the seven points. Each has the even terms of all channels, then the odd ones.
// The last has no odd ones and is padded to an even number.
#pragma once

#include "kernels.h"
#include "register_tile.h"
#include "stem.h"

namespace unflip {
namespace {

constexpr int kStemPoints = 7;
constexpr int kStemPointTerms = 13;  // for four outputs next to each other
constexpr int kWholeStemWidth = 4;   // outputs of a tile next to each other
constexpr int kStemGroup = 2;        // numbers per step

constexpr int point_terms(int point) { return point < kStemPoints - 1 ? 2 : 1; }
constexpr int point_steps(int point, int channels) { return (point_terms(point) * channels + kStemGroup - 1) / kStemGroup; }

// The numbers of a tile in a line.
constexpr int whole_stem_numbers(int channels) {
  return ((kStemPoints - 1) * point_steps(0, channels) + point_steps(kStemPoints - 1, channels)) * kStemGroup;
}

// The number of weights of a block.
constexpr int64_t whole_stem_block(int channels) { return int64_t{kStemTerms} * whole_stem_numbers(channels) * kFloatBlock; }

// The products of a row kind and a point.
struct StemProducts {
  const int16_t* const* lines = nullptr;  // of the row kind
  int line_count = 0;
  int64_t first = 0;                 // the point's place in a line, for the first tile
  int64_t tile = 0;                  // numbers from one tile to the next
  int steps = 0;                     // of each line, two numbers each
  const int16_t* weights = nullptr;  // of the first block
};

// Sums of whole numbers are exact in any order. So each of the 28 sums of products starts at 0 and does not wait for another.
// Stem has a type Vector of sums and two functions: add_products<Tiles, N>(products, sums) stores the sums of products, and
// put(vector, scale, to) stores a sixteenth of a vector as scaled floats.
template <class Stem, int Tiles, int N>
class WholeStemSums {
 public:
  using V = typename Stem::Vector;

  explicit WholeStemSums(const WholeStemTile& t) : t_(t) {}

  void run() {
    StemProducts p;
    p.tile = whole_stem_numbers(t_.channels);
    p.weights = t_.weights;
    for (int kind = kStemQ; kind <= kStemS; kind++) {
      p.lines = t_.lines + stem_first(kind);
      p.line_count = stem_terms(kind);
      for (int point = 0; point < kStemPoints; point++) {
        p.first = t_.first * p.tile + int64_t{point} * point_terms(0) * t_.channels;
        p.steps = point_steps(point, t_.channels);
        Stem::template add_products<Tiles, N>(p, sums_[kind][point]);
        p.weights += int64_t{p.line_count} * p.steps * kStemGroup * kFloatBlock;
      }
    }
    const bool inside = kWholeStemWidth * (t_.first + Tiles) <= t_.width && t_.filters >= kFilters;
    for (int tile = 0; tile < Tiles; tile++)
      for (int c = 0; c < kFilters; c += V::kWidth) {
        put_row<0>(tile, c, inside);
        if (t_.out[1]) put_row<1>(tile, c, inside);
      }
  }

 private:
  static constexpr int kFilters = N * V::kWidth;
  // Modulo 2^32.
  static constexpr uint32_t kThird = 0xaaaaaaab, kFifth = 0xcccccccd;
  static_assert(kThird * 3 == 1 && kFifth * 5 == 1);

  // A point's sum for a row of outputs.
  template <int Row>
  UNFLIP_INLINE V row_sum(int point, int at) const {
    const V q = V::load(&sums_[kStemQ][point][at]), r = V::load(&sums_[kStemR][point][at]);
    if constexpr (Row == 0)
      return q + r + V::load(&sums_[kStemP][point][at]);
    else
      return q - r + V::load(&sums_[kStemS][point][at]);
  }

  template <int Row>
  UNFLIP_INLINE void put_row(int tile, int c, bool inside) const {
    const int at = tile * kFilters + c;
    const V a = row_sum<Row>(1, at).times(4 * kThird), b = row_sum<Row>(2, at).times(4 * kThird * kThird);
    const V even = a + b, odd = a - b;
    const V d = row_sum<Row>(3, at).times(kThird * kThird), e = row_sum<Row>(4, at).times(kThird * kFifth);
    const V even2 = d + e, odd2 = d - e;
    const V half = row_sum<Row>(6, at).times(4 * kThird * kThird * kFifth);
    const V first = row_sum<Row>(0, at).template shifted<1>(), last = row_sum<Row>(5, at).template shifted<2>();
    const V outputs[kWholeStemWidth] = {
        first + even + even2 + half.template shifted<3>(), odd + odd2.template shifted<1>() + half.template shifted<2>(),
        even + even2.template shifted<2>() + half.template shifted<1>(), odd + odd2.template shifted<3>() + half + last};
    const int column = kWholeStemWidth * (t_.first + tile);
    float* to = t_.out[Row] + column * t_.out_stride + c;
    for (int j = 0; j < kWholeStemWidth; j++, to += t_.out_stride) {
      if (inside) {
        Stem::put(outputs[j], t_.scale + c, to);
      } else if (column + j < t_.width) {
        float part[V::kWidth];
        Stem::put(outputs[j], t_.scale + c, part);
        for (int i = 0; i < V::kWidth && c + i < t_.filters; i++) to[i] = part[i];
      }
    }
  }

  const WholeStemTile& t_;
  alignas(64) int32_t sums_[kStemKinds][kStemPoints][Tiles * kFilters];
};

// One sum of products, in registers. Stem::add(sum, x, w) adds the products of a step.
template <class Stem, int Tiles, int N>
UNFLIP_INLINE void add_stem_products(const StemProducts& p, int32_t* to) {
  using V = typename Stem::Vector;
  static_assert(N * V::kWidth == kFloatBlock);
  RegisterTile<V, Tiles, N> sums;
  sums.each([](V& v, int, int) UNFLIP_LAMBDA_INLINE { v = V::set(0); });
  const int16_t* w = p.weights;
  for (int line = 0; line < p.line_count; line++) {
    const int16_t* in = p.lines[line] + p.first;
    for (int k = 0; k < p.steps; k++, in += kStemGroup, w += kStemGroup * kFloatBlock)
      sums.each([=](V& v, int tile, int c) UNFLIP_LAMBDA_INLINE {
        Stem::add(v, in + tile * p.tile, w + c * kStemGroup);
      });
  }
  sums.each([=](V& v, int tile, int c) UNFLIP_LAMBDA_INLINE { v.store(to + tile * N * V::kWidth + c); });
}

template <class Stem, int N>
void whole_stem_tile(const WholeStemTile& t) {
  switch (t.tiles) {
    case 1: return WholeStemSums<Stem, 1, N>(t).run();
    case 2: return WholeStemSums<Stem, 2, N>(t).run();
    case 3: return WholeStemSums<Stem, 3, N>(t).run();
    case 4: return WholeStemSums<Stem, 4, N>(t).run();
    case 5: return WholeStemSums<Stem, 5, N>(t).run();
    default: return WholeStemSums<Stem, 6, N>(t).run();
  }
}

}  // namespace
}  // namespace unflip
