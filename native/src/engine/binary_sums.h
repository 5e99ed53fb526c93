// What a binary convolution of a code means in whole numbers.
//
// A code is offset + sum of scales[p] * plane[p], planes 0 or 1 and 0 in the padding; a filter is the sum of scales[b] * sign[b]
// plus an offset, signs +-1. Over a window, with X the number of places where a plane and the bits of the signs differ,
//
//     sum of sign * plane = (number of +1 in the filter) - X
//
// since each +1 counts where the plane is 1, each -1 takes away where the plane is 1, and both of these are "the +1s, less the
// differences". This holds at the border too: there, the plane is 0. The code's offset adds offset * (sum of the signs inside
// the image), the filter's offset adds offset * (sum of the code in the window).
//
// Most codes are whole multiples of a unit (+-1: unit 1, scale 2, offset -1). Then one exact whole number is made for each
// base before anything is rounded, so a sum that is 0 is exactly 0. Other codes have a number for each plane. In any case the
// sum is the first coefficient * number, plus the second coefficient * number, and so on, each product and sum rounded.
#pragma once

#include <vector>

#include "../graph.h"
#include "window.h"

namespace unflip {

// A code in multiples of a unit, where there is one.
struct CodeUnits {
  bool whole = false;
  float unit = 1;
  std::vector<int> scales;
  int offset = 0;
  int64_t largest = 0;  // the largest multiple, without its sign
};

CodeUnits code_units(const Quantizer& quantizer);

// One of the products that a sum consists of: a coefficient for each filter times a whole number. That is
//     ones_times * (number of +1 in the filter) + signs_times * (sum of its signs inside the image)
// less multiples of the differences in its planes, or, if `of_window`, a number that all filters of a pixel share.
struct SumTerm {
  int base = 0;
  int first_plane = 0, planes = 0;
  int32_t ones_times = 0, signs_times = 0;
  bool of_window = false;
  const float* scale = nullptr;  // [stride]
};

class BinarySums {
 public:
  BinarySums(const Convolution& conv, const Quantizer& quantizer, const Window& window);

  int bases() const { return bases_; }
  int planes() const { return planes_; }
  int stride() const { return stride_; }  // filters, padded to kLanes
  bool counts_border() const { return needs_signs_; }
  bool counts_window() const { return !window_scale_.empty(); }
  bool one_term() const { return bases_ == 1 && planes_ == 1 && units_.whole && !counts_window(); }
  const CodeUnits& units() const { return units_; }
  bool exact_in_float() const;

  // Sum of each filter's signs over the taps inside the image; out: [base][stride].
  void inside_signs(Taps rows, Taps columns, int32_t* out) const;

  // The sum's terms, in the order in which they are added; those of the window come last.
  const std::vector<SumTerm>& terms() const { return terms_; }
  // What a term's counts are taken from, with these taps inside the image; out: [stride].
  void term_base(const SumTerm& term, Taps rows, Taps columns, float* out) const;
  const std::vector<int32_t>& multiples() const { return multiples_; }  // of each plane's differences
  // The number of a term of the window; plane_sums as below.
  int32_t window_number(const SumTerm& term, const int32_t* plane_sums) const;

  // Filters first .. first + count - 1 at one pixel. differences: [base][plane], each `differences_stride` apart, the first for
  // filter `first`. signs: from inside_signs, or null if !counts_border(). plane_sums: ones of each plane in the window and, at
  // the end, the number of channels and taps inside the image; null if !counts_window().
  template <class Count>
  void combine(const Count* differences, int64_t differences_stride, const int32_t* signs, const int32_t* plane_sums,
               int first, int count, float* sums) const;

 private:
  void count_signs(const Convolution& conv);
  void make_coefficients(const Convolution& conv, const Quantizer& quantizer);
  void make_terms();
  const float* coefficient(int term) const { return &coefficients_[int64_t{term} * stride_]; }

  int bases_, planes_, filters_, stride_;
  int64_t depth_;  // of a filter
  Pair kernel_;
  CodeUnits units_;
  bool needs_signs_ = false;
  std::vector<int32_t> ones_;         // [base][stride]: number of +1
  std::vector<int32_t> prefix_;       // [kernel.h + 1][kernel.w + 1][base][stride]: sums of signs up to there
  std::vector<int32_t> multiples_;    // [plane]
  std::vector<SumTerm> terms_;
  std::vector<float> coefficients_;   // [term][stride]
  std::vector<float> window_scale_;   // terms of the filters' offset: [plane or 1][stride], then [stride] for the code's offset
};

}  // namespace unflip
