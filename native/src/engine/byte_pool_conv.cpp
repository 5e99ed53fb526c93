// Conversion to float and scaling keep the order of sums, or reverse it if the scale is negative. So the pool takes the largest
// sums, of negated filters where the scale is negative, and only these are converted. See BytePoolRow.
#include "byte_pool_conv.h"

#include <algorithm>
#include <limits>

#include "byte_weights.h"

namespace unflip {
namespace {

constexpr int kFilters = kFloatBlock * kFloatBlocks;  // of a call

class BytePoolConv : public Task {
 public:
  BytePoolConv(const Op& conv, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
               std::unique_ptr<Epilogue> epilogue, const Kernels& kernels, int jobs)
      : weights_(conv, range, values[input], kernels), input_(input), in_(conv.shape), epilogue_(std::move(epilogue)),
        cut_(epilogue_->shape().height, jobs > 1 ? std::max(2, jobs / 3) : 1,
             1) {  // a job's first row costs twice, so jobs are few
    flip_negative();
    const int64_t width = epilogue_->shape().width, filters = weights_.group_blocks() * kFloatBlock;
    partial_stride_ = filters;
    row_at_ = round_up(width * filters * static_cast<int64_t>(sizeof(int32_t)), 64);
    rest_at_ = row_at_ + round_up(width * epilogue_->stride() * static_cast<int64_t>(sizeof(float)), 64);
    rest_stride_ = int64_t{in_.width} * kByteGroup;
    rest_bytes_ = round_up(weights_.rest_count() * rest_stride_, 64);
    thread_scratch_bytes = rest_at_ + 2 * rest_bytes_;
  }

  void run(const RunContext& context) const override {
    parallel(context, cut_.jobs, [&](int job, int thread) { run_job(context, job, thread); });
  }

 private:
  void flip_negative() {
    const size_t filters = weights_.scale().size();
    flip_.assign(filters, 0);
    plus_.assign(filters, 0);
    for (size_t o = 0; o < filters; o++) {
      flip_[o] = weights_.scale()[o] < 0 ? -1 : 0;
      plus_[o] = -flip_[o] - weights_.minus()[o];
      if (flip_[o]) weights_.negate(static_cast<int>(o));
    }
  }

  // Rows of the pool. The one before the first has the first's upper row of the convolution.
  void run_job(const RunContext& context, int job, int thread) const {
    uint8_t* scratch = context.scratch_of(thread);
    const int64_t count = int64_t{epilogue_->shape().width} * partial_stride_;
    std::fill_n(reinterpret_cast<int32_t*>(scratch), count, std::numeric_limits<int32_t>::min());
    for (int y = std::max(cut_.first(job) - 1, 0); y < cut_.last(job); y++) {
      const bool wanted = y >= cut_.first(job);
      const EpilogueTarget target = epilogue_->target(context);
      const int width = epilogue_->shape().width, stride = epilogue_->stride(), first = y * width;
      float* row = target.out ? target.out + int64_t{first} * stride : reinterpret_cast<float*>(scratch + row_at_);
      pool_rows(context, scratch, y, wanted ? row : nullptr);
      if (!wanted) continue;
      epilogue_->clear_border(context, first, first + width);
      if (epilogue_->has_work())
        context.kernels->epilogue(epilogue_->params(), target, row, stride, first, first + width, 0, stride);
    }
  }

  // Rows 2 y and 2 y + 1 of the convolution, the second only if it is inside the image.
  void pool_rows(const RunContext& context, uint8_t* scratch, int y, float* out) const {
    BytePoolRow r;
    for (int i = 0; i < 2; i++) {
      const int row = std::min(2 * y + i, in_.height - 1);
      r.input[i] = context.codes[input_] + weights_.window_at(row, 0);
      uint8_t* rest = scratch + rest_at_ + i * rest_bytes_;
      if (weights_.rest_count()) weights_.gather(*context.kernels, r.input[i], in_.width, rest, rest_stride_);
      r.rest[i] = rest;
    }
    r.right = weights_.right();
    r.pixels = in_.width;
    r.partial_stride = partial_stride_;
    r.out_stride = epilogue_->stride();
    for (int c = 0; c < epilogue_->stride(); c += kFilters) {
      weights_.aim(r, c / kFloatBlock, rest_stride_);
      r.flip = &flip_[c];
      r.plus = &plus_[c];
      r.filters = std::min(kFilters, epilogue_->stride() - c);
      r.partial = reinterpret_cast<int32_t*>(scratch) + c;
      r.out = out ? out + c : nullptr;
      context.kernels->byte_pool_row(r);
    }
  }

  ByteWeights weights_;
  int input_;
  Shape in_;  // of the pool
  std::unique_ptr<Epilogue> epilogue_;
  Cut cut_;
  AlignedVector<int32_t> flip_, plus_;
  // A thread's scratch: `partial` of BytePoolRow, a row of floats, and the gathered steps of two rows.
  int64_t partial_stride_ = 0, row_at_ = 0, rest_at_ = 0, rest_stride_ = 0, rest_bytes_ = 0;
};

}  // namespace

// With a scale of 0, all results are 0, but with either sign: the order of sums is lost.
bool pools_sums(const Op& conv, const Epilogue& epilogue, const Op& pool, const Kernels& kernels) {
  const Pool& p = pool.pool;
  const bool stem = pool.kind == OpKind::MaxPool && p.kernel.h == 3 && p.kernel.w == 3 && p.stride.h == 2 && p.stride.w == 2 &&
                    p.padding.h == 1 && p.padding.w == 1 && pool.shape.height == (conv.shape.height + 1) / 2 &&
                    pool.shape.width == (conv.shape.width + 1) / 2;
  return kernels.byte_pool_row && stem && conv.conv.groups == 1 && !epilogue.has_work() &&
         std::count(conv.conv.scales.begin(), conv.conv.scales.end(), 0.f) == 0;
}

std::unique_ptr<Task> make_byte_pool_conv(const Op& conv, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
                                          std::unique_ptr<Epilogue> epilogue, const Kernels& kernels, int jobs) {
  return std::make_unique<BytePoolConv>(conv, range, input, values, std::move(epilogue), kernels, jobs);
}

}  // namespace unflip
