// A tile is six pixels by 16 filters: twelve vectors of sums stay in registers. Windows are read in place. If there is a border,
// they are read from a padded copy of the input; if that would be very large, each window is copied.
#include "float_conv.h"

#include <algorithm>

#include "aligned.h"
#include "depthwise_conv.h"
#include "pooled_rows.h"
#include "stem_conv.h"
#include "window.h"

namespace unflip {
namespace {

// One filter's channels x kernel, from float or binary weights.
void dense_filter(const Convolution& conv, int filter, float* to) {
  const int64_t depth = int64_t{conv.channels} * conv.kernel.h * conv.kernel.w, first = filter * depth;
  if (!conv.bases) {
    std::copy(conv.weight.begin() + first, conv.weight.begin() + first + depth, to);
    return;
  }
  const double offset = conv.offset.empty() ? 0.0 : conv.offset[conv.offset.size() == 1 ? 0 : filter];
  for (int64_t i = 0; i < depth; i++) {
    double sum = offset;
    for (int b = 0; b < conv.bases; b++) {
      const int64_t bit = b * (conv.filters * depth) + first + i;
      const double scale = conv.scales[int64_t{b} * conv.filters + filter];
      sum += conv.bits[bit / 8] >> (bit % 8) & 1 ? scale : -scale;
    }
    to[i] = static_cast<float>(sum);
  }
}

std::vector<float> dense_weights(const Convolution& conv) {
  const int64_t depth = int64_t{conv.channels} * conv.kernel.h * conv.kernel.w;
  std::vector<float> weight(conv.filters * depth);
  for (int o = 0; o < conv.filters; o++) dense_filter(conv, o, &weight[o * depth]);
  return weight;
}

class FloatConv : public Task {
 public:
  FloatConv(const Op& op, int input, const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, const Op* pool,
            std::unique_ptr<Epilogue> pool_epilogue, int jobs)
      : window_(op.conv, values[input].shape, op.shape), input_(input), channels_(op.conv.channels), groups_(op.conv.groups),
        group_filters_(op.conv.filters / op.conv.groups), input_stride_(values[input].stride), epilogue_(std::move(epilogue)) {
    pack(op.conv);
    choose_source();
    if (pool) {
      pooled_ = std::make_unique<PooledRows>(*pool, *epilogue_, std::move(pool_epilogue), 1, jobs);
      thread_scratch_bytes = round_up(pooled_->bytes(), 64);
    } else {
      choose_jobs(jobs);
    }
    if (source_ == Source::CopiedWindows) thread_scratch_bytes += kFloatPixels * depth() * sizeof(float);
  }

  void run(const RunContext& context) const override {
    if (source_ == Source::PaddedCopy) copy_padded(context);
    if (pooled_) {
      pooled_->run(context, [&](int thread) {
        return [this, &context, thread](int y, float* row) {
          sum_pixels(context, y * window_.out.width, (y + 1) * window_.out.width, 0, epilogue_->stride(), row, thread);
        };
      });
      return;
    }
    epilogue_->clear_border(context);
    parallel(context, pixel_cut_.jobs * block_cut_.jobs, [&](int job, int thread) {
      if (groups_ == 1)
        run_dense(context, job, thread);
      else
        run_grouped(context, job, thread);
    });
  }

 private:
  enum class Source { InPlace, PaddedCopy, CopiedWindows };

  int taps() const { return window_.kernel.h * window_.kernel.w; }
  int64_t depth() const { return int64_t{taps()} * channels_; }
  int group_blocks() const { return (group_filters_ + kFloatBlock - 1) / kFloatBlock; }

  void pack(const Convolution& conv) {
    weights_.assign(int64_t{groups_} * group_blocks() * depth() * kFloatBlock + kLanes, 0.f);
    std::vector<float> filters(depth() * kFloatBlock);
    for (int g = 0; g < groups_; g++)
      for (int b = 0; b < group_blocks(); b++) {
        const int first = b * kFloatBlock, count = std::min(kFloatBlock, group_filters_ - first);
        for (int f = 0; f < count; f++) dense_filter(conv, g * group_filters_ + first + f, &filters[f * depth()]);
        pack_block(filters, count, &weights_[(int64_t{g} * group_blocks() + b) * depth() * kFloatBlock]);
      }
  }

  void pack_block(const std::vector<float>& filters, int count, float* to) const {
    for (int t = 0; t < taps(); t++)
      for (int c = 0; c < channels_; c++, to += kFloatBlock)
        for (int f = 0; f < count; f++) to[f] = filters[f * depth() + int64_t{c} * taps() + t];
  }

