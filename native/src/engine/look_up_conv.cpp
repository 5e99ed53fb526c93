// Binary convolution by look-up, using the tile of ../kernels/look_up.h.
//
// A *part* is some rows of the output. First the code's bytes become look-up numbers of pairs of pixels. Kernels three wide with an
// even (or large) output height pair row y with row y + half, so that all windows share the rows of pairs:
//
//     code rows with border   0 1 2 3 4 5 6 7 8 9         output rows 0 1 2 3 | 4 5 6 7      half = 4
//     rows of pairs           (0,4) (1,5) (2,6) (3,7) (4,8) (5,9)       output rows (0,4) read the first three, (1,5) the next
//
// For other kernels each window is copied, and a part is some pairs: pixels 0 and 1, 2 and 3, and so on. Then tiles are computed
// for all pairs and filters.
//
// Threads have different rows, as in other ops. Rows that they share are paired twice. If threads had different filters instead, they
// would write next to each other in the same cache lines, which takes longer than the sums.
//
// A group of channels is a range of the numbers of every pixel, so its windows are read from the same rows of pairs.
#include <algorithm>
#include <cstring>

#include "../kernels/look_up.h"
#include "aligned.h"
#include "binary_conv.h"
#include "count_epilogue.h"

namespace unflip {
namespace {

constexpr int64_t kMostDepth = 65535;  // counts are 16 bits
constexpr int kStripPairs = 32;        // pairs of a strip, at most
constexpr int kPartPairs = 8;          // pairs of a part, at least, where windows are copied

// The filters of a tile.
struct Block {
  int group;
  int filters, first, last;  // `filters`: how many fit; first .. last - 1: those that exist
  int64_t weights;           // the start of its weights
};

std::vector<Block> cut_in_blocks(int filters, int groups) {
  std::vector<Block> blocks;
  for (int group = 0; group < groups; group++) {
    const int end = filters / groups * (group + 1);
    for (int first = filters / groups * group; first < end;) {
      const int left = end - first, size = left > 48 ? 64 : left > 16 ? 32 : 16;
      blocks.push_back({group, size, first, std::min(first + size, end), 0});
      first += size;
    }
  }
  return blocks;
}

class LookUpConv : public Task {
 public:
  LookUpConv(const Op& op, const Quantizer& quantizer, int input, const std::vector<ValueInfo>& values,
             std::unique_ptr<Epilogue> epilogue, const Kernels& kernels, int jobs)
      : window_(op.conv, values[input].shape, op.shape), sums_(op.conv, quantizer, window_), kernels_(kernels), input_(input),
        layout_(values[input].layout), epilogue_(std::move(epilogue)),
        count_epilogue_(window_, sums_, *epilogue_, input, layout_, kernels), channel_groups_(op.conv.groups),
        blocks_(cut_in_blocks(op.conv.filters, channel_groups_)) {
    choose_pairing();
    pack(op.conv);
    choose_jobs(jobs);
    plan_thread_scratch();
  }

  void run(const RunContext& context) const override {
    parallel(context, parts_.jobs * block_jobs_.jobs, [&](int job, int thread) {
      run_part(context, part(job / block_jobs_.jobs), job % block_jobs_.jobs, thread);
    });
  }

 private:
  // Its pairs by row and column. first .. last - 1: rows of the output, or pairs of windows.
  struct Part {
    int first, last, rows, columns;
  };

  Part part(int number) const {
    const int first = parts_.first(number), last = parts_.last(number);
    if (in_rows_) return {first, last, (last - first + 1) / 2, window_.out.width};
    return {first, last, 1, last - first};
  }

  int nibbles() const { return 2 * layout_.pixel_bytes; }  // per pixel
  int pixels() const { return window_.out.height * window_.out.width; }
  // The first row and column of the code, including its border, that a window reads.
  int64_t code_row(int y) const { return layout_.top - window_.top + int64_t{y} * window_.stride.h; }
  int64_t code_column(int x) const { return layout_.left - window_.left + int64_t{x} * window_.stride.w; }

  void choose_pairing() {
    in_rows_ = pairs_rows(window_, channel_groups_);
    if (in_rows_) {
      number_row_ = round_up(window_.columns() * nibbles(), 32);
      segments_ = window_.kernel.h;
      groups_ = nibbles() / channel_groups_;
      tap_ = int64_t{window_.dilation.w} * nibbles();
      segment_step_ = window_.dilation.h * number_row_;
      adjacent_ = window_.stride.w == 1 && window_.dilation.w == 1;
    } else {
      segments_ = 1;
      groups_ = (window_.kernel.h * window_.kernel.w * nibbles() + 2) / 3;
      tap_ = groups_;
      number_row_ = 3 * groups_ + 32;
    }
  }

