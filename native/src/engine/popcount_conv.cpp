// Binary convolution by popcount, using the tile of ../kernels/popcount.h.
//
// A strip is some pixels in a row, or several rows. What their windows read is copied to a thread's scratch, as pairs of words.
// Then, for each block of filters, the counts are computed tile by tile, and the epilogue runs for the whole strip.
//
// If a pixel is a whole number of pairs, the rows of the code are copied as they are, and a window is a place in them. Otherwise
// each window is copied, the bytes of all taps in order:
//
//     code           ... | x-1 | x | x+1 | ...         three rows of it, for a 3 x 3 kernel
//     window of x    | x-1 | x | x+1 | x-1 | x | x+1 | x-1 | x | x+1 | 0 |      up to a whole number of words
//
// A group of channels is a range of the bytes of every pixel. Its windows are counted separately.
#include <algorithm>

#include "../kernels/popcount.h"
#include "aligned.h"
#include "binary_conv.h"
#include "count_epilogue.h"

namespace unflip {
namespace {

constexpr int64_t kStripBytes = 32 << 10;  // of windows, approximately: a block's weights should fit into the cache with them
constexpr int kStripPixels = 224;          // at most
constexpr int kGrain = 8;                  // pixels, so that tiles are complete

// The filters of a tile.
struct Block {
  int filters, first, last;  // `filters`: how many fit; first .. last - 1: those that exist
  int64_t weights;           // the start of its weights
};

// Group by group, with the same number of blocks in each.
std::vector<Block> cut_in_blocks(int filters, int groups, int words) {
  std::vector<Block> blocks;
  int64_t at = 0;
  for (int group = 0; group < groups; group++) {
    const int end = filters / groups * (group + 1);
    for (int first = filters / groups * group; first < end;) {
      const int size = end - first > 16 ? 32 : 16;
      blocks.push_back({size, first, std::min(first + size, end), at});
      at += int64_t{words} * size;
      first += size;
    }
  }
  return blocks;
}

class PopcountConv : public Task {
 public:
  PopcountConv(const Op& op, const Quantizer& quantizer, int input, const std::vector<ValueInfo>& values,
               std::unique_ptr<Epilogue> epilogue, const Kernels& kernels, int jobs)
      : window_(op.conv, values[input].shape, op.shape), sums_(op.conv, quantizer, window_), kernels_(kernels), input_(input),
        layout_(values[input].layout), epilogue_(std::move(epilogue)),
        count_epilogue_(window_, sums_, *epilogue_, input, layout_, kernels), groups_(op.conv.groups),
        group_bytes_(layout_.pixel_bytes / groups_), words_((window_.kernel.h * window_.kernel.w * group_bytes_ + 3) / 4),
        blocks_(cut_in_blocks(op.conv.filters, groups_, words_)) {
    pack(op.conv);
    choose_jobs(jobs);
    place_pairs();
    plan_thread_scratch();
  }

  void run(const RunContext& context) const override {
    parallel(context, strips_.jobs, [&](int job, int thread) { run_strip(context, job, thread); });
  }

 private:
  int pixels() const { return window_.out.height * window_.out.width; }
  int window_step() const { return popcount_window(words_); }
  int terms() const { return sums_.bases() * sums_.planes(); }

  void pack(const Convolution& conv) {
    base_words_ = blocks_.back().weights + int64_t{words_} * blocks_.back().filters;
    weights_.assign(base_words_ * conv.bases, 0);
    for (int b = 0; b < conv.bases; b++)
      for (const Block& block : blocks_)
        for (int f = 0; block.first + f < block.last; f++) pack_filter(conv, b, block, f);
  }

  void pack_filter(const Convolution& conv, int base, const Block& block, int f) {
    const int taps = conv.kernel.h * conv.kernel.w, odd = words_ % 2;
    std::vector<uint32_t> row(window_step(), 0);
    int64_t bit = (int64_t{base} * conv.filters + block.first + f) * conv.channels * taps;
    for (int c = 0; c < conv.channels; c++)
      for (int t = 0; t < taps; t++, bit++) {
        const int at = t * group_bytes_ * 8 + c;
        if (conv.bits[bit / 8] >> (bit % 8) & 1) row[odd + at / 32] |= uint32_t{1} << (at % 32);
      }
    pair_words(row.data(), window_step());
    uint32_t* to = &weights_[base * base_words_ + block.weights + f];
    for (int k = 0; k < words_; k++) to[int64_t{k} * block.filters] = row[odd + k];
  }

  // The rows of the code that the windows of `count` pixels read, at most.
  int64_t rows_of(int count) const {
    const int64_t width = window_.out.width, out_rows = std::min<int64_t>((count + width - 2) / width + 1, window_.out.height);
    return (out_rows - 1) * window_.stride.h + int64_t{window_.kernel.h - 1} * window_.dilation.h + 1;
  }

  int64_t window_bytes(int64_t count) const { return count * window_step() * 4; }

