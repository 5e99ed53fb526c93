// Float convolution of 7 x 7 with stride 2, the stem of most networks for photographs: with half the multiplications.
//
// Along a row, an output has seven taps. Four are on even columns e and three on odd columns o, and from one output to the next
// each of them moves by one place of its own: two convolutions with stride 1.
//
//     columns    e0 o0 e1 o1 e2 o2 e3 o3 e4         filter   a0 b0 a1 b1 a2 b2 a3
//     y0          *  *  *  *  *  *  *               y0 = e0 a0 + e1 a1 + e2 a2 + e3 a3 + o0 b0 + o1 b1 + o2 b2
//     y1                *  *  *  *  *  *  *         y1 = e1 a0 + e2 a1 + e3 a2 + e4 a3 + o1 b0 + o2 b1 + o3 b2
//
// Convolutions with stride 1 share products between neighbours (Winograd): (a0, a1) and (a2, a3) take three for both outputs
// instead of four, (b0, b1, b2) four instead of six. These are the terms, four kinds of them:
//
//     q   e1 (a0 + a1)    +   e3 (a2 + a3)    +   (o1 + o2) (b0 + b1 + b2) / 2      in both outputs
//     r                                           (o2 - o1) (b0 - b1 + b2) / 2      in both, with either sign
//     p   (e0 - e1) a0    +   (e2 - e3) a2    +   (o0 - o2) b0                      in the first
//     s   (e2 - e1) a1    +   (e4 - e3) a3    +   (o3 - o1) b2                      in the second
//
//     y0 = (q + r) + p        y1 = (q - r) + s        10 products for 14
//
// The same from row to row, on what came of the columns: 100 products for the 196 of a tile of two by two outputs. Sums and
// differences of inputs serve all filters, those of a filter are made once. Larger outputs would take still fewer products, but
// with factors other than 1 and 1/2, whose rounding errors grow; here they are those of a plain sum (on photographs three quarters
// of them: the chains of additions are shorter), so the signs behind a stem are as safe as they were.
//
// A *line* has, for each tile of a row of tiles, the left factors of the columns' terms: q, r, p, s; of a term the channels. Ten
// lines, left factors of the rows' terms in the same order, are what a row of tiles is made of:
//
//     line      | q0 q1 q2 r p0 p1 p2 s0 s1 s2 | q0 q1 ...         floats of a tile: 10 * channels
//
// Weights of a block of 16 filters are laid out as they are used: for each kind of the rows, for each kind of the columns, for
// each line of the one and each term of the other, for each channel 16 floats.
//
// The order, which all instruction sets follow: for each kind of the rows, q r p s,
//
//     q, r = fused multiply-adds in the order of the weights, from 0
//     z0   = p's, on from q + r
//     z1   = s's, on from q - r
//
// and of these for the four kinds y0 = (zq + zr) + zp and y1 = (zq - zr) + zs, for the left and the right outputs.
#pragma once

#include "kernels.h"
#include "several.h"

namespace unflip {
namespace {

enum StemKind { kStemQ, kStemR, kStemP, kStemS };
constexpr int kStemKinds = 4;

constexpr int stem_terms(int kind) { return kind == kStemR ? 1 : 3; }
constexpr int stem_first(int kind) { return kind == kStemQ ? 0 : stem_first(kind - 1) + stem_terms(kind - 1); }

// Weights of a block.
constexpr int64_t stem_block(int channels) { return int64_t{kStemTerms} * kStemTerms * channels * kFloatBlock; }

// A tile with vectors V (see finish.h; V::fused has to round once): Tiles of two by two outputs by N vectors of filters, whose
// sums are in registers.
template <class V, int Tiles, int N>
class StemSums {
 public:
  explicit StemSums(const StemTile& t) : t_(t), w_(t.weights) {}

  void run() {
    for (int kind = kStemQ; kind <= kStemR; kind++)
      make_rows(kind, [this, kind](All& sums, int side) UNFLIP_LAMBDA_INLINE { store(sums, z_[kind][side]); });
    make_rows(kStemP, [this](All& sums, int side) UNFLIP_LAMBDA_INLINE {
      put(sums, t_.out[0], side, [](V q, V r) UNFLIP_LAMBDA_INLINE { return q + r; });
    });
    if (!t_.out[1]) return;
    make_rows(kStemS, [this](All& sums, int side) UNFLIP_LAMBDA_INLINE {
      put(sums, t_.out[1], side, [](V q, V r) UNFLIP_LAMBDA_INLINE { return q - r; });
    });
  }

 private:
  using All = Several<V, Tiles, N>;
  static constexpr int kFilters = N * V::kWidth;