  // Decides where windows are read, and as which contiguous segments.
  void choose_source() {
    const int all_channels = window_.in.channels;
    pixel_floats_ = input_stride_;
    row_floats_ = int64_t{window_.in.width} * input_stride_;
    if (window_.has_border()) {
      source_ = window_.padding_is_moderate() ? Source::PaddedCopy : Source::CopiedWindows;
      pixel_floats_ = all_channels;
      row_floats_ = window_.columns() * all_channels;
      if (source_ == Source::PaddedCopy) scratch_bytes = (window_.rows() * row_floats_ + kLanes) * sizeof(float);
    }
    if (source_ == Source::CopiedWindows) {
      segments_ = {0};
      segment_length_ = static_cast<int>(depth());
    } else if (pixel_floats_ == channels_ && window_.dilation.w == 1) {
      for (int r = 0; r < window_.kernel.h; r++) segments_.push_back(r * window_.dilation.h * row_floats_);
      segment_length_ = window_.kernel.w * channels_;
    } else {
      for (int t = 0; t < taps(); t++)
        segments_.push_back(t / window_.kernel.w * window_.dilation.h * row_floats_ +
                            t % window_.kernel.w * window_.dilation.w * int64_t{pixel_floats_});
      segment_length_ = channels_;
    }
  }

  // Few weights: all filters for some pixels at a time, so that the sums stay in the cache until the epilogue. Many weights: few
  // filters for many pixels.
  void choose_jobs(int jobs) {
    const bool many_weights = groups_ == 1 && depth() * epilogue_->stride() * 4 > (256 << 10);
    const int pixels = epilogue_->pixels(), blocks = group_blocks();
    int per_job = many_weights ? 384 : std::max(kFloatPixels, 8192 / epilogue_->stride() / kFloatPixels * kFloatPixels);
    int pixel_jobs = std::max(1, pixels / per_job), block_jobs = many_weights ? (blocks + 3) / 4 : 1;
    if (pixel_jobs * block_jobs < jobs) pixel_jobs = jobs / block_jobs;
    pixel_cut_ = Cut(pixels, pixel_jobs, kFloatPixels);
    block_cut_ = Cut(groups_ == 1 ? blocks : 1, block_jobs, kFloatBlocks);
    if (!epilogue_->stores_floats()) thread_scratch_bytes = int64_t{pixel_cut_.size} * epilogue_->stride() * sizeof(float);
  }

  void copy_padded(const RunContext& context) const {
    const float* in = context.values[input_];
    float* copy = reinterpret_cast<float*>(context.scratch);
    parallel(context, static_cast<int>(window_.rows()), [&](int row, int) {
      copy_padded_row(in, window_.in, input_stride_, row - window_.top, window_.in.channels, window_.left, window_.columns(),
                      row_floats_, copy + row * row_floats_);
    });
  }

  void copy_window(const float* in, int pixel, int group, float* to) const {
    const int y = pixel / window_.out.width, x = pixel % window_.out.width;
    const Taps rows = window_.row_taps(y), columns = window_.column_taps(x);
    std::fill(to, to + depth(), 0.f);
    for (int r = rows.first; r < rows.last; r++)
      for (int c = columns.first; c < columns.last; c++) {
        int64_t row = window_.row(y) + r * window_.dilation.h, column = window_.column(x) + c * window_.dilation.w;
        const float* from = in + (row * window_.in.width + column) * input_stride_ + int64_t{group} * channels_;
        std::copy(from, from + channels_, to + (int64_t{r} * window_.kernel.w + c) * channels_);
      }
  }

  // Sets the tile's windows to those of some pixels.
  void aim(const RunContext& context, FloatTile& tile, int first, int count, int group, int thread) const {
    tile.pixels = count;
    if (source_ == Source::CopiedWindows) {
      float* copies = reinterpret_cast<float*>(context.scratch_of(thread) + thread_scratch_bytes) - count * depth();
      for (int p = 0; p < count; p++, copies += depth()) {
        copy_window(context.values[input_], first + p, group, copies);
        tile.input[p] = copies;
      }
      return;
    }
    const float* base = source_ == Source::PaddedCopy ? reinterpret_cast<const float*>(context.scratch) : context.values[input_];
    const int64_t down = window_.stride.h * row_floats_, right = int64_t{window_.stride.w} * pixel_floats_;
    const int y = first / window_.out.width;
    int x = first - y * window_.out.width;
    const float* row = base + y * down + int64_t{group} * channels_;
    for (int p = 0; p < count; p++) {
      tile.input[p] = row + x * right;
      if (++x == window_.out.width) {
        x = 0;
        row += down;
      }
    }
  }

  FloatTile new_tile() const {
    FloatTile tile;
    tile.segments = segments_.data();
    tile.segment_count = static_cast<int>(segments_.size());
    tile.segment_length = segment_length_;
    return tile;
  }

  // Memory for the floats from pixel `first` of a job on: their place in the value, or scratch if they are not stored.
  float* sums_of(const RunContext& context, const EpilogueTarget& target, int first, int thread) const {
    return target.out ? target.out + int64_t{first} * epilogue_->stride() : reinterpret_cast<float*>(context.scratch_of(thread));
  }

