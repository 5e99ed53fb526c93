#include "binary_sums.h"

#include <cmath>

#include "../kernels/kernels.h"

namespace unflip {
namespace {

constexpr int kLargestMultiple = 4096;

// Finds multiple with value == multiple * unit, if there is an exact one.
bool as_multiple(float value, float unit, int* multiple) {
  float m = std::nearbyint(value / unit);
  if (!(std::fabs(m) <= kLargestMultiple) || m * unit != value) return false;
  *multiple = static_cast<int>(m);
  return true;
}

bool in_units(const Quantizer& q, float unit, CodeUnits* units) {
  units->unit = unit;
  units->scales.assign(q.planes(), 0);
  for (int p = 0; p < q.planes(); p++)
    if (!as_multiple(q.scales[p], unit, &units->scales[p])) return false;
  return as_multiple(q.offset, unit, &units->offset);
}

bool sign_bit(const Convolution& conv, int64_t index) { return conv.bits[index / 8] >> (index % 8) & 1; }

}  // namespace

CodeUnits code_units(const Quantizer& q) {
  float smallest = 0;
  auto consider = [&](float v) {
    v = std::fabs(v);
    if (v > 0 && (smallest == 0 || v < smallest)) smallest = v;
  };
  for (float s : q.scales) consider(s);
  consider(q.offset);
  if (smallest == 0) smallest = 1;

  CodeUnits units;
  for (int divisor = 1; divisor <= 4 && !units.whole; divisor++) {
    float unit = smallest / static_cast<float>(divisor);
    units.whole = std::isnormal(unit) && in_units(q, unit, &units);
  }
  units.largest = std::abs(units.offset);
  for (int s : units.scales) units.largest += std::abs(s);
  return units;
}

BinarySums::BinarySums(const Convolution& conv, const Quantizer& quantizer, const Window& window)
    : bases_(conv.bases), planes_(quantizer.planes()), filters_(conv.filters), stride_(padded(conv.filters)),
      depth_(int64_t{conv.channels} * conv.kernel.h * conv.kernel.w), kernel_(window.kernel), units_(code_units(quantizer)) {
  // Sums must fit 32 bits, also before differences are subtracted. Numbers per plane always do (the loader limits the depth).
  if (depth_ * units_.largest >= int64_t{1} << 30) units_.whole = false;
  needs_signs_ = quantizer.offset != 0;
  count_signs(conv);
  make_coefficients(conv, quantizer);
  make_terms();
}

bool BinarySums::exact_in_float() const { return depth_ * (units_.whole ? units_.largest : 1) < int64_t{1} << 24; }

void BinarySums::count_signs(const Convolution& conv) {
  const int taps = kernel_.h * kernel_.w;
  const int64_t row = int64_t{bases_} * stride_;
  ones_.assign(row, 0);
  if (needs_signs_) prefix_.assign(int64_t{kernel_.h + 1} * (kernel_.w + 1) * row, 0);
  std::vector<int32_t> tap_sums(taps);
  for (int b = 0; b < bases_; b++)
    for (int o = 0; o < filters_; o++) {
      const int64_t column = int64_t{b} * stride_ + o, first = (int64_t{b} * filters_ + o) * depth_;
      tap_sums.assign(taps, 0);
      int64_t bit = first;
      for (int c = 0; c < conv.channels; c++)
        for (int t = 0; t < taps; t++) tap_sums[t] += sign_bit(conv, bit++);
      for (int32_t& sum : tap_sums) {
        ones_[column] += sum;
        sum = 2 * sum - conv.channels;
      }
      if (!needs_signs_) continue;
      auto at = [&](int r, int c) -> int32_t& { return prefix_[(int64_t{r} * (kernel_.w + 1) + c) * row + column]; };
      for (int r = 0; r < kernel_.h; r++)
        for (int c = 0; c < kernel_.w; c++)
          at(r + 1, c + 1) = tap_sums[r * kernel_.w + c] + at(r, c + 1) + at(r + 1, c) - at(r, c);
    }
}

void BinarySums::make_coefficients(const Convolution& conv, const Quantizer& quantizer) {
  auto add_term = [&](AlignedVector<float>& terms, auto value_of) {
    const size_t first = terms.size();
    terms.resize(first + stride_, 0.f);
    for (int o = 0; o < filters_; o++) terms[first + o] = value_of(o);
  };
  for (int b = 0; b < bases_; b++) {
    auto times = [&](float factor) {
      add_term(coefficients_, [&](int o) { return conv.scales[int64_t{b} * filters_ + o] * factor; });
    };
    if (units_.whole) {
      times(units_.unit);
      continue;
    }
    for (float scale : quantizer.scales) times(scale);
    if (needs_signs_) times(quantizer.offset);
  }
  bool any_offset = false;
  for (float v : conv.offset) any_offset |= v != 0;
  if (!any_offset) return;
  auto offset_times = [&](float factor) {
    add_term(window_scale_, [&](int o) { return conv.offset[conv.offset.size() == 1 ? 0 : o] * factor; });
  };
  if (units_.whole) return offset_times(units_.unit);
  for (float scale : quantizer.scales) offset_times(scale);
  if (needs_signs_) offset_times(quantizer.offset);
}

void BinarySums::inside_signs(Taps rows, Taps columns, int32_t* out) const { inside_signs(rows, columns, 0, bases_, out); }

void BinarySums::inside_signs(Taps rows, Taps columns, int first_base, int bases, int32_t* out) const {
  const int64_t row = int64_t{bases_} * stride_, first = int64_t{first_base} * stride_, count = int64_t{bases} * stride_;
  auto corner = [&](int r, int c) { return &prefix_[(int64_t{r} * (kernel_.w + 1) + c) * row + first]; };
  const int32_t *a = corner(rows.last, columns.last), *b = corner(rows.first, columns.last),
                *c = corner(rows.last, columns.first), *d = corner(rows.first, columns.first);
  for (int64_t i = 0; i < count; i++) out[i] = a[i] - b[i] - c[i] + d[i];
}

void BinarySums::make_terms() {
  for (int p = 0; p < planes_; p++) multiples_.push_back(units_.whole ? units_.scales[p] : 1);
  auto add = [&](int base, int first_plane, int planes, int32_t signs_times) {
    int32_t ones_times = 0;
    for (int p = first_plane; p < first_plane + planes; p++) ones_times += multiples_[p];
    const float* scale = coefficient(static_cast<int>(terms_.size()));
    terms_.push_back({base, first_plane, planes, ones_times, signs_times, false, scale});
  };
  for (int b = 0; b < bases_; b++) {
    if (units_.whole) {
      add(b, 0, planes_, units_.offset);
      continue;
    }
    for (int p = 0; p < planes_; p++) add(b, p, 1, 0);
    if (needs_signs_) add(b, 0, 0, 1);
  }
  const int windows = static_cast<int>(window_scale_.size()) / stride_;
  for (int w = 0; w < windows; w++) terms_.push_back({0, w, 0, 0, 0, true, &window_scale_[int64_t{w} * stride_]});
}

void BinarySums::term_base(const SumTerm& term, Taps rows, Taps columns, float* out) const {
  std::vector<int32_t> signs(stride_, 0);
  if (needs_signs_) inside_signs(rows, columns, term.base, 1, signs.data());
  const int64_t first = int64_t{term.base} * stride_;
  for (int o = 0; o < stride_; o++) out[o] = static_cast<float>(term.ones_times * ones_[first + o] + term.signs_times * signs[o]);
}

int32_t BinarySums::window_number(const SumTerm& term, const int32_t* plane_sums) const {
  if (!units_.whole) return plane_sums[term.first_plane];
  int32_t number = units_.offset * plane_sums[planes_];
  for (int p = 0; p < planes_; p++) number += units_.scales[p] * plane_sums[p];
  return number;
}

template <class Count>
void BinarySums::combine(const Count* differences, int64_t differences_stride, const int32_t* signs, const int32_t* plane_sums,
                         int first, int count, float* sums) const {
  auto add = [&](const SumTerm& term, auto number) {
    const float* scale = term.scale + first;
    if (&term == terms_.data())
      for (int i = 0; i < count; i++) sums[i] = scale[i] * static_cast<float>(number(i));
    else
      for (int i = 0; i < count; i++) sums[i] += scale[i] * static_cast<float>(number(i));
  };
  for (const SumTerm& term : terms_) {
    if (term.of_window) {
      const int32_t number = window_number(term, plane_sums);
      add(term, [=](int) { return number; });
      continue;
    }
    const int64_t base = int64_t{term.base} * stride_ + first;
    const int32_t *ones = &ones_[base], *inside = signs && term.signs_times ? signs + base : nullptr;
    const Count* x = differences + (int64_t{term.base} * planes_ + term.first_plane) * differences_stride;
    const int32_t* multiple = multiples_.data() + term.first_plane;
    add(term, [=](int i) {
      int32_t number = term.ones_times * ones[i] + (inside ? term.signs_times * inside[i] : 0);
      for (int p = 0; p < term.planes; p++) number -= multiple[p] * static_cast<int32_t>(x[p * differences_stride + i]);
      return number;
    });
  }
}

template void BinarySums::combine(const uint8_t*, int64_t, const int32_t*, const int32_t*, int, int, float*) const;
template void BinarySums::combine(const int32_t*, int64_t, const int32_t*, const int32_t*, int, int, float*) const;

}  // namespace unflip
