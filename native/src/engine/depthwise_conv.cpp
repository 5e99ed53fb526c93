// One row of the image at a time, read in place: first the pixels in the middle, whose windows are inside the image horizontally,
// then those at the ends. Taps outside the image are zeros and are part of the sum, as in a convolution of the padded image: with
// an infinite weight they give NaN, and -0 + 0 is 0. No border is written; such taps point to zeros.
#include "depthwise_conv.h"

#include <algorithm>

#include "aligned.h"
#include "pooled_rows.h"
#include "window.h"

namespace unflip {
namespace {

class DepthwiseConv : public Task {
 public:
  DepthwiseConv(const Op& op, const std::vector<float>& weight, int input, const std::vector<ValueInfo>& values,
                std::unique_ptr<Epilogue> epilogue, const Op* pool, std::unique_ptr<Epilogue> pool_epilogue, int jobs)
      : window_(op.conv, values[input].shape, op.shape), input_(input), input_stride_(values[input].stride),
        epilogue_(std::move(epilogue)) {
    pack(weight);
    sort_columns();
    if (pool) {
      pooled_ = std::make_unique<PooledRows>(*pool, *epilogue_, std::move(pool_epilogue), 1, jobs);
      taps_at_ = round_up(pooled_->bytes(), 64);
    } else {
      cut_ = Cut(window_.out.height, jobs, 1);
      if (!epilogue_->stores_floats()) taps_at_ = round_up(row_floats() * sizeof(float), 64);
    }
    thread_scratch_bytes = taps_at_ + int64_t{taps()} * kDepthwisePixels * static_cast<int64_t>(sizeof(const float*));
  }

  void run(const RunContext& context) const override {
    if (pooled_) {
      pooled_->run(context, [&](int thread) {
        return [this, &context, thread](int y, float* row) { make_row(context, y, row, thread); };
      });
      return;
    }
    epilogue_->clear_border(context);
    parallel(context, cut_.jobs, [&](int job, int thread) {
      for (int y = cut_.first(job); y < cut_.last(job); y++) run_row(context, y, thread);
    });
  }

 private:
  int taps() const { return window_.kernel.h * window_.kernel.w; }
  int64_t row_floats() const { return int64_t{window_.out.width} * epilogue_->stride(); }
  int64_t pixel_step() const { return int64_t{window_.stride.w} * input_stride_; }

  void pack(const std::vector<float>& weight) {
    const int channels = epilogue_->stride();
    weights_.assign(int64_t{taps()} * channels, 0.f);
    for (int c = 0; c < window_.out.channels; c++)
      for (int t = 0; t < taps(); t++) weights_[int64_t{t} * channels + c] = weight[int64_t{c} * taps() + t];
  }

  // The columns in the middle are adjacent.
  void sort_columns() {
    for (int x = 0; x < window_.out.width; x++)
      if (!(window_.column_taps(x) == Taps{0, window_.kernel.w}))
        ends_.push_back(x);
      else if (middle_count_++ == 0)
        middle_ = x;
    zeros_.assign(std::max(0, middle_count_ - 1) * pixel_step() + epilogue_->stride(), 0.f);
  }

  void run_row(const RunContext& context, int y, int thread) const {
    const EpilogueTarget target = epilogue_->target(context);
    const int stride = epilogue_->stride(), first = y * window_.out.width;
    float* sums = target.out ? target.out + int64_t{first} * stride : reinterpret_cast<float*>(context.scratch_of(thread));
    make_row(context, y, sums, thread);
    if (epilogue_->has_work())
      context.kernels->epilogue(epilogue_->params(), target, sums, stride, first, first + window_.out.width, 0, stride);
  }

  void make_row(const RunContext& context, int y, float* row, int thread) const {
    const float** taps_of = reinterpret_cast<const float**>(context.scratch_of(thread) + taps_at_);
    DepthwiseTile tile;
    tile.taps = taps_of;
    tile.tap_count = taps();
    tile.weights = weights_.data();
    tile.channels = epilogue_->stride();
    make_middle(context, tile, y, row, taps_of);
    make_ends(context, tile, y, row, taps_of);
  }

  void make_middle(const RunContext& context, DepthwiseTile& tile, int y, float* row, const float** taps_of) const {
    if (!middle_count_) return;
    aim(context.values[input_], y, middle_, taps_of, 1);
    tile.pixels = middle_count_;
    tile.pixel_step = pixel_step();
    tile.out = row + int64_t{middle_} * tile.channels;
    context.kernels->depthwise_tile(tile);
  }

  void make_ends(const RunContext& context, DepthwiseTile& tile, int y, float* row, const float** taps_of) const {
    tile.out = row;
    const int count = static_cast<int>(ends_.size());
    for (int i = 0; i < count; i += tile.pixels) {
      tile.pixels = std::min(kDepthwisePixels, count - i);
      tile.columns = &ends_[i];
      for (int p = 0; p < tile.pixels; p++) aim(context.values[input_], y, ends_[i + p], taps_of + p, tile.pixels);
      context.kernels->depthwise_tile(tile);
    }
  }

  // The taps of a pixel, `step` places apart.
  void aim(const float* in, int y, int x, const float** to, int step) const {
    const Taps rows = window_.row_taps(y), columns = window_.column_taps(x);
    const float* zeros = zeros_.data();
    const int64_t right = int64_t{window_.dilation.w} * input_stride_;
    for (int r = 0; r < window_.kernel.h; r++) {
      const int64_t row = window_.row(y) + int64_t{r} * window_.dilation.h;
      const int64_t first = (row * window_.in.width + window_.column(x)) * input_stride_;
      const bool inside = r >= rows.first && r < rows.last;
      for (int c = 0; c < window_.kernel.w; c++, to += step)
        *to = inside && c >= columns.first && c < columns.last ? in + (first + c * right) : zeros;
    }
  }

  Window window_;
  int input_, input_stride_;
  std::unique_ptr<Epilogue> epilogue_;
  AlignedVector<float> weights_;        // [tap][channel]
  AlignedVector<float> zeros_;          // for all pixels of a call
  int middle_ = 0, middle_count_ = 0;   // columns whose windows are inside the image horizontally
  std::vector<int> ends_;               // the others
  std::unique_ptr<PooledRows> pooled_;  // if there is a pool
  Cut cut_;                             // otherwise: rows
  int64_t taps_at_ = 0;                 // bytes, in a thread's scratch
};

}  // namespace

bool is_depthwise(const Op& op) {
  const Convolution& c = op.conv;
  return c.channels == 1 && c.filters == c.groups;
}

std::unique_ptr<Task> make_depthwise_conv(const Op& op, const std::vector<float>& weight, int input,
                                          const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue,
                                          const Op* pool, std::unique_ptr<Epilogue> pool_epilogue, int jobs) {
  return std::make_unique<DepthwiseConv>(op, weight, input, values, std::move(epilogue), pool, std::move(pool_epilogue), jobs);
}

}  // namespace unflip