  // The rows of the code below a window's first one that it extends over.
  int64_t window_rows() const { return int64_t{window_.kernel.h - 1} * window_.dilation.h; }
  // The rows of numbers of a part with `rows` rows of pairs.
  int64_t number_rows(int rows) const { return int64_t{rows - 1} * window_.stride.h + window_rows() + 1; }

  // Nibble n of a filter in the tile's order: the kernel position and the nibble of the pixel, or none (padding).
  bool find_nibble(int segment, int group, int k, int* tap, int* nibble) const {
    if (in_rows_) {
      *tap = segment * window_.kernel.w + k;
      *nibble = group;
      return true;
    }
    const int n = k * groups_ + group;
    *tap = n / nibbles();
    *nibble = n % nibbles();
    return *tap < window_.kernel.h * window_.kernel.w;
  }

  void pack(const Convolution& conv) {
    int64_t bytes = 0;
    for (Block& block : blocks_) {
      block.weights = bytes;
      bytes += int64_t{segments_} * groups_ * 3 * look_up_row(block.filters);
    }
    base_bytes_ = bytes;
    weights_.assign(bytes * conv.bases, 0);
    for (int b = 0; b < conv.bases; b++)
      for (const Block& block : blocks_)
        for (int f = 0; block.first + f < block.last; f++) pack_filter(conv, b, block, f);
  }

  void pack_filter(const Convolution& conv, int base, const Block& block, int f) {
    const int taps = conv.kernel.h * conv.kernel.w;
    const int64_t first = (int64_t{base} * conv.filters + block.first + f) * conv.channels * taps;
    auto bits_of = [&](int tap, int nibble) {
      int bits = 0;
      for (int c = nibble * 4; c < nibble * 4 + 4 && c < conv.channels; c++) {
        const int64_t bit = first + int64_t{c} * taps + tap;
        bits |= (conv.bits[bit / 8] >> (bit % 8) & 1) << (c % 4);
      }
      return static_cast<uint8_t>(bits);
    };
    uint8_t* to = &weights_[base * base_bytes_ + block.weights + look_up_position(block.filters, f)];
    for (int s = 0; s < segments_; s++)
      for (int g = 0; g < groups_; g++)
        for (int k = 0; k < 3; k++, to += look_up_row(block.filters)) {
          int tap, nibble;
          *to = find_nibble(s, g, k, &tap, &nibble) ? bits_of(tap, nibble) : 0;
          if (block.filters == 16) to[16] = *to;
        }
  }

  // A job is a part and some blocks of filters. Only where there are fewer parts than jobs, a part's blocks are divided. Each part
  // should have about as many rows as its windows extend over, because those are paired again.
  void choose_jobs(int jobs) {
    const int64_t below = std::max<int64_t>(1, window_rows() / 2 / window_.stride.h);
    const int items = in_rows_ ? window_.out.height : (pixels() + 1) / 2;
    const int grain = in_rows_ ? static_cast<int>(2 * std::min<int64_t>(below, items)) : kPartPairs;
    const int grains = (items + grain - 1) / grain, size = std::max(1, grains / jobs);
    parts_ = Cut(items, (grains + size - 1) / size, grain);
    block_jobs_ = Cut(static_cast<int>(blocks_.size()), (jobs + parts_.jobs - 1) / parts_.jobs, 1);
  }

  // A thread's scratch: the numbers of a part; windows of two pixels while pairing, and later the counts of a strip for each base
  // and plane, with space for a tile before them; and the scratch of the epilogue.
  void plan_thread_scratch() {
    const Part largest = part(0);
    plane_numbers_ = (in_rows_ ? number_rows(largest.rows) : largest.columns) * number_row_ + 32;
    rest_at_ = round_up(sums_.planes() * plane_numbers_ * static_cast<int64_t>(sizeof(uint16_t)) + 256, 64);
    const int64_t windows = 2 * round_up(int64_t{window_.kernel.h} * window_.kernel.w * layout_.pixel_bytes + 16, 64);
    counts_before_ = 2 * kLookUpPairs * 64;
    counts_of_strip_ = 2 * (kStripPairs + 2 * kLookUpPairs) * 64;
    const int64_t counts = int64_t{sums_.bases()} * sums_.planes() * counts_of_strip_ * sizeof(uint16_t);
    epilogue_at_ = rest_at_ + round_up(counts, 64);
    thread_scratch_bytes = std::max(rest_at_ + windows, epilogue_at_ + count_epilogue_.scratch_bytes(2 * kStripPairs, 64));
  }

  uint16_t* numbers(const RunContext& context, int thread, int plane) const {
    return reinterpret_cast<uint16_t*>(context.scratch_of(thread)) + plane * plane_numbers_;
  }

