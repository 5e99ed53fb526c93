// Binary convolution by popcount, using the tile of ../kernels/popcount.h.
//
// A strip is some pixels in a row, or several rows. Their windows are copied to a thread's scratch, the bytes of all taps in
// order, as pairs of words. Then, for each block of filters, the counts are computed tile by tile, and the epilogue runs for the
// whole strip:
//
//     code           ... | x-1 | x | x+1 | ...         three rows of it, for a 3 x 3 kernel
//     window of x    | x-1 | x | x+1 | x-1 | x | x+1 | x-1 | x | x+1 | 0 |      up to a whole number of words
//
// A group of channels is a range of the bytes of every pixel. Its windows are copied and counted separately.
#include <algorithm>

#include "../kernels/popcount.h"
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
               std::unique_ptr<Epilogue> epilogue, const Kernels& kernels, int threads)
      : window_(op.conv, values[input].shape, op.shape), sums_(op.conv, quantizer, window_), kernels_(kernels), input_(input),
        layout_(values[input].layout), epilogue_(std::move(epilogue)),
        count_epilogue_(window_, sums_, *epilogue_, input, layout_, kernels), groups_(op.conv.groups),
        group_bytes_(layout_.pixel_bytes / groups_), words_((window_.kernel.h * window_.kernel.w * group_bytes_ + 3) / 4),
        blocks_(cut_in_blocks(op.conv.filters, groups_, words_)) {
    pack(op.conv);
    choose_jobs(threads);
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
    weights_.assign(base_words_ * conv.bases + 16, 0);
    first_weight_ = static_cast<int64_t>(-reinterpret_cast<intptr_t>(weights_.data()) & 63) / 4;
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
    uint32_t* to = &weights_[first_weight_ + base * base_words_ + block.weights + popcount_position(block.filters, f)];
    for (int k = 0; k < words_; k++) to[int64_t{k} * block.filters] = row[odd + k];
  }

  void choose_jobs(int threads) {
    const int64_t bytes = int64_t{window_step()} * 4 * sums_.planes();
    const int strip = static_cast<int>(std::max<int64_t>(kGrain, std::min<int64_t>(kStripPixels, kStripBytes / bytes)));
    const int jobs = (pixels() + strip - 1) / strip;
    strips_ = Cut(pixels(), threads > 1 ? std::max(jobs, threads * kJobsPerThread) : jobs, kGrain);
  }

  // A thread's scratch: the windows of a strip for each plane, its counts for each base and plane, and the scratch of the
  // epilogue.
  void plan_thread_scratch() {
    plane_words_ = round_up(int64_t{strips_.size} * window_step() * 4 + 64, 64) / 4;
    term_counts_ = int64_t{strips_.size} * 32;
    counts_at_ = sums_.planes() * plane_words_ * 4;
    epilogue_at_ = counts_at_ + round_up(terms() * term_counts_ * 2, 64);
    thread_scratch_bytes = epilogue_at_ + count_epilogue_.scratch_bytes(strips_.size, 32);
  }

  void run_strip(const RunContext& context, int job, int thread) const {
    const int first = strips_.first(job), last = strips_.last(job);
    epilogue_->clear_border(context, first, last);
    uint8_t* scratch = context.scratch_of(thread);
    uint32_t* windows = reinterpret_cast<uint32_t*>(scratch);
    uint16_t* counts = reinterpret_cast<uint16_t*>(scratch + counts_at_);
    CountEpilogue::Strip strip;
    strip.counts = counts;
    strip.term_stride = term_counts_;
    strip.first = first;
    strip.last = last;
    strip.scratch = scratch + epilogue_at_;
    count_epilogue_.count_windows(context, strip);
    const size_t blocks = blocks_.size() / groups_;
    for (int group = 0; group < groups_; group++) {
      for (int p = 0; p < sums_.planes(); p++)
        copy_windows(context.codes[input_] + p * layout_.plane_bytes + group * group_bytes_, first, last,
                     windows + p * plane_words_);
      for (size_t b = group * blocks; b < (group + 1) * blocks; b++) {
        const Block& block = blocks_[b];
        count_strip(block, windows, last - first, counts);
        strip.pixel_stride = block.filters;
        strip.channel = block.first;
        strip.channels = std::min(block.filters, padded(block.last) - block.first);
        count_epilogue_.run(context, strip);
      }
    }
  }

  // Row by row of the image.
  void copy_windows(const uint8_t* plane, int first, int last, uint32_t* to) const {
    WindowCopy copy;
    copy.pixel_step = int64_t{window_.stride.w} * layout_.pixel_bytes;
    copy.rows = window_.kernel.h;
    copy.row_step = window_.dilation.h * layout_.row_bytes;
    const bool together = window_.dilation.w == 1 && groups_ == 1;
    copy.runs = together ? 1 : window_.kernel.w;
    copy.run = together ? window_.kernel.w * group_bytes_ : group_bytes_;
    copy.run_step = int64_t{window_.dilation.w} * layout_.pixel_bytes;
    const int width = window_.out.width;
    for (int pixel = first; pixel < last; pixel += copy.pixels) {
      const int y = pixel / width, x = pixel % width;
      copy.pixels = std::min(width - x, last - pixel);
      copy.from = plane + (layout_.top - window_.top + int64_t{y} * window_.stride.h) * layout_.row_bytes +
                  (layout_.left - window_.left + int64_t{x} * window_.stride.w) * layout_.pixel_bytes;
      copy.to = to + int64_t{pixel - first} * window_step();
      kernels_.copy_windows(copy);
    }
  }

  // The counts of a block for the pixels of a strip.
  void count_strip(const Block& block, const uint32_t* windows, int count, uint16_t* counts) const {
    PopcountTile tile;
    tile.filters = block.filters;
    tile.words = words_;
    tile.window_step = window_step();
    const int size = popcount_pixels(block.filters);
    for (int b = 0; b < sums_.bases(); b++)
      for (int p = 0; p < sums_.planes(); p++) {
        tile.weights = &weights_[first_weight_ + b * base_words_ + block.weights];
        tile.windows = windows + p * plane_words_;
        tile.counts = counts + (int64_t{b} * sums_.planes() + p) * term_counts_;
        for (int i = 0; i < count; i += size) {
          tile.pixels = std::min(size, count - i);
          kernels_.popcount_tile(tile);
          tile.windows += size * tile.window_step;
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

  std::vector<uint32_t> weights_;  // [base][block][word][filter]
  int64_t first_weight_ = 0, base_words_ = 0;

  Cut strips_;
  int64_t plane_words_ = 0, term_counts_ = 0, counts_at_ = 0, epilogue_at_ = 0;
};

}  // namespace

std::unique_ptr<Task> make_popcount_conv(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue,
                                         const Kernels& kernels, int threads) {
  return std::make_unique<PopcountConv>(op, quantizer, input, values, std::move(epilogue), kernels, threads);
}

}  // namespace unflip