  // One kind of the rows: use(sums, side) takes z0 and then z1.
  template <class Use>
  UNFLIP_INLINE void make_rows(int kind, const Use& use) {
    float* right = right_;
    All sums;
    clear(sums);
    add(sums, kind, kStemQ);
    store(sums, right);
    clear(sums);
    add(sums, kind, kStemR);
    sums.each([=](V& v, int tile, int c) UNFLIP_LAMBDA_INLINE {
      float* at = right + place(tile, c);
      const V q = V::load(at);
      (q - v).store(at);
      v = q + v;
    });
    forget(right);
    add(sums, kind, kStemP);
    use(sums, 0);
    sums.each([=](V& v, int tile, int c) UNFLIP_LAMBDA_INLINE { v = V::load(right + place(tile, c)); });
    add(sums, kind, kStemS);
    use(sums, 1);
  }

  static constexpr int place(int tile, int c) { return tile * kFilters + c; }

  // What was stored is read again: the compiler would rather keep it in registers, of which there are none left.
  static UNFLIP_INLINE void forget(float* memory) { asm volatile("" : : "r"(memory) : "memory"); }

  static UNFLIP_INLINE void clear(All& sums) {
    sums.each([](V& v, int, int) UNFLIP_LAMBDA_INLINE { v = V::set(0); });
  }

  static UNFLIP_INLINE void store(All& sums, float* to) {
    sums.each([=](V& v, int tile, int c) UNFLIP_LAMBDA_INLINE { v.store(to + place(tile, c)); });
    forget(to);
  }

  // The products of a kind of the rows and a kind of the columns.
  UNFLIP_INLINE void add(All& sums, int kind, int column_kind) {
    const int64_t step = int64_t{kStemTerms} * t_.channels, block = stem_block(t_.channels);
    const int length = stem_terms(column_kind) * t_.channels;
    const float* w = w_;
    for (int line = stem_first(kind); line < stem_first(kind) + stem_terms(kind); line++) {
      const float* in = t_.lines[line] + t_.first * step + stem_first(column_kind) * t_.channels;
      for (int k = 0; k < length; k++, in++, w += kFloatBlock)
        sums.each([=](V& v, int tile, int c) UNFLIP_LAMBDA_INLINE {
          v = V::fused(V::set(in[tile * step]), V::load(w + c / kFloatBlock * block + c % kFloatBlock), v);
        });
    }
    w_ = w;
  }

  // The outputs of one row and side: rows(q, r) + the sums.
  template <class Rows>
  UNFLIP_INLINE void put(All& sums, float* row, int side, const Rows& rows) {
    const float *q = z_[kStemQ][side], *r = z_[kStemR][side];
    const bool inside = 2 * (t_.first + Tiles) <= t_.width && t_.filters >= kFilters;
    float* first = row + (2 * t_.first + side) * t_.out_stride;
    float* to = inside ? first : part_;
    const int64_t step = inside ? 2 * t_.out_stride : kFilters;
    sums.each([=](V& v, int tile, int c) UNFLIP_LAMBDA_INLINE {
      const int at = place(tile, c);
      (rows(V::load(q + at), V::load(r + at)) + v).store(to + tile * step + c);
    });
    if (!inside) put_part(first, side);
  }

  // Of the outputs in part_ those that are in the image.
  void put_part(float* to, int side) const {
    const int filters = t_.filters < kFilters ? t_.filters : kFilters;
    for (int tile = 0; tile < Tiles && 2 * (t_.first + tile) + side < t_.width; tile++, to += 2 * t_.out_stride)
      for (int c = 0; c < filters; c++) to[c] = part_[place(tile, c)];
  }

  const StemTile& t_;
  const float* w_;  // moves on
  alignas(64) float z_[2][2][Tiles * kFilters];
  alignas(64) float right_[Tiles * kFilters];  // waits while z0 is made
  alignas(64) float part_[Tiles * kFilters];
};

template <class V>
void stem_lines(const float* const* rows, int64_t count, float* to, int64_t step) {
  for (int64_t i = 0; i < count; i += V::kWidth, to += V::kWidth) {
    auto even = [=](int k) UNFLIP_LAMBDA_INLINE { return V::load(rows[2 * k] + i); };
    auto odd = [=](int k) UNFLIP_LAMBDA_INLINE { return V::load(rows[2 * k + 1] + i); };
    (odd(1) + odd(2)).store(to);
    (odd(2) - odd(1)).store(to + step);
    (even(0) - even(1)).store(to + 2 * step);
    (even(2) - even(3)).store(to + 3 * step);
    (odd(0) - odd(2)).store(to + 4 * step);
    (even(2) - even(1)).store(to + 5 * step);
    (even(4) - even(3)).store(to + 6 * step);
    (odd(3) - odd(1)).store(to + 7 * step);
  }
}

template <class V, int N>
void stem_tile(const StemTile& t) {
  switch (t.tiles) {
    case 1: return StemSums<V, 1, N>(t).run();
    case 2: return StemSums<V, 2, N>(t).run();
    case 3: return StemSums<V, 3, N>(t).run();
    case 4: return StemSums<V, 4, N>(t).run();
    case 5: return StemSums<V, 5, N>(t).run();
    default: return StemSums<V, 6, N>(t).run();
  }
}

}  // namespace
}  // namespace unflip
