#include "count_epilogue.h"

#include <algorithm>
#include <cstring>

#include "../kernels/popcount.h"

namespace unflip {
namespace {

constexpr int kMostBorderClasses = 64;

// The different sets of taps inside the image along one side. Both ends of a set move in one direction, so positions with the
// same set are neighbors.
struct BorderClasses {
  std::vector<Taps> taps;
  std::vector<int> last;  // the position after the last one of each set

  // Stops if there are too many. The time does not depend on the number of positions.
  template <class TapsAt>
  BorderClasses(int positions, TapsAt taps_at) {
    for (int first = 0; first < positions && static_cast<int>(taps.size()) <= kMostBorderClasses; first = last.back()) {
      taps.push_back(taps_at(first));
      int same = first, other = positions;  // binary search
      while (other - same > 1) {
        const int middle = same + (other - same) / 2;
        (taps_at(middle) == taps.back() ? same : other) = middle;
      }
      last.push_back(other);
    }
  }

  // The class of each position.
  std::vector<int> of() const {
    std::vector<int> classes;
    classes.reserve(last.empty() ? 0 : last.back());
    for (size_t i = 0; i < last.size(); i++) classes.resize(last[i], static_cast<int>(i));
    return classes;
  }
};

BorderClasses row_classes(const Window& w) {
  return BorderClasses(w.out.height, [&](int y) { return w.row_taps(y); });
}

BorderClasses column_classes(const Window& w) {
  return BorderClasses(w.out.width, [&](int x) { return w.column_taps(x); });
}

// Eight bytes at a time.
int32_t ones_in(const uint8_t* bytes, int count) {
  int32_t ones = 0;
  for (; count > 0; bytes += 8, count -= 8) {
    uint64_t word = 0;
    if (count >= 8)
      std::memcpy(&word, bytes, 8);
    else
      for (int i = 0; i < count; i++) word |= uint64_t{bytes[i]} << (8 * i);
    ones += popcount_plain(word);
  }
  return ones;
}

}  // namespace

int border_classes(const Window& window) {
  return static_cast<int>(row_classes(window).taps.size() * column_classes(window).taps.size());
}

bool few_border_classes(const Window& window) { return border_classes(window) <= kMostBorderClasses; }

// Builds tables of everything that depends only on which taps are inside the image.
CountEpilogue::CountEpilogue(const Window& window, const BinarySums& sums, const Epilogue& epilogue, int input,
                             const CodeLayout& layout, const Kernels& kernels)
    : window_(window), sums_(sums), epilogue_(epilogue), input_(input), layout_(layout), kernels_(kernels) {
  const BorderClasses rows = row_classes(window), columns = column_classes(window);
  const int row_count = sums.counts_border() ? static_cast<int>(rows.taps.size()) : 1;
  const int column_count = sums.counts_border() ? static_cast<int>(columns.taps.size()) : 1;
  size_t rows_of_table = 0;
  for (const SumTerm& term : sums.terms())
    if (!term.of_window) rows_of_table += term.signs_times ? static_cast<size_t>(row_count) * column_count : 1;
  base_table_.reserve(rows_of_table * sums.stride());
  for (const SumTerm& term : sums.terms()) {
    if (term.of_window) {
      window_terms_++;
      continue;
    }
    base_at_.push_back(static_cast<int64_t>(base_table_.size()));
    for (int r = 0; r < (term.signs_times ? row_count : 1); r++)
      for (int c = 0; c < (term.signs_times ? column_count : 1); c++) {
        base_table_.resize(base_table_.size() + sums.stride());
        sums.term_base(term, rows.taps[r], columns.taps[c], base_table_.data() + base_table_.size() - sums.stride());
      }
  }
  for (int32_t multiple : sums.multiples()) multiples_.push_back(static_cast<float>(multiple));
  class_of_.assign(epilogue.pixels(), 0);
  if (!sums.counts_border()) return;
  const std::vector<int> row_class = rows.of(), column_class = columns.of();
  uint16_t* to = class_of_.data();
  for (int row : row_class)
    for (int column : column_class) *to++ = static_cast<uint16_t>(row * column_count + column);
}

void CountEpilogue::run(const RunContext& context, const Strip& strip) const {
  const EpilogueTarget target = epilogue_.target(context);
  if (strip.first >= strip.last) return;
  if (!sums_.one_term()) return run_terms(target, strip);
  const Counts c = counts_of(strip);
  kernels_.epilogue_counts(epilogue_.params(), target, c, strip.first, strip.last, strip.channel, strip.channels);
}

void CountEpilogue::count_and_run(const RunContext& context, const Strip& strip, const PopcountTile& tile) const {
  kernels_.popcount_epilogue(epilogue_.params(), epilogue_.target(context), counts_of(strip), tile, strip.first, strip.last,
                             strip.channel);
}

// Of a sum of one term.
Counts CountEpilogue::counts_of(const Strip& strip) const {
  const CountTerm term = term_at(0, strip);
  Counts c;
  c.count = strip.counts;
  c.count_stride = strip.pixel_stride;
  c.bases = term.bases;
  c.base_stride = term.base_stride;
  c.class_of = class_of_.data();
  c.scale = term.scale;
  c.multiple = *term.multiple;
  return c;
}

// For the terms of the strip's channels, the numbers of its windows, and either the sums of its pixels or the ones of its
// columns.
int64_t CountEpilogue::scratch_bytes(int64_t pixels, int channels) const {
  if (sums_.one_term()) return 0;
  const int64_t columns = window_terms_ ? int64_t{layout_.columns} * sums_.planes() : 0;
  return static_cast<int64_t>(sums_.terms().size() * sizeof(CountTerm) + pixels * (channels + window_terms_) * sizeof(float) +
                              columns * sizeof(int32_t));
}

void CountEpilogue::run_terms(const EpilogueTarget& target, const Strip& strip) const {
  CountTerm* terms = terms_of(strip);
  for (size_t t = 0; t < sums_.terms().size(); t++) terms[t] = term_at(t, strip);
  CountSums s;
  s.terms = terms;
  s.term_count = static_cast<int>(sums_.terms().size());
  s.plane_stride = strip.term_stride;
  s.pixel_stride = strip.pixel_stride;
  s.class_of = &class_of_[strip.first];
  s.pixels = strip.last - strip.first;
  s.channels = strip.channels;
  s.sums = sums_of(strip);
  kernels_.sum_counts(s);
  kernels_.epilogue(epilogue_.params(), target, s.sums, s.channels, strip.first, strip.last, strip.channel, strip.channels);
}

CountTerm CountEpilogue::term_at(size_t t, const Strip& strip) const {
  const SumTerm& from = sums_.terms()[t];
  CountTerm term;
  term.scale = from.scale + strip.channel;
  if (from.of_window) {
    term.window = numbers_of(strip) + int64_t{from.first_plane} * (strip.last - strip.first);
    return term;
  }
  term.bases = &base_table_[base_at_[t] + strip.channel];
  term.base_stride = from.signs_times ? sums_.stride() : 0;
  term.count = strip.counts + (int64_t{from.base} * sums_.planes() + from.first_plane) * strip.term_stride;
  term.multiple = multiples_.data() + from.first_plane;
  term.planes = from.planes;
  return term;
}

// Row by row of the image. The ones of a window are the sum over its columns, which windows share.
void CountEpilogue::count_windows(const RunContext& context, const Strip& strip) const {
  const int pixels = strip.last - strip.first, width = window_.out.width;
  if (!window_terms_ || pixels <= 0) return;
  float* numbers = numbers_of(strip);
  int32_t* ones = reinterpret_cast<int32_t*>(sums_of(strip));  // [plane][column]; the sums overwrite them later
  for (int pixel = strip.first, count; pixel < strip.last; pixel += count) {
    const int y = pixel / width, x = pixel % width;
    count = std::min(width - x, strip.last - pixel);
    const int kernel = window_.kernel.w, between = (count - 1) * window_.stride.w + (kernel - 1) * window_.dilation.w + 1;
    // With a large stride or dilation, most columns between the first and the last one belong to no window.
    const bool shared = between <= int64_t{count} * kernel;
    const int columns = shared ? between : count * kernel;
    const int next = shared ? window_.stride.w : kernel, tap = shared ? window_.dilation.w : 1;  // distances in `ones`
    for (int p = 0; p < sums_.planes(); p++) {
      if (shared)
        count_columns(context, p, y, x, 1, columns, ones + int64_t{p} * columns);
      else
        for (int i = 0; i < count; i++)
          count_columns(context, p, y, x + i, window_.dilation.w, kernel, ones + int64_t{p} * columns + int64_t{i} * kernel);
    }
    const Taps rows = window_.row_taps(y);
    for (int i = 0; i < count; i++) {
      const Taps taps = window_.column_taps(x + i);
      int32_t plane_sums[9] = {};
      plane_sums[sums_.planes()] = window_.in.channels * (rows.last - rows.first) * (taps.last - taps.first);
      for (int p = 0; p < sums_.planes(); p++)
        for (int c = 0; c < kernel; c++) plane_sums[p] += ones[int64_t{p} * columns + int64_t{i} * next + int64_t{c} * tap];
      for (int w = 0; w < window_terms_; w++)
        numbers[int64_t{w} * pixels + pixel - strip.first + i] =
            static_cast<float>(sums_.window_number(sums_.terms()[base_at_.size() + w], plane_sums));
    }
  }
}

// The ones of some columns of the code, `step` apart from the first one of window (y, x) on, in the rows that windows of this row
// read. The border is zeros.
void CountEpilogue::count_columns(const RunContext& context, int plane, int y, int x, int step, int columns,
                                  int32_t* ones) const {
  const int64_t first = layout_.left - window_.left + int64_t{x} * window_.stride.w;
  const int64_t top = layout_.top - window_.top + int64_t{y} * window_.stride.h;
  const uint8_t* from = context.codes[input_] + plane * layout_.plane_bytes + first * layout_.pixel_bytes;
  std::fill(ones, ones + columns, 0);
  for (int r = 0; r < window_.kernel.h; r++) {
    const uint8_t* at = from + (top + int64_t{r} * window_.dilation.h) * layout_.row_bytes;
    for (int c = 0; c < columns; c++, at += int64_t{step} * layout_.pixel_bytes) ones[c] += ones_in(at, layout_.pixel_bytes);
  }
}

}  // namespace unflip
