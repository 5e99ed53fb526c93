// A binary convolution of a code, expressed in whole numbers.
//
// A code is offset + sum of scales[p] * plane[p], planes 0 or 1 and 0 in the padding; a filter is the sum of scales[b] * sign[b]
// plus an offset, signs +-1. Over a window, with X the number of places where a plane and the bits of the signs differ,
//
//     sum of sign * plane = (number of +1 in the filter) - X
//
// At the border this holds too, because the plane is 0 there. The code's offset adds offset * (sum of the signs inside the
// image). The filter's offset adds offset * (sum of the code in the window).
//
// Most codes are whole multiples of a unit (+-1: unit 1, scale 2, offset -1). Then one exact whole number per base is computed
// before any rounding, so a sum of 0 is exactly 0. Other codes have one number per plane. In both cases the result is the sum of
// coefficient * number over the terms, with each product and each sum rounded.
#pragma once

#include <vector>

#include "../graph.h"
#include "aligned.h"
#include "window.h"

namespace unflip {

// A code in multiples of a unit, if there is a unit.
struct CodeUnits {
  bool whole = false;
  float unit = 1;
  std::vector<int> scales;
  int offset = 0;
  int64_t largest = 0;  // the largest absolute value of a multiple
};

CodeUnits code_units(const Quantizer& quantizer);

// One product of the sum: a coefficient per filter times a whole number. The number is
//     ones_times * (number of +1 in the filter) + signs_times * (sum of its signs inside the image)
// minus multiples of the differences in its planes. If `of_window`, it is a number that all filters of a pixel share.
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

  // The sum of each filter's signs over the taps inside the image; out: [base][stride].
  void inside_signs(Taps rows, Taps columns, int32_t* out) const;

  // The terms of the sum, in the order of addition. Those of the window are last.
  const std::vector<SumTerm>& terms() const { return terms_; }
  // The number from which a term's counts are subtracted, if these taps are inside the image; out: [stride].
  void term_base(const SumTerm& term, Taps rows, Taps columns, float* out) const;
  const std::vector<int32_t>& multiples() const { return multiples_; }  // the factor of each plane's differences
  // The number of a window term; plane_sums as below.
  int32_t window_number(const SumTerm& term, const int32_t* plane_sums) const;

  // Filters first .. first + count - 1 at one pixel. differences: [base][plane], each `differences_stride` apart, the first for
  // filter `first`. signs: from inside_signs, or null if !counts_border(). plane_sums: the ones of each plane in the window, then
  // the number of channels and taps inside the image; null if !counts_window().
  template <class Count>
  void combine(const Count* differences, int64_t differences_stride, const int32_t* signs, const int32_t* plane_sums, int first,
               int count, float* sums) const;

 private:
  // Only for some bases.
  void inside_signs(Taps rows, Taps columns, int first_base, int bases, int32_t* out) const;
  void count_signs(const Convolution& conv);
  void make_coefficients(const Convolution& conv, const Quantizer& quantizer);
  void make_terms();
  const float* coefficient(int term) const { return &coefficients_[int64_t{term} * stride_]; }

  int bases_, planes_, filters_, stride_;
  int64_t depth_;  // of a filter
  Pair kernel_;
  CodeUnits units_;
  bool needs_signs_ = false;
  std::vector<int32_t> ones_;       // [base][stride]: number of +1
  std::vector<int32_t> prefix_;     // [kernel.h + 1][kernel.w + 1][base][stride]: sums of signs up to there
  std::vector<int32_t> multiples_;  // [plane]
  std::vector<SumTerm> terms_;
  AlignedVector<float> coefficients_;  // [term][stride]
  AlignedVector<float> window_scale_;  // terms of the filters' offset: [plane or 1][stride], then [stride] for the code's offset
};

}  // namespace unflip
