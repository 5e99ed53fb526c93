#include "count_finisher.h"

#include <algorithm>

namespace unflip {
namespace {

constexpr int kMostBorderClasses = 64;

// The sets of taps inside the image that occur along one side, and which one each position has.
struct BorderClasses {
  std::vector<Taps> taps;
  std::vector<int> of;

  template <class TapsAt>
  BorderClasses(int positions, TapsAt taps_at) {
    for (int i = 0; i < positions; i++) {
      const Taps t = taps_at(i);
      auto found = std::find(taps.begin(), taps.end(), t);
      of.push_back(static_cast<int>(found - taps.begin()));
      if (found == taps.end()) taps.push_back(t);
      if (taps.size() > kMostBorderClasses) return;
    }
  }
};

BorderClasses row_classes(const Window& w) {
  return BorderClasses(w.out.height, [&](int y) { return w.row_taps(y); });
}

BorderClasses column_classes(const Window& w) {
  return BorderClasses(w.out.width, [&](int x) { return w.column_taps(x); });
}

}  // namespace

bool few_border_classes(const Window& window) {
  return row_classes(window).taps.size() * column_classes(window).taps.size() <= kMostBorderClasses;
}

// Makes tables of everything that depends only on which taps are inside the image.
CountFinisher::CountFinisher(const Window& window, const BinarySums& sums, const Finisher& finisher, int input,
                             const CodeLayout& layout, const Kernels& kernels)
    : window_(window), sums_(sums), finisher_(finisher), input_(input), layout_(layout), kernels_(kernels) {
  const BorderClasses rows = row_classes(window), columns = column_classes(window);
  const int row_count = sums.counts_border() ? static_cast<int>(rows.taps.size()) : 1;
  const int column_count = sums.counts_border() ? static_cast<int>(columns.taps.size()) : 1;
  const int64_t stride = sums.stride();
  if (sums.one_term())
    base_table_.assign(row_count * column_count * stride, 0.f);
  else if (sums.counts_border())
    signs_.assign(row_count * column_count * stride * sums.bases(), 0);
  for (int r = 0; r < row_count; r++)
    for (int c = 0; c < column_count; c++) {
      const int64_t number = r * column_count + c;
      if (!base_table_.empty()) sums.one_term_base(rows.taps[r], columns.taps[c], &base_table_[number * stride]);
      if (!signs_.empty()) sums.inside_signs(rows.taps[r], columns.taps[c], &signs_[number * stride * sums.bases()]);
    }
  class_of_.assign(finisher.pixels(), 0);
  if (sums.counts_border())
    for (int i = 0; i < finisher.pixels(); i++)
      class_of_[i] = static_cast<uint16_t>(rows.of[i / window.out.width] * column_count + columns.of[i % window.out.width]);
}

void CountFinisher::finish(const RunContext& context, const Strip& strip) const {
  const FinishTarget target = finisher_.target(context);
  if (!sums_.one_term()) return finish_terms(context, target, strip);
  Counts c;
  c.count = strip.counts;
  c.count_stride = strip.pixel_stride;
  c.bases = &base_table_[strip.channel];
  c.base_stride = sums_.stride();
  c.class_of = class_of_.data();
  c.scale = sums_.one_term_scale() + strip.channel;
  c.multiple = sums_.one_term_multiple();
  kernels_.finish_counts(finisher_.finish(), target, c, strip.first, strip.last, strip.channel, strip.channels);
}

// The general case, pixel by pixel.
void CountFinisher::finish_terms(const RunContext& context, const FinishTarget& target, const Strip& strip) const {
  const uint16_t* counts = strip.counts;
  for (int pixel = strip.first; pixel < strip.last; pixel++, counts += strip.pixel_stride) {
    const int32_t* signs = signs_.empty() ? nullptr : &signs_[class_of_[pixel] * sums_.stride() * sums_.bases()];
    int32_t plane_sums[9] = {};
    if (sums_.counts_window()) count_window(context, pixel, plane_sums);
    sums_.combine(counts, strip.term_stride, signs, plane_sums, strip.channel, strip.channels, strip.sums);
    kernels_.finish(finisher_.finish(), target, strip.sums, 0, pixel, pixel + 1, strip.channel, strip.channels);
  }
}

void CountFinisher::count_window(const RunContext& context, int pixel, int32_t* plane_sums) const {
  const int y = pixel / window_.out.width, x = pixel % window_.out.width;
  const Taps rows = window_.row_taps(y), columns = window_.column_taps(x);
  plane_sums[sums_.planes()] = window_.in.channels * (rows.last - rows.first) * (columns.last - columns.first);
  for (int p = 0; p < sums_.planes(); p++) {
    const uint8_t* plane = context.codes[input_] + p * layout_.plane_bytes;
    for (int r = rows.first; r < rows.last; r++)
      for (int c = columns.first; c < columns.last; c++) {
        const uint8_t* at = plane + layout_.at(window_.row(y) + r * window_.dilation.h,
                                               window_.column(x) + c * window_.dilation.w);
        for (int i = 0; i < layout_.pixel_bytes; i++) plane_sums[p] += __builtin_popcount(at[i]);
      }
  }
}

}  // namespace unflip