  // Whether to copy rows instead of the windows of `count` pixels.
  bool in_rows(int count) const {
    const int64_t bytes = rows_of(count) * layout_.row_bytes;
    return group_bytes_ % 8 == 0 && bytes <= window_bytes(count) && bytes * sums_.planes() <= kStripBytes;
  }

  void choose_jobs(int jobs) {
    const int64_t fit = kStripBytes / (window_bytes(1) * sums_.planes());
    int strip = std::min(kStripPixels, pixels());
    if (!in_rows(strip)) strip = static_cast<int>(std::max<int64_t>(kGrain, std::min<int64_t>(kStripPixels, fit)));
    strips_ = Cut(pixels(), std::max(jobs, (pixels() + strip - 1) / strip), kGrain);
    in_rows_ = in_rows(std::min(strips_.size, pixels()));
  }

  void place_pairs() {
    const int taps = window_.kernel.h * window_.kernel.w, odd = words_ % 2;
    if (!in_rows_)
      for (int k = 0; k < words_ / 2; k++) pairs_.push_back(2 * (k + odd));
    else
      for (int t = 0; t < taps; t++) {
        const int64_t tap = t / window_.kernel.w * window_.dilation.h * layout_.row_bytes +
                            int64_t{t % window_.kernel.w} * window_.dilation.w * layout_.pixel_bytes;
        for (int b = 0; b < group_bytes_; b += 8) pairs_.push_back(static_cast<int32_t>((tap + b) / 4));
      }
  }

  // A thread's scratch: the windows of a strip for each plane, or the rows; the place of each window in them; the counts of the
  // strip for each base and plane; and the scratch of the epilogue.
  void plan_thread_scratch() {
    const int64_t bytes = in_rows_ ? rows_of(strips_.size) * layout_.row_bytes : window_bytes(strips_.size);
    plane_words_ = round_up(bytes + 64, 64) / 4;
    term_counts_ = int64_t{strips_.size} * 32;
    places_at_ = sums_.planes() * plane_words_ * 4;
    counts_at_ = places_at_ + round_up(int64_t{sums_.planes()} * strips_.size * static_cast<int64_t>(sizeof(uint32_t*)), 64);
    epilogue_at_ = counts_at_ + round_up(terms() * term_counts_ * 2, 64);
    thread_scratch_bytes = epilogue_at_ + count_epilogue_.scratch_bytes(strips_.size, 32);
  }

  void run_strip(const RunContext& context, int job, int thread) const {
    const int first = strips_.first(job), last = strips_.last(job);
    epilogue_->clear_border(context, first, last);
    uint8_t* scratch = context.scratch_of(thread);
    uint32_t* windows = reinterpret_cast<uint32_t*>(scratch);
    const uint32_t** places = reinterpret_cast<const uint32_t**>(scratch + places_at_);
    CountEpilogue::Strip strip;
    strip.counts = reinterpret_cast<uint16_t*>(scratch + counts_at_);
    strip.term_stride = term_counts_;
    strip.first = first;
    strip.last = last;
    strip.scratch = scratch + epilogue_at_;
    count_epilogue_.count_windows(context, strip);
    if (in_rows_) copy_rows(context, first, last, windows);
    const size_t blocks = blocks_.size() / groups_;
    for (int group = 0; group < groups_; group++) {
      if (!in_rows_) copy_windows(context, group, first, last, windows);
      find_windows(windows, group, first, last, places);
      for (size_t b = group * blocks; b < (group + 1) * blocks; b++) {
        const Block& block = blocks_[b];
        strip.channel = block.first;
        if (one_pass(block)) {
          PopcountTile tile = new_tile(block);
          tile.windows = places;
          count_epilogue_.count_and_run(context, strip, tile);
          continue;
        }
        count_strip(block, places, last - first, reinterpret_cast<uint16_t*>(scratch + counts_at_));
        strip.pixel_stride = block.filters;
        strip.channels = std::min(block.filters, padded(block.last) - block.first);
        count_epilogue_.run(context, strip);
      }
    }
  }

  // Whether the counts of a block need not be stored. Strips begin and end at multiples of kGrain, or with the image.
  bool one_pass(const Block& block) const {
    return kernels_.popcount_epilogue && sums_.one_term() && window_.out.width % popcount_pixels(block.filters) == 0 &&
           block.last - block.first == block.filters;
  }

  // The windows, and what is computed from them, are missing.
  PopcountTile new_tile(const Block& block) const {
    PopcountTile tile;
    tile.filters = block.filters;
    tile.words = words_;
    tile.pairs = pairs_.data();
    tile.weights = &weights_[block.weights];
    return tile;
  }

  // The first byte that the window of a pixel reads.
  int64_t window_at(int y, int x) const {
    return (layout_.top - window_.top + int64_t{y} * window_.stride.h) * layout_.row_bytes +
           (layout_.left - window_.left + int64_t{x} * window_.stride.w) * layout_.pixel_bytes;
  }

