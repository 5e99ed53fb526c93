#include "byte_conv.h"

#include <algorithm>

#include "byte_pool_conv.h"
#include "byte_weights.h"
#include "pooled_rows.h"
#include "stem_conv.h"

namespace unflip {
namespace {

class ByteConv : public Task {
 public:
  ByteConv(const Op& op, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
           std::unique_ptr<Epilogue> epilogue, const Op* pool, std::unique_ptr<Epilogue> pool_epilogue, const Kernels& kernels,
           int jobs)
      : weights_(op, range, values[input], kernels), input_(input), width_(op.shape.width), channels_(op.conv.channels),
        groups_(op.conv.groups), group_filters_(op.conv.filters / op.conv.groups), epilogue_(std::move(epilogue)) {
    if (pool) {
      pooled_ = std::make_unique<PooledRows>(*pool, *epilogue_, std::move(pool_epilogue), 1, jobs);
      plan_scratch(pooled_->bytes(), width_);
    } else {
      choose_jobs(jobs);
    }
  }

  void run(const RunContext& context) const override {
    if (pooled_) {
      pooled_->run(context, [&](int thread) {
        return [this, &context, thread](int y, float* row) {
          sum_pixels(context, thread, y * width_, (y + 1) * width_, 0, epilogue_->stride(), row);
        };
      });
      return;
    }
    epilogue_->clear_border(context);
    parallel(context, pixel_cut_.jobs * block_cut_.jobs, [&](int job, int thread) { run_job(context, job, thread); });
  }

 private:
  // As in float_conv.cpp: all filters for some pixels, or for many weights few filters for many pixels.
  void choose_jobs(int jobs) {
    const int blocks = weights_.group_blocks(), pixels = epilogue_->pixels();
    const bool many_weights = groups_ == 1 && blocks * weights_.block_bytes() > (256 << 10);
    const int per_job = many_weights ? 384 : std::max(kBytePixels, 8192 / epilogue_->stride() / kBytePixels * kBytePixels);
    int pixel_jobs = std::max(1, pixels / per_job), block_jobs = many_weights ? (blocks + 3) / 4 : 1;
    if (pixel_jobs * block_jobs < jobs) pixel_jobs = jobs / block_jobs;
    pixel_cut_ = Cut(pixels, pixel_jobs, kBytePixels);
    block_cut_ = Cut(groups_ == 1 ? blocks : 1, block_jobs, kFloatBlocks);
    const int64_t floats = epilogue_->stores_floats() ? 0 : int64_t{pixel_cut_.size} * epilogue_->stride();
    plan_scratch(floats * static_cast<int64_t>(sizeof(float)), pixel_cut_.size);
  }

  // Of a thread: its rows or sums, then the gathered steps of `pixels` pixels or the widened numbers of a tile.
  void plan_scratch(int64_t bytes, int64_t pixels) {
    rest_at_ = round_up(bytes, 64);
    rest_stride_ = pixels * kByteGroup;
    thread_scratch_bytes = rest_at_ + weights_.rest_count() * rest_stride_;
    if (weights_.wide()) thread_scratch_bytes += kBytePixels * weights_.window_numbers() * static_cast<int64_t>(sizeof(int16_t));
  }

  void run_job(const RunContext& context, int job, int thread) const {
    const int pixel_job = job / block_cut_.jobs, block_job = job % block_cut_.jobs, stride = epilogue_->stride();
    const int first = pixel_cut_.first(pixel_job), last = pixel_cut_.last(pixel_job);
    const int channel = block_cut_.first(block_job) * kFloatBlock;
    const int end = groups_ == 1 ? std::min(block_cut_.last(block_job) * kFloatBlock, stride) : stride;
    const EpilogueTarget target = epilogue_->target(context);
    float* sums = target.out ? target.out + int64_t{first} * stride : reinterpret_cast<float*>(context.scratch_of(thread));
    if (groups_ == 1)
      sum_pixels(context, thread, first, last, channel, end, sums);
    else
      sum_groups(context, first, last, sums);
    if (epilogue_->has_work())
      context.kernels->epilogue(epilogue_->params(), target, sums + channel, stride, first, last, channel, end - channel);
  }

  ByteTile new_tile(int block) const {
    ByteTile tile;
    weights_.aim(tile, block, rest_stride_);
    tile.minus = &weights_.minus()[block * kFloatBlock];
    return tile;
  }

  // Sets the tile's windows to those of some pixels.
  void aim(const RunContext& context, ByteTile& tile, int first, int count, int group) const {
    tile.pixels = count;
    const int y = first / width_;
    int x = first - y * width_;
    const uint8_t* row = context.codes[input_] + weights_.window_at(y, 0) + int64_t{group} * channels_;
    for (int p = 0; p < count; p++) {
      tile.input[p] = row + x * weights_.right();
      if (++x == width_) {
        x = 0;
        row += weights_.down();
      }
    }
  }