  void run_dense(const RunContext& context, int job, int thread) const {
    const int pixel_job = job / block_cut_.jobs, block_job = job % block_cut_.jobs;
    const int first = pixel_cut_.first(pixel_job), last = pixel_cut_.last(pixel_job);
    const int channel = block_cut_.first(block_job) * kFloatBlock;
    const int end = std::min(block_cut_.last(block_job) * kFloatBlock, epilogue_->stride());
    const EpilogueTarget target = epilogue_->target(context);
    float* sums = sums_of(context, target, first, thread);
    sum_pixels(context, first, last, channel, end, sums, thread);
    run_epilogue(context, target, sums, first, last, channel, end - channel);
  }

  // Pixels first .. last - 1, channels channel .. end - 1; sums: those of the first pixel.
  void sum_pixels(const RunContext& context, int first, int last, int channel, int end, float* sums, int thread) const {
    FloatTile tile = new_tile();
    const int step = last - first == 1 ? kFloatBlock * kFloatBlocks : context.kernels->float_filters;
    for (int c = channel; c < end; c += step) {
      tile.filters = std::min(step, end - c);
      tile.weights = &weights_[c / kFloatBlock * depth() * kFloatBlock];
      for (int p = first; p < last; p += kFloatPixels) {
        aim(context, tile, p, std::min(kFloatPixels, last - p), 0, thread);
        for (int i = 0; i < tile.pixels; i++) tile.out[i] = sums + int64_t{p - first + i} * epilogue_->stride() + c;
        context.kernels->float_tile(tile);
      }
    }
  }

  void run_grouped(const RunContext& context, int job, int thread) const {
    const int first = pixel_cut_.first(job), last = pixel_cut_.last(job);
    const EpilogueTarget target = epilogue_->target(context);
    float* sums = sums_of(context, target, first, thread);
    float results[kFloatPixels][kFloatBlock];
    FloatTile tile = new_tile();
    for (int i = 0; i < kFloatPixels; i++) tile.out[i] = results[i];
    for (int p = first; p < last; p += kFloatPixels)
      for (int g = 0; g < groups_; g++) {
        aim(context, tile, p, std::min(kFloatPixels, last - p), g, thread);
        for (int f = 0; f < group_filters_; f += kFloatBlock) {
          const int count = std::min(kFloatBlock, group_filters_ - f);
          tile.filters = padded(count);
          tile.weights = &weights_[(int64_t{g} * group_blocks() + f / kFloatBlock) * depth() * kFloatBlock];
          context.kernels->float_tile(tile);
          for (int i = 0; i < tile.pixels; i++)
            std::copy(results[i], results[i] + count,
                      sums + int64_t{p - first + i} * epilogue_->stride() + g * group_filters_ + f);
        }
      }
    run_epilogue(context, target, sums, first, last, 0, epilogue_->stride());
  }

  void run_epilogue(const RunContext& context, const EpilogueTarget& target, const float* sums, int first, int last, int channel,
                    int channels) const {
    if (epilogue_->has_work())
      context.kernels->epilogue(epilogue_->params(), target, sums + channel, epilogue_->stride(), first, last, channel, channels);
  }

  Window window_;
  int input_, channels_, groups_, group_filters_;
  int input_stride_;
  Source source_ = Source::InPlace;
  int pixel_floats_ = 0;    // from a pixel of the source to the next
  int64_t row_floats_ = 0;  // from a row of the source to the next
  std::vector<int64_t> segments_;
  int segment_length_ = 0;
  AlignedVector<float> weights_;  // [group][block][tap][channel][16 filters]
  Cut pixel_cut_, block_cut_;
  std::unique_ptr<Epilogue> epilogue_;
  std::unique_ptr<PooledRows> pooled_;  // if there is a pool
};

}  // namespace

bool pools_rows(const Op& op, const std::vector<Step>& steps, const Op& pool) {
  if ((op.conv.groups != 1 && !is_depthwise(op)) || op.shape.width == 1) return false;
  for (const Step& s : steps)
    if (s.kind == StepKind::Add || s.kind == StepKind::Mul) return false;
  // Not for windows that do not overlap or consist of padding only, nor for rows too large for the cache.
  if (pool.pool.stride.h > pool.pool.kernel.h || pool.pool.padding.h >= pool.pool.kernel.h) return false;
  return int64_t{op.shape.width} * padded(op.shape.channels) * 4 * pool.pool.kernel.h <= PooledRows::kBytes;
}

std::unique_ptr<Task> make_float_conv(const Op& op, int input, const std::vector<ValueInfo>& values,
                                      std::unique_ptr<Epilogue> epilogue, const Op* pool, std::unique_ptr<Epilogue> pool_epilogue,
                                      int jobs) {
  if (is_stem(op))
    return make_stem_conv(op, dense_weights(op.conv), input, values, std::move(epilogue), pool, std::move(pool_epilogue), jobs);
  if (is_depthwise(op))
    return make_depthwise_conv(op, dense_weights(op.conv), input, values, std::move(epilogue), pool, std::move(pool_epilogue),
                               jobs);
  return std::make_unique<FloatConv>(op, input, values, std::move(epilogue), pool, std::move(pool_epilogue), jobs);
}

}  // namespace unflip
