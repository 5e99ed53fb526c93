// A float convolution fused with the pool after it (the stem of a ResNet). A thread computes some rows of the convolution in its
// scratch, pools them, and moves the rows that are needed again to the front. The large intermediate image never leaves the
// cache.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "epilogue.h"
#include "pool_window.h"

namespace unflip {

class PooledRows {
 public:
  static constexpr int64_t kBytes = 256 << 10;  // approximate size of the rows kept: part of a core's cache

  // conv: the convolution's epilogue; it emits nothing. epilogue: the pool's. The convolution computes `grain` rows at a time,
  // starting at a multiple of `grain`.
  PooledRows(const Op& pool, const Epilogue& conv, std::unique_ptr<Epilogue> epilogue, int grain, int threads)
      : window_(pool, conv.shape(), conv.stride()), conv_(conv), epilogue_(std::move(epilogue)), grain_(grain),
        row_(int64_t{conv.shape().width} * conv.stride()) {
    const Pair kernel = pool.pool.kernel, stride = pool.pool.stride;
    const int64_t row_bytes = row_ * sizeof(float);
    // Threads share the pool's rows. At the boundary of two jobs, some rows of the convolution are computed twice. A job has at
    // least as many rows of its own, so that tall windows do not multiply the work.
    cut_ = Cut(epilogue_->shape().height, threads > 1 ? 2 * threads : 1, std::max(1, (kernel.h - 1) / stride.h));
    const int64_t fit = (kBytes / row_bytes - kernel.h) / stride.h + 1;
    rows_ = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(fit, cut_.size)));
    buffer_rows_ = (rows_ - 1) * stride.h + kernel.h + 2 * (grain - 1);
    bytes_ = buffer_rows_ * row_bytes;
    if (!epilogue_->stores_floats()) bytes_ += int64_t{epilogue_->shape().width} * conv.stride() * sizeof(float);
  }

  int64_t bytes() const { return bytes_; }  // of a thread's scratch, from its start

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
  template <class Make>
  void run_job(const RunContext& context, int job, float* buffer, Make& make) const {
    const int height = conv_.shape().height;
    int first_row = 0, next_row = 0;  // rows of the convolution in the buffer: first_row .. next_row - 1
    for (int y = cut_.first(job); y < cut_.last(job); y += rows_) {
      const int end = std::min(y + rows_, cut_.last(job));
      const int from = window_.rows(y).first / grain_ * grain_, to = window_.rows(end - 1).last;
      const int kept = std::max(0, next_row - from);
      if (kept) std::memmove(buffer, buffer + (from - first_row) * row_, kept * row_ * sizeof(float));
      first_row = from;
      for (next_row = from + kept; next_row < to; next_row = std::min(next_row + grain_, height)) {
        float* rows = buffer + (next_row - first_row) * row_;
        make(next_row, rows);
        epilogue_rows(context, rows, std::min(grain_, height - next_row));
      }
      for (int i = y; i < end; i++) pool_row(context, buffer, first_row, i);
    }
  }

  // The convolution's steps. They read no other values, so pixels may be numbered from the start of the first row.
  void epilogue_rows(const RunContext& context, float* rows, int count) const {
    if (!conv_.has_work()) return;
    EpilogueTarget target;
    target.out = rows;
    context.kernels->epilogue(conv_.params(), target, rows, conv_.stride(), 0, count * conv_.shape().width, 0, conv_.stride());
  }

  void pool_row(const RunContext& context, float* buffer, int first_row, int y) const {
    const int width = epilogue_->shape().width, stride = conv_.stride(), first = y * width;
    epilogue_->clear_border(context, first, first + width);
    const EpilogueTarget target = epilogue_->target(context);
    float* pooled = target.out ? target.out + int64_t{first} * stride : buffer + buffer_rows_ * row_;
    for (int x = 0; x < width; x++) context.kernels->pool(window_.tile(buffer, first_row, y, x, pooled + int64_t{x} * stride));
    if (epilogue_->has_work())
      context.kernels->epilogue(epilogue_->params(), target, pooled, stride, first, first + width, 0, stride);
  }

  PoolWindow window_;
  const Epilogue& conv_;
  std::unique_ptr<Epilogue> epilogue_;
  int grain_;
  int64_t row_;  // floats of a row of the convolution
  Cut cut_;
  int rows_ = 0, buffer_rows_ = 0;  // rows pooled at a time, and the rows of the convolution they need
  int64_t bytes_ = 0;
};

}  // namespace unflip