  void pair_rows(const RunContext& context, const Part& part, int thread) const {
    const int64_t bytes = window_.columns() * layout_.pixel_bytes, rows = number_rows(part.rows);
    for (int p = 0; p < sums_.planes(); p++)
      for (int64_t r = 0; r < rows; r++) {
        const int64_t first = code_row(part.first) + r;
        const int64_t second = std::min<int64_t>(code_row(part.first + part.rows) + r, layout_.rows - 1);
        const uint8_t* plane = context.codes[input_] + p * layout_.plane_bytes + code_column(0) * layout_.pixel_bytes;
        kernels_.pair_numbers(plane + first * layout_.row_bytes, plane + second * layout_.row_bytes, bytes,
                              numbers(context, thread, p) + r * number_row_);
      }
  }

  void copy_window(const uint8_t* plane, int pixel, uint8_t* to) const {
    const int y = pixel / window_.out.width, x = pixel % window_.out.width, bytes = layout_.pixel_bytes;
    const uint8_t* from = plane + code_row(y) * layout_.row_bytes + code_column(x) * bytes;
    const int run = window_.dilation.w == 1 ? window_.kernel.w * bytes : bytes;
    for (int r = 0; r < window_.kernel.h; r++, from += window_.dilation.h * layout_.row_bytes)
      for (int at = 0; at < window_.kernel.w * bytes; at += run, to += run)
        std::memcpy(to, from + int64_t{at} * window_.dilation.w, run);
  }

  void pair_windows(const RunContext& context, const Part& part, int thread) const {
    const int bytes = window_.kernel.h * window_.kernel.w * layout_.pixel_bytes;
    uint8_t* first = context.scratch_of(thread) + rest_at_;
    uint8_t* second = first + round_up(bytes + 16, 64);
    for (int p = 0; p < sums_.planes(); p++)
      for (int pair = part.first; pair < part.last; pair++) {
        const uint8_t* plane = context.codes[input_] + p * layout_.plane_bytes;
        copy_window(plane, 2 * pair, first);
        copy_window(plane, std::min(2 * pair + 1, pixels() - 1), second);
        uint16_t* to = numbers(context, thread, p) + (pair - part.first) * number_row_;
        kernels_.pair_numbers(first, second, bytes, to);
        std::fill(to + 2 * bytes, to + 3 * groups_, uint16_t{0});
      }
  }

  // The numbers of a pair's window.
  const uint16_t* numbers_at(const uint16_t* plane, int row, int column) const {
    if (!in_rows_) return plane + column * number_row_;
    return plane + int64_t{row} * window_.stride.h * number_row_ + int64_t{column} * window_.stride.w * nibbles();
  }

  void clear_border(const RunContext& context, const Part& part) const {
    const int step = in_rows_ ? window_.out.width : 2;
    epilogue_->clear_border(context, part.first * step, std::min(part.last * step, pixels()));
  }

  void run_part(const RunContext& context, const Part& part, int block_job, int thread) const {
    if (block_job == 0) clear_border(context, part);
    if (in_rows_)
      pair_rows(context, part, thread);
    else
      pair_windows(context, part, thread);
    const Cut strips(part.columns, (part.columns + kStripPairs - 1) / kStripPairs, kLookUpPairs);
    uint16_t* counts = reinterpret_cast<uint16_t*>(context.scratch_of(thread) + rest_at_) + counts_before_;
    for (int b = block_jobs_.first(block_job); b < block_jobs_.last(block_job); b++)
      for (int i = 0; i < part.rows * strips.jobs; i++) {
        const Block& block = blocks_[b];
        const int row = i / strips.jobs, first = strips.first(i % strips.jobs), last = strips.last(i % strips.jobs);
        count_strip(context, block, part, row, first, last, thread, counts);
        run_epilogue(context, block, counts, span(part, row, first, last, 0), thread);
        run_epilogue(context, block, counts + block.filters, span(part, row, first, last, 1), thread);
      }
  }

  // The output pixels of the first (or second) pixels of some pairs, and the distance of their counts in pixels.
  struct Span {
    int first, last, step;
  };

  Span span(const Part& part, int row, int first, int last, int which) const {
    if (!in_rows_) {
      if (which) return {0, 0, 1};
      return {2 * (part.first + first), std::min(2 * (part.first + last), pixels()), 1};
    }
    const int y = part.first + row + which * part.rows, pixel = y * window_.out.width;
    return y < part.last ? Span{pixel + first, pixel + last, 2} : Span{0, 0, 2};
  }

