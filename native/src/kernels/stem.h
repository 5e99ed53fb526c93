// Float convolution of 7 x 7 with stride 2, the stem of most networks for photographs, with half the multiplications.
//
// Along a row, an output has seven taps: four on even columns e and three on odd columns o. From one output to the next, both
// move by one even or odd column. So these are two convolutions with stride 1.
//
//     columns    e0 o0 e1 o1 e2 o2 e3 o3 e4         filter   a0 b0 a1 b1 a2 b2 a3
//     y0          *  *  *  *  *  *  *               y0 = e0 a0 + e1 a1 + e2 a2 + e3 a3 + o0 b0 + o1 b1 + o2 b2
//     y1                *  *  *  *  *  *  *         y1 = e1 a0 + e2 a1 + e3 a2 + e4 a3 + o1 b0 + o2 b1 + o3 b2
//
// Convolutions with stride 1 share products between adjacent outputs (Winograd): (a0, a1) and (a2, a3) need three products for
// both outputs instead of four, (b0, b1, b2) needs four instead of six. There are four kinds of terms:
//
//     q   e1 (a0 + a1)    +   e3 (a2 + a3)    +   (o1 + o2) (b0 + b1 + b2) / 2      in both outputs
//     r                                           (o2 - o1) (b0 - b1 + b2) / 2      in both, with opposite signs
//     p   (e0 - e1) a0    +   (e2 - e3) a2    +   (o0 - o2) b0                      in the first
//     s   (e2 - e1) a1    +   (e4 - e3) a3    +   (o3 - o1) b2                      in the second
//
//     y0 = (q + r) + p        y1 = (q - r) + s        10 products instead of 14
//
// The same is applied from row to row to the results of the columns: 100 products instead of 196 for a tile of two by two
// outputs. Sums and differences of inputs are shared by all filters; those of a filter are computed once. Larger tiles would need
// fewer products still, but with factors other than 1 and 1/2, whose rounding errors are larger. Here the rounding errors are
// those of a plain sum (on photographs three quarters of them, because the chains of additions are shorter), so signs after a
// stem are as reliable as with a plain sum.
//
// A *line* holds, for each tile of a row of tiles, the left factors of the column terms q, r, p, s, with all channels of each
// term. A row of tiles is computed from ten lines: the left factors of the row terms, in the same order:
//
//     line      | q0 q1 q2 r p0 p1 p2 s0 s1 s2 | q0 q1 ...         floats of a tile: 10 * channels
//
// The weights of a block of 16 filters are laid out in order of use: for each row kind, column kind, line of the row kind, term
// of the column kind and channel, 16 floats.
//
// All instruction sets use this order. For each row kind q r p s:
//
//     q, r = fused multiply-adds in the order of the weights, from 0
//     z0   = multiply-adds of p, starting from q + r
//     z1   = multiply-adds of s, starting from q - r
//
// Then, from these of the four kinds, y0 = (zq + zr) + zp and y1 = (zq - zr) + zs, for the left and the right outputs.
#pragma once

#include "kernels.h"
#include "register_tile.h"

namespace unflip {
namespace {

enum StemKind { kStemQ, kStemR, kStemP, kStemS };
constexpr int kStemKinds = 4;

constexpr int stem_terms(int kind) { return kind == kStemR ? 1 : 3; }
constexpr int stem_first(int kind) { return kind == kStemQ ? 0 : stem_first(kind - 1) + stem_terms(kind - 1); }

// The number of weights of a block.
constexpr int64_t stem_block(int channels) { return int64_t{kStemTerms} * kStemTerms * channels * kFloatBlock; }

// A tile: `Tiles` tiles of two by two outputs by N vectors of filters (see epilogue.h; V::fused must round once). The sums stay in
// registers.
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
  using All = RegisterTile<V, Tiles, N>;
  static constexpr int kFilters = N * V::kWidth;

  // One row kind: use(sums, side) receives z0, then z1.
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

  // Forces stored values to be read again. Otherwise the compiler keeps them in registers, of which none are free.
  static UNFLIP_INLINE void forget(float* memory) { asm volatile("" : : "r"(memory) : "memory"); }

  static UNFLIP_INLINE void clear(All& sums) {
    sums.each([](V& v, int, int) UNFLIP_LAMBDA_INLINE { v = V::set(0); });
  }

  static UNFLIP_INLINE void store(All& sums, float* to) {
    sums.each([=](V& v, int tile, int c) UNFLIP_LAMBDA_INLINE { v.store(to + place(tile, c)); });
    forget(to);
  }

  // Inlined twelve times, except where code must be small: there the sums are copied to registers and back.
#if defined(__wasm__)
  __attribute__((noinline)) void add(All& all, int kind, int column_kind) {
    All sums = all;
    add_products(sums, kind, column_kind);
    all = sums;
  }
#else
  UNFLIP_INLINE void add(All& sums, int kind, int column_kind) { add_products(sums, kind, column_kind); }
#endif

  // The products of a row kind and a column kind.
  UNFLIP_INLINE void add_products(All& sums, int kind, int column_kind) {
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

  // Copies those outputs in part_ that are inside the image.
  void put_part(float* to, int side) const {
    const int filters = t_.filters < kFilters ? t_.filters : kFilters;
    for (int tile = 0; tile < Tiles && 2 * (t_.first + tile) + side < t_.width; tile++, to += 2 * t_.out_stride)
      for (int c = 0; c < filters; c++) to[c] = part_[place(tile, c)];
  }

  const StemTile& t_;
  const float* w_;  // advances while weights are used
  alignas(64) float z_[2][2][Tiles * kFilters];
  alignas(64) float right_[Tiles * kFilters];  // the start of z1, kept while z0 is computed
  alignas(64) float part_[Tiles * kFilters];
};

template <class V, class Number = float>
void stem_lines(const Number* const* rows, int64_t count, Number* to, int64_t step) {
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
