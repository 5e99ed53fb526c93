// One small task per op; more than 400 lines, because there are many of them and none needs its own file.
#include "simple_tasks.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../fail.h"
#include "exp_log.h"
#include "pool_window.h"

namespace unflip {
namespace {

class MapTask : public Task {
 public:
  MapTask(int input, const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, int jobs)
      : input_(input), stride_(values[input].stride), epilogue_(std::move(epilogue)), cut_(epilogue_->pixels(), jobs, 1) {}

  void run(const RunContext& context) const override {
    const EpilogueTarget target = epilogue_->target(context);
    parallel(context, cut_.jobs, [&](int job, int) {
      epilogue_->clear_border(context, cut_.first(job), cut_.last(job));
      const float* source = context.values[input_] + int64_t{cut_.first(job)} * stride_;
      context.kernels->epilogue(epilogue_->params(), target, source, stride_, cut_.first(job), cut_.last(job), 0,
                                epilogue_->stride());
    });
  }

 private:
  int input_, stride_;
  std::unique_ptr<Epilogue> epilogue_;
  Cut cut_;
};

class PoolTask : public Task {
 public:
  PoolTask(const Op& op, int input, const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue)
      : window_(op, values[input].shape, values[input].stride), input_(input),
        input_row_(int64_t{values[input].shape.width} * values[input].stride), epilogue_(std::move(epilogue)) {
    if (!epilogue_->stores_floats())
      thread_scratch_bytes = int64_t{epilogue_->shape().width} * epilogue_->stride() * sizeof(float);
  }

  void run(const RunContext& context) const override {
    const EpilogueTarget target = epilogue_->target(context);
    const int width = epilogue_->shape().width;
    parallel(context, epilogue_->shape().height, [&](int y, int thread) {
      const int first = y * width;
      epilogue_->clear_border(context, first, first + width);
      float* row =
          target.out ? target.out + int64_t{first} * epilogue_->stride() : reinterpret_cast<float*>(context.scratch_of(thread));
      const PoolSpan rows = window_.rows(y);
      const int64_t top = rows.first < rows.last ? int64_t{rows.first} * input_row_ : 0;
      window_.pool(*context.kernels, context.values[input_] + top, rows.first, rows.last, y, row);
      if (epilogue_->has_work())
        context.kernels->epilogue(epilogue_->params(), target, row, epilogue_->stride(), first, first + width, 0,
                                  epilogue_->stride());
    });
  }

 private:
  PoolWindow window_;
  int input_;
  int64_t input_row_;  // floats
  std::unique_ptr<Epilogue> epilogue_;
};

// The base of the tasks below: inputs and an output, row by row.
class SimpleTask : public Task {
 public:
  SimpleTask(const Op& op, int output, const std::vector<ValueInfo>& values)
      : op_(op), output_(output), out_(values[output]), in_(values[op.inputs[0]]) {}

 protected:
  const float* input(const RunContext& context, int i = 0) const { return context.values[op_.inputs[i]]; }
  float* output(const RunContext& context) const { return context.values[output_]; }
  static int64_t at(const ValueInfo& value, int y, int x) { return (int64_t{y} * value.shape.width + x) * value.stride; }

  // Calls make(y, x, to), which writes the channels of a pixel, for every pixel.
  template <class Make>
  void for_pixels(const RunContext& context, const Make& make) const {
    parallel(context, out_.shape.height, [&](int y, int) {
      for (int x = 0; x < out_.shape.width; x++) make(y, x, output(context) + at(out_, y, x));
    });
  }

  const Op op_;
  int output_;
  ValueInfo out_, in_;
};

class MeanTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    const Cut cut(in_.shape.channels, 64, kChannels);
    parallel(context, cut.jobs, [&](int job, int) {
      for (int c = cut.first(job); c < cut.last(job); c += kChannels)
        mean(input(context), output(context), c, std::min(kChannels, cut.last(job) - c));
    });
  }

 private:
  static constexpr int kChannels = 64;