  // The counts of pairs first .. last - 1 of a row. The last tile of a row may begin before `first`, so that it does not extend
  // beyond the row.
  void count_strip(const RunContext& context, const Block& block, const Part& part, int row, int first, int last, int thread,
                   uint16_t* counts) const {
    const int size = look_up_pairs(block.filters);
    LookUpTile tile;
    tile.filters = block.filters;
    tile.adjacent = in_rows_ && adjacent_ && part.columns >= size;
    tile.tap = tap_;
    tile.segments = segments_;
    tile.groups = groups_;
    tile.segment_step = segment_step_;
    for (int b = 0; b < sums_.bases(); b++)
      for (int p = 0; p < sums_.planes(); p++) {
        const uint16_t* plane = numbers(context, thread, p) + block.group * groups_;
        tile.weights = &weights_[b * base_bytes_ + block.weights];
        for (int column = first; column < last; column += size) {
          const int start = std::max(0, std::min(column, part.columns - size));
          tile.pairs[0] = numbers_at(plane, row, start);
          if (!tile.adjacent)
            for (int i = 1; i < size; i++) tile.pairs[i] = numbers_at(plane, row, std::min(start + i, part.columns - 1));
          tile.counts = counts + (int64_t{b} * sums_.planes() + p) * counts_of_strip_ + (start - first) * 2 * block.filters;
          kernels_.look_up_tile(tile);
        }
      }
  }

  void run_epilogue(const RunContext& context, const Block& block, const uint16_t* counts, const Span& span, int thread) const {
    CountEpilogue::Strip strip;
    strip.counts = counts;
    strip.term_stride = counts_of_strip_;
    strip.pixel_stride = int64_t{span.step} * block.filters;
    strip.first = span.first;
    strip.last = span.last;
    strip.channel = block.first;
    strip.channels = std::min(block.filters, padded(block.last) - block.first);
    strip.scratch = context.scratch_of(thread) + epilogue_at_;
    count_epilogue_.count_windows(context, strip);
    count_epilogue_.run(context, strip);
  }

  Window window_;
  BinarySums sums_;
  const Kernels& kernels_;
  int input_;
  CodeLayout layout_;
  std::unique_ptr<Epilogue> epilogue_;
  CountEpilogue count_epilogue_;
  int channel_groups_;
  std::vector<Block> blocks_;

  // Of the numbers of pairs.
  bool in_rows_ = false, adjacent_ = false;
  int64_t number_row_ = 0, plane_numbers_ = 0;
  int segments_ = 0, groups_ = 0;
  int64_t tap_ = 0, segment_step_ = 0;

  AlignedVector<uint8_t> weights_;  // [base][block][segment][group][tap][look_up_row]
  int64_t base_bytes_ = 0;

  Cut parts_, block_jobs_;
  int counts_before_ = 0, counts_of_strip_ = 0;
  int64_t rest_at_ = 0, epilogue_at_ = 0;  // in a thread's scratch
};

// Whether each group is whole bytes of a pixel in the input and output, and needs no sum of its window.
bool knows_groups(const Convolution& conv, const Window& window, const Kernels& kernels) {
  if (conv.groups == 1) return true;
  const bool plain = std::all_of(conv.offset.begin(), conv.offset.end(), [](float v) { return v == 0; });
  return plain && conv.channels % 8 == 0 && conv.filters / conv.groups % 8 == 0 &&
         (kernels.popcount_tile || pairs_rows(window, conv.groups));
}

}  // namespace

// Pairing rows wastes half a row if the height is odd. Copying windows costs as much as about four filters and does not support
// groups.
bool pairs_rows(const Window& window, int groups) {
  const int height = window.out.height, filters = window.out.channels;
  return window.kernel.w == 3 && height > 1 && (groups > 1 || height % 2 == 0 || 4 * height > filters);
}

bool looks_up(const Op& op, const Quantizer& quantizer, const Shape& in, const Kernels& kernels) {
  if (!kernels.prefer_look_up) return false;
  const Window window(op.conv, in, op.shape);
  if (!knows_groups(op.conv, window, kernels) || !window.padding_is_moderate()) return false;
  const int64_t depth = int64_t{padded(in.channels)} * op.conv.kernel.h * op.conv.kernel.w;
  if (depth > kMostDepth || depth * code_units(quantizer).largest >= 1 << 24) return false;
  return quantizer.offset == 0 || few_border_classes(window);
}

bool small_groups(const Op& op, const Shape& in) {
  const Convolution& c = op.conv;
  return c.groups > 1 && c.channels <= 16 && pairs_rows(Window(c, in, op.shape), c.groups);
}

std::unique_ptr<Task> make_look_up_conv(const Op& op, const Quantizer& quantizer, int input, const std::vector<ValueInfo>& values,
                                        std::unique_ptr<Epilogue> epilogue, const Kernels& kernels, int jobs) {
  return std::make_unique<LookUpConv>(op, quantizer, input, values, std::move(epilogue), kernels, jobs);
}

}  // namespace unflip