  // Pixels first .. last - 1, channels channel .. end - 1; sums: those of the first pixel.
  void sum_pixels(const RunContext& context, int thread, int first, int last, int channel, int end, float* sums) const {
    if (weights_.wide()) return sum_wide(context, thread, first, last, channel, end, sums);
    const int step = last - first == 1 ? kFloatBlock * kFloatBlocks : context.kernels->float_filters;
    const int pixels = context.kernels->byte_pixels;
    uint8_t* rest = context.scratch_of(thread) + rest_at_;
    if (weights_.rest_count()) gather(context, first, last, rest);
    for (int c = channel; c < end; c += step) {
      ByteTile tile = new_tile(c / kFloatBlock);
      tile.filters = std::min(step, end - c);
      for (int p = first; p < last; p += pixels) {
        aim(context, tile, p, std::min(pixels, last - p), 0);
        tile.rest = rest + int64_t{p - first} * kByteGroup;
        for (int i = 0; i < tile.pixels; i++) tile.out[i] = sums + int64_t{p - first + i} * epilogue_->stride() + c;
        context.kernels->byte_tile(tile);
      }
    }
  }

  void sum_wide(const RunContext& context, int thread, int first, int last, int channel, int end, float* sums) const {
    ByteTile tile = new_tile(channel / kFloatBlock);
    weights_.aim_wide(tile, channel / kFloatBlock, reinterpret_cast<int16_t*>(context.scratch_of(thread) + rest_at_));
    tile.filters = end - channel;
    const int pixels = context.kernels->byte_pixels;
    for (int p = first; p < last; p += pixels) {
      aim(context, tile, p, std::min(pixels, last - p), 0);
      for (int i = 0; i < tile.pixels; i++) tile.out[i] = sums + int64_t{p - first + i} * epilogue_->stride() + channel;
      context.kernels->wide_byte_tile(tile);
    }
  }

  // Row by row of the image.
  void gather(const RunContext& context, int first, int last, uint8_t* to) const {
    for (int p = first, count; p < last; p += count, to += int64_t{count} * kByteGroup) {
      const int y = p / width_, x = p - y * width_;
      count = std::min(last - p, width_ - x);
      weights_.gather(*context.kernels, context.codes[input_] + weights_.window_at(y, x), count, to, rest_stride_);
    }
  }

  void sum_groups(const RunContext& context, int first, int last, float* sums) const {
    float results[kBytePixels][kFloatBlock];
    const int pixels = context.kernels->byte_pixels, blocks = weights_.group_blocks();
    for (int b = 0; b < groups_ * blocks; b++) {
      const int group = b / blocks, own = b % blocks * kFloatBlock;
      const int count = std::min(kFloatBlock, group_filters_ - own);
      ByteTile tile = new_tile(b);
      tile.filters = padded(count);
      for (int i = 0; i < kBytePixels; i++) tile.out[i] = results[i];
      for (int p = first; p < last; p += pixels) {
        aim(context, tile, p, std::min(pixels, last - p), group);
        context.kernels->byte_tile(tile);
        for (int i = 0; i < tile.pixels; i++)
          std::copy(results[i], results[i] + count,
                    sums + int64_t{p - first + i} * epilogue_->stride() + group * group_filters_ + own);
      }
    }
  }

  ByteWeights weights_;
  int input_, width_;
  int channels_, groups_, group_filters_;
  std::unique_ptr<Epilogue> epilogue_;
  std::unique_ptr<PooledRows> pooled_;     // if there is a pool
  Cut pixel_cut_, block_cut_;              // otherwise
  int64_t rest_at_ = 0, rest_stride_ = 0;  // of gathered steps or widened numbers, in a thread's scratch
};

}  // namespace

std::unique_ptr<Task> make_byte_conv(const Op& op, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
                                     std::unique_ptr<Epilogue> epilogue, const Op* pool, std::unique_ptr<Epilogue> pool_epilogue,
                                     const Kernels& kernels, int jobs) {
  if (kernels.whole_stem_tile && is_stem(op))
    return make_whole_stem_conv(op, range, input, values, std::move(epilogue), pool, std::move(pool_epilogue), jobs);
  if (pool && pools_sums(op, *epilogue, *pool, kernels))
    return make_byte_pool_conv(op, range, input, values, std::move(pool_epilogue), kernels, jobs);
  return std::make_unique<ByteConv>(op, range, input, values, std::move(epilogue), pool, std::move(pool_epilogue), kernels, jobs);
}

}  // namespace unflip