  void mean(const float* in, float* out, int first, int count) const {
    const int pixels = in_.shape.height * in_.shape.width;
    double sum[kChannels] = {};
    for (int p = 0; p < pixels; p++) {
      const float* x = in + int64_t{p} * in_.stride + first;
      for (int c = 0; c < count; c++) sum[c] += x[c];
    }
    for (int c = 0; c < count; c++) out[first + c] = static_cast<float>(sum[c] / pixels);
  }
};

class MeanAbsTask : public SimpleTask {
 public:
  MeanAbsTask(const Op& op, int output, const std::vector<ValueInfo>& values) : SimpleTask(op, output, values) {
    scratch_bytes = in_.shape.height * sizeof(double);
    thread_scratch_bytes = in_.shape.width * sizeof(double);
  }

  void run(const RunContext& context) const override {
    if (op_.over_sample)
      over_sample(context);
    else
      over_channels(context);
  }

 private:
  // One sum per row first, so that the order does not depend on the threads.
  void over_sample(const RunContext& context) const {
    double* row_sums = reinterpret_cast<double*>(context.scratch);
    parallel(context, in_.shape.height, [&](int y, int thread) { row_sums[y] = sum_row(context, y, thread); });
    const double sum = std::accumulate(row_sums, row_sums + in_.shape.height, 0.0);
    output(context)[0] = static_cast<float>(sum / static_cast<double>(in_.shape.size()));
  }

  // Without padding, a row is contiguous.
  double sum_row(const RunContext& context, int y, int thread) const {
    const bool whole = in_.stride == in_.shape.channels;
    const int pieces = whole ? 1 : in_.shape.width;
    const int64_t count = whole ? int64_t{in_.shape.width} * in_.stride : in_.shape.channels;
    double* sums = reinterpret_cast<double*>(context.scratch_of(thread));
    context.kernels->sum_abs(input(context) + at(in_, y, 0), in_.stride, pieces, count, sums);
    return std::accumulate(sums, sums + pieces, 0.0);
  }

  void over_channels(const RunContext& context) const {
    const int run = in_.shape.channels / op_.groups;
    parallel(context, in_.shape.height, [&](int y, int thread) {
      double* sums = reinterpret_cast<double*>(context.scratch_of(thread));
      for (int g = 0; g < op_.groups; g++) {
        context.kernels->sum_abs(input(context) + at(in_, y, 0) + g * run, in_.stride, in_.shape.width, run, sums);
        float* to = output(context) + at(out_, y, 0) + g;
        for (int x = 0; x < in_.shape.width; x++) to[int64_t{x} * out_.stride] = static_cast<float>(sums[x] / run);
      }
    });
  }
};

class ConcatTask : public SimpleTask {
 public:
  ConcatTask(const Op& op, int output, const std::vector<ValueInfo>& values) : SimpleTask(op, output, values) {
    for (int input : op.inputs) parts_.push_back(values[input]);
  }

  void run(const RunContext& context) const override {
    parallel(context, out_.shape.height, [&](int y, int) {
      int channel = 0;
      for (size_t i = 0; i < parts_.size(); i++) {
        const int count = parts_[i].shape.channels;
        for (int x = 0; x < out_.shape.width; x++) {
          const float* from = input(context, static_cast<int>(i)) + at(parts_[i], y, x);
          std::copy(from, from + count, output(context) + at(out_, y, x) + channel);
        }
        channel += count;
      }
    });
  }

 private:
  std::vector<ValueInfo> parts_;
};

class SliceTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    for_pixels(context, [&](int y, int x, float* to) {
      const float* from = input(context) + at(in_, op_.start[1] + y * op_.step[1], op_.start[2] + x * op_.step[2]) + op_.start[0];
      for (int c = 0; c < out_.shape.channels; c++) to[c] = from[int64_t{c} * op_.step[0]];
    });
  }
};

class PadTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    parallel(context, out_.shape.height, [&](int y, int) {
      float* row = output(context) + at(out_, y, 0);
      std::fill(row, row + int64_t{out_.shape.width} * out_.stride, 0.f);
      const int from_y = y - op_.before[1];
      if (from_y < 0 || from_y >= in_.shape.height) return;
      for (int x = 0; x < in_.shape.width; x++) {
        const float* from = input(context) + at(in_, from_y, x);
        std::copy(from, from + in_.shape.channels, row + int64_t{x + op_.before[2]} * out_.stride + op_.before[0]);
      }
    });
  }
};

class FlattenTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    const int64_t pixels = int64_t{in_.shape.height} * in_.shape.width;
    for (int64_t p = 0; p < pixels; p++)
      for (int c = 0; c < in_.shape.channels; c++) output(context)[c * pixels + p] = input(context)[p * in_.stride + c];
  }
};

class SoftmaxTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    parallel(context, in_.shape.height, [&](int y, int) {
      for (int x = 0; x < in_.shape.width; x++) softmax(input(context) + at(in_, y, x), output(context) + at(out_, y, x));
    });
  }

 private:
  void softmax(const float* in, float* out) const {
    const int channels = in_.shape.channels;
    const float largest = *std::max_element(in, in + channels);
    double sum = 0;
    for (int c = 0; c < channels; c++) sum += out[c] = static_cast<float>(exp_below_zero(double{in[c]} - largest));
    const double log_sum = log_above_one(sum);
    for (int c = 0; c < channels; c++)
      out[c] = static_cast<float>(op_.kind == OpKind::LogSoftmax ? double{in[c]} - largest - log_sum : out[c] / sum);
  }
};

class ActivationTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    // If both have the same padding, a row is contiguous. The padding's contents do not matter.
    const bool whole = in_.stride == out_.stride;
    const int pieces = whole ? 1 : in_.shape.width;
    const int64_t count = whole ? int64_t{in_.shape.width} * in_.stride : in_.shape.channels;
    parallel(context, in_.shape.height, [&](int y, int) {
      for (int x = 0; x < pieces; x++)
        context.kernels->activation(op_.activation, input(context) + at(in_, y, x), count, output(context) + at(out_, y, x));
    });
  }
};

// Normalizes each group of channels by its mean and variance over all pixels.
class NormalizeTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    parallel(context, op_.groups, [&](int group, int) {
      const int run = in_.shape.channels / op_.groups;
      const float* in = input(context) + group * run;
      float* out = output(context) + group * run;
      const double size = static_cast<double>(pixels()) * run;
      const double mean = sum(in, run, [](double x) { return x; }) / size;
      const double variance = sum(in, run, [mean](double x) { return (x - mean) * (x - mean); }) / size;
      const double scale = 1 / std::sqrt(variance + op_.epsilon);
      for (int64_t p = 0; p < pixels(); p++)
        for (int c = 0; c < run; c++) out[p * out_.stride + c] = static_cast<float>((in[p * in_.stride + c] - mean) * scale);
    });
  }

 private:
  static constexpr int kChannels = 64;  // summed together, so that the sums are vectors

  int64_t pixels() const { return int64_t{in_.shape.height} * in_.shape.width; }

  template <class Term>
  double sum(const float* in, int run, const Term& term) const {
    double total = 0;
    for (int first = 0; first < run; first += kChannels) {
      const int count = std::min(kChannels, run - first);
      double sums[kChannels] = {};
      for (int64_t p = 0; p < pixels(); p++)
        for (int c = 0; c < count; c++) sums[c] += term(in[p * in_.stride + first + c]);
      for (int c = 0; c < count; c++) total += sums[c];
    }
    return total;
  }
};

class UpsampleTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    for_pixels(context, [&](int y, int x, float* to) {
      const float* from = input(context) + at(in_, y / op_.factor.h, x / op_.factor.w);
      std::copy(from, from + in_.shape.channels, to);
    });
  }
};

class PixelShuffleTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    const int step = op_.factor.h * op_.factor.w;
    for_pixels(context, [&](int y, int x, float* to) {
      const float* from =
          input(context) + at(in_, y / op_.factor.h, x / op_.factor.w) + y % op_.factor.h * op_.factor.w + x % op_.factor.w;
      for (int c = 0; c < out_.shape.channels; c++) to[c] = from[int64_t{c} * step];
    });
  }
};

class ChannelShuffleTask : public SimpleTask {
 public:
  using SimpleTask::SimpleTask;
  void run(const RunContext& context) const override {
    const int run = in_.shape.channels / op_.groups;
    for_pixels(context, [&](int y, int x, float* to) {
      const float* from = input(context) + at(in_, y, x);
      for (int c = 0; c < run; c++)
        for (int g = 0; g < op_.groups; g++) *to++ = from[g * run + c];
    });
  }
};