  // All rows that the strip reads, as one run.
  void copy_rows(const RunContext& context, int first, int last, uint32_t* to) const {
    const int width = window_.out.width, top = first / width, bottom = (last - 1) / width;
    WindowCopy copy;
    copy.pixels = copy.rows = copy.runs = 1;
    const int64_t below = int64_t{bottom - top} * window_.stride.h + int64_t{window_.kernel.h - 1} * window_.dilation.h;
    copy.run = static_cast<int>((below + 1) * layout_.row_bytes);
    for (int p = 0; p < sums_.planes(); p++) {
      copy.from = context.codes[input_] + p * layout_.plane_bytes +
                  (layout_.top - window_.top + int64_t{top} * window_.stride.h) * layout_.row_bytes;
      copy.to = to + p * plane_words_;
      kernels_.copy_windows(copy);
    }
  }

  // The place of each pixel's window in the scratch, for each plane.
  void find_windows(const uint32_t* windows, int group, int first, int last, const uint32_t** places) const {
    const int width = window_.out.width, top = first / width;
    const int64_t step = in_rows_ ? int64_t{window_.stride.w} * layout_.pixel_bytes / 4 : window_step();
    const int64_t rows = window_at(top, 0) - (layout_.left - window_.left) * int64_t{layout_.pixel_bytes};  // start of the copied
    for (int p = 0; p < sums_.planes(); p++, windows += plane_words_)
      for (int pixel = first, y = top, x = first - top * width, end; pixel < last; pixel = end, x = 0, y++) {
        end = std::min(pixel + width - x, last);
        const uint32_t* at = windows + (in_rows_ ? (window_at(y, x) - rows + group * group_bytes_) / 4 : (pixel - first) * step);
        for (int i = pixel; i < end; i++, at += step) *places++ = at;
      }
  }

  // Row by row of the image.
  void copy_windows(const RunContext& context, int group, int first, int last, uint32_t* to) const {
    WindowCopy copy;
    copy.pixel_step = int64_t{window_.stride.w} * layout_.pixel_bytes;
    copy.rows = window_.kernel.h;
    copy.row_step = window_.dilation.h * layout_.row_bytes;
    const bool together = window_.dilation.w == 1 && groups_ == 1;
    copy.runs = together ? 1 : window_.kernel.w;
    copy.run = together ? window_.kernel.w * group_bytes_ : group_bytes_;
    copy.run_step = int64_t{window_.dilation.w} * layout_.pixel_bytes;
    const int width = window_.out.width;
    for (int p = 0; p < sums_.planes(); p++, to += plane_words_)
      for (int pixel = first; pixel < last; pixel += copy.pixels) {
        const int y = pixel / width, x = pixel % width;
        copy.pixels = std::min(width - x, last - pixel);
        copy.from = context.codes[input_] + p * layout_.plane_bytes + group * group_bytes_ + window_at(y, x);
        copy.to = to + int64_t{pixel - first} * window_step();
        kernels_.copy_windows(copy);
      }
  }

  // The counts of a block for the pixels of a strip.
  void count_strip(const Block& block, const uint32_t* const* places, int count, uint16_t* counts) const {
    PopcountTile tile = new_tile(block);
    const int size = popcount_pixels(block.filters);
    for (int b = 0; b < sums_.bases(); b++)
      for (int p = 0; p < sums_.planes(); p++) {
        tile.weights = &weights_[b * base_words_ + block.weights];
        tile.windows = places + int64_t{p} * count;
        tile.counts = counts + (int64_t{b} * sums_.planes() + p) * term_counts_;
        for (int i = 0; i < count; i += size) {
          tile.pixels = std::min(size, count - i);
          kernels_.popcount_tile(tile);
          tile.windows += size;
          tile.counts += size * block.filters;
        }
      }
  }

  Window window_;
  BinarySums sums_;
  const Kernels& kernels_;
  int input_;
  CodeLayout layout_;
  std::unique_ptr<Epilogue> epilogue_;
  CountEpilogue count_epilogue_;
  int groups_, group_bytes_;
  int words_;  // of a window
  std::vector<Block> blocks_;

  AlignedVector<uint32_t> weights_;  // [base][block][word][filter]
  int64_t base_words_ = 0;

  Cut strips_;
  bool in_rows_ = false;        // rows are copied instead of windows
  std::vector<int32_t> pairs_;  // the place of each pair in a window, in words
  int64_t plane_words_ = 0, term_counts_ = 0, places_at_ = 0, counts_at_ = 0, epilogue_at_ = 0;
};

}  // namespace

std::unique_ptr<Task> make_popcount_conv(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue,
                                         const Kernels& kernels, int jobs) {
  return std::make_unique<PopcountConv>(op, quantizer, input, values, std::move(epilogue), kernels, jobs);
}

}  // namespace unflip
