// A convolution fused with the pool after it (the stem of a ResNet). A thread computes a row of the convolution in its scratch, or
// two, and adds it to the rows of the pool whose windows contain it. So the large intermediate image never exists.
#pragma once

#include <algorithm>
#include <memory>

#include "epilogue.h"
#include "pool_window.h"

namespace unflip {

class PooledRows {
 public:
  static constexpr int64_t kBytes = 256 << 10;  // of the rows of a window, at most: part of a core's cache

  // conv: the convolution's epilogue; it emits nothing. epilogue: the pool's. The convolution computes `grain` rows at a time,
  // starting at a multiple of `grain`.
  PooledRows(const Op& pool, const Epilogue& conv, std::unique_ptr<Epilogue> epilogue, int grain, int jobs)
      : window_(pool, conv.shape(), conv.stride()), conv_(conv), epilogue_(std::move(epilogue)), grain_(grain),
        open_(open_rows(pool, grain)), row_(int64_t{conv.shape().width} * conv.stride()),
        pooled_row_(int64_t{pool.shape.width} * conv.stride()) {
    // Threads share the pool's rows. At the boundary of two jobs, some rows of the convolution are computed twice, so jobs are few.
    // A job has at least as many rows of its own, so that tall windows do not multiply the work.
    cut_ =
        Cut(pool.shape.height, jobs > 1 ? std::max(2, jobs / 3) : 1, std::max(1, (pool.pool.kernel.h - 1) / pool.pool.stride.h));
  }

  // Of a thread's scratch, from its start. stride: floats of a pixel.
  static int64_t bytes(const Op& pool, int64_t conv_width, int64_t stride, int grain) {
    return (grain * conv_width + open_rows(pool, grain) * int64_t{pool.shape.width}) * stride *
           static_cast<int64_t>(sizeof(float));
  }
  int64_t bytes() const { return (grain_ * row_ + open_ * pooled_row_) * static_cast<int64_t>(sizeof(float)); }

  // start(thread) is called for each job and returns make(y, row), which computes rows y .. y + grain - 1 of the convolution
  // without its steps.
  template <class Start>
  void run(const RunContext& context, const Start& start) const {
    parallel(context, cut_.jobs, [&](int job, int thread) {
      auto make = start(thread);
      run_job(context, job, reinterpret_cast<float*>(context.scratch_of(thread)), make);
    });
  }

 private:
  // Rows of the pool that are not finished at the same time.
  static int64_t open_rows(const Op& pool, int grain) {
    return (int64_t{pool.pool.kernel.h} + grain - 2) / pool.pool.stride.h + 2;
  }

  template <class Make>
  void run_job(const RunContext& context, int job, float* buffer, Make& make) const {
    const int height = conv_.shape().height, end = cut_.last(job);
    int next = window_.rows(cut_.first(job)).first / grain_ * grain_;
    for (int y = cut_.first(job); y < end; y++) {
      const PoolSpan own = window_.rows(y);
      if (own.first == own.last) window_.pool(*context.kernels, buffer, own.first, own.last, y, pooled(context, buffer, y));
      for (; next < own.last; next += grain_) {
        const int count = std::min(grain_, height - next);
        make(next, buffer);
        epilogue_rows(context, buffer, count);
        for (int i = 0; i < count; i++) add_row(context, buffer, next + i, buffer + i * row_, y, end);
      }
      finish(context, buffer, y);
    }
  }

  // To the rows y .. end - 1 of the pool whose windows contain it.
  void add_row(const RunContext& context, float* buffer, int row, const float* data, int y, int end) const {
    for (; y < end; y++) {
      const PoolSpan rows = window_.rows(y);
      if (rows.first > row) return;
      if (row < rows.last) window_.pool(*context.kernels, data, row, row + 1, y, pooled(context, buffer, y));
    }
  }

  // The place of a row of the pool.
  float* pooled(const RunContext& context, float* buffer, int y) const {
    const EpilogueTarget target = epilogue_->target(context);
    return target.out ? target.out + y * pooled_row_ : buffer + grain_ * row_ + y % open_ * pooled_row_;
  }

  // The convolution's steps. They read no other values, so pixels may be numbered from the start of the first row.
  void epilogue_rows(const RunContext& context, float* rows, int count) const {
    if (!conv_.has_work()) return;
    EpilogueTarget target;
    target.out = rows;
    context.kernels->epilogue(conv_.params(), target, rows, conv_.stride(), 0, count * conv_.shape().width, 0, conv_.stride());
  }

  void finish(const RunContext& context, float* buffer, int y) const {
    const int width = epilogue_->shape().width, stride = conv_.stride(), first = y * width;
    epilogue_->clear_border(context, first, first + width);
    if (epilogue_->has_work())
      context.kernels->epilogue(epilogue_->params(), epilogue_->target(context), pooled(context, buffer, y), stride, first,
                                first + width, 0, stride);
  }

  PoolWindow window_;
  const Epilogue& conv_;
  std::unique_ptr<Epilogue> epilogue_;
  int grain_;
  int64_t open_;
  int64_t row_, pooled_row_;  // floats of a row of the convolution, and of the pool
  Cut cut_;
};

}  // namespace unflip