// Interpolates between two pixels of each of two rows.
class ResizeTask : public SimpleTask {
 public:
  ResizeTask(const Op& op, int output, const std::vector<ValueInfo>& values)
      : SimpleTask(op, output, values), rows_(places(in_.shape.height, out_.shape.height, op.align_corners)),
        columns_(places(in_.shape.width, out_.shape.width, op.align_corners)) {}

  void run(const RunContext& context) const override {
    const float* in = input(context);
    for_pixels(context, [&](int y, int x, float* to) {
      const Place &row = rows_[y], &column = columns_[x];
      blend(in + at(in_, row.first, column.first), in + at(in_, row.first, column.second), in + at(in_, row.second, column.first),
            in + at(in_, row.second, column.second), row.share, column.share, to);
    });
  }

 private:
  struct Place {
    int first, second;  // pixels of the input
    float share;        // of the second
  };

  // The position in the input as a quotient of whole numbers: a product of floats would miss positions that are exact.
  static std::vector<Place> places(int64_t in, int64_t out, bool align_corners) {
    std::vector<Place> found;
    found.reserve(out);
    const int64_t divisor = align_corners ? std::max<int64_t>(out - 1, 1) : 2 * out;
    for (int64_t i = 0; i < out; i++) {
      const int64_t position = align_corners ? (out > 1 ? i * (in - 1) : 0) : std::max<int64_t>((2 * i + 1) * in - out, 0);
      const int64_t first = std::min(position / divisor, in - 1);
      const double share = static_cast<double>(position % divisor) / static_cast<double>(divisor);
      found.push_back({static_cast<int>(first), static_cast<int>(std::min(first + 1, in - 1)), static_cast<float>(share)});
    }
    return found;
  }

  // a + (b - a) * share: interpolating equal pixels changes nothing.
  void blend(const float* a, const float* b, const float* c, const float* d, float down, float right,
             float* __restrict to) const {
    for (int i = 0; i < out_.shape.channels; i++) {
      const float above = a[i] + (b[i] - a[i]) * right;
      const float below = c[i] + (d[i] - c[i]) * right;
      to[i] = above + (below - above) * down;
    }
  }

  std::vector<Place> rows_, columns_;
};

}  // namespace

std::unique_ptr<Task> make_map(int input, const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, int jobs) {
  return std::make_unique<MapTask>(input, values, std::move(epilogue), jobs);
}

std::unique_ptr<Task> make_pool(const Op& op, int input, const std::vector<ValueInfo>& values,
                                std::unique_ptr<Epilogue> epilogue) {
  return std::make_unique<PoolTask>(op, input, values, std::move(epilogue));
}

std::unique_ptr<Task> make_simple(const Op& op, int output, const std::vector<ValueInfo>& values) {
  switch (op.kind) {
    case OpKind::Mean: return std::make_unique<MeanTask>(op, output, values);
    case OpKind::MeanAbs: return std::make_unique<MeanAbsTask>(op, output, values);
    case OpKind::Concat: return std::make_unique<ConcatTask>(op, output, values);
    case OpKind::Slice: return std::make_unique<SliceTask>(op, output, values);
    case OpKind::Pad: return std::make_unique<PadTask>(op, output, values);
    case OpKind::Flatten: return std::make_unique<FlattenTask>(op, output, values);
    case OpKind::Softmax:
    case OpKind::LogSoftmax: return std::make_unique<SoftmaxTask>(op, output, values);
    case OpKind::Activation: return std::make_unique<ActivationTask>(op, output, values);
    case OpKind::Normalize: return std::make_unique<NormalizeTask>(op, output, values);
    case OpKind::Upsample: return std::make_unique<UpsampleTask>(op, output, values);
    case OpKind::PixelShuffle: return std::make_unique<PixelShuffleTask>(op, output, values);
    case OpKind::ChannelShuffle: return std::make_unique<ChannelShuffleTask>(op, output, values);
    case OpKind::Resize: return std::make_unique<ResizeTask>(op, output, values);
    default: fail("op '" + op.name + "' is not a simple one");
  }
}

}  // namespace unflip
