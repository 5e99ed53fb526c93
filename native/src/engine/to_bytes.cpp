// The conversion of floats or pixels to whole numbers.
#include <algorithm>
#include <cstring>

#include "byte_conv.h"
#include "byte_weights.h"

namespace unflip {
namespace {

constexpr int kLevels = 256;
constexpr int kMostImageChannels = 16;

class ToBytes : public Task {
 public:
  ToBytes(const Op& op, int input, int output, const std::vector<ValueInfo>& values, int jobs)
      : input_(input), output_(output), info_(values[input]), layout_(values[output].layout) {
    const Shape& s = info_.shape;
    // Pixels without gaps are converted several at a time.
    const bool gaps = info_.stride != s.channels;
    pixels_ = gaps ? 1 : std::min(s.width, std::max(1, 1024 / s.channels));
    for (int i = 0; i < pixels_ * s.channels; i++) {
      scale_.push_back(at(op.range.scale, i % s.channels));
      shift_.push_back(at(op.range.shift, i % s.channels));
    }
    for (int c = 0; c < s.channels; c++) zero_.push_back(at(op.range.zero, c));
    cut_ = Cut(layout_.rows, jobs, 1);
  }

  void run(const RunContext& context) const override {
    uint8_t* out = context.codes[output_];
    parallel(context, cut_.jobs, [&](int job, int) {
      for (int row = cut_.first(job); row < cut_.last(job); row++)
        make_row(context, row - layout_.top, out + row * layout_.row_bytes);
    });
  }

 private:
  void make_row(const RunContext& context, int y, uint8_t* to) const {
    const Shape& s = info_.shape;
    if (y < 0 || y >= s.height) return fill(to, layout_.columns);
    fill(to, layout_.left);
    to += int64_t{layout_.left} * s.channels;
    if (context.pixels && input_ == 0)
      context.kernels->interleave_bytes(context.pixels + int64_t{y} * s.width, int64_t{s.height} * s.width, s.width, s.channels,
                                        to);
    else
      convert(context, y, to);
    fill(to + int64_t{s.width} * s.channels, layout_.columns - layout_.left - s.width);
  }

  void convert(const RunContext& context, int y, uint8_t* to) const {
    const Shape& s = info_.shape;
    const float* from = context.values[input_] + int64_t{y} * s.width * info_.stride;
    for (int x = 0; x < s.width; x += pixels_) {
      const int64_t count = int64_t{std::min(pixels_, s.width - x)} * s.channels;
      context.kernels->to_bytes(from + int64_t{x} * info_.stride, count, scale_.data(), shift_.data(),
                                to + int64_t{x} * s.channels);
    }
  }

  // Copies the part that is filled, twice as much each time: a border may be large, and pixel by pixel is slow for few channels.
  void fill(uint8_t* to, int columns) const {
    const int64_t pixel = static_cast<int64_t>(zero_.size()), bytes = columns * pixel;
    if (bytes > 0) std::memcpy(to, zero_.data(), pixel);
    for (int64_t done = pixel; done < bytes; done *= 2) std::memcpy(to + done, to, std::min(done, bytes - done));
  }

  int input_, output_;
  ValueInfo info_;
  CodeLayout layout_;
  int pixels_ = 1;
  std::vector<float> scale_, shift_;  // of `pixels_` pixels
  std::vector<uint8_t> zero_;
  Cut cut_;
};

}  // namespace

bool takes_pixels(const Graph& graph) {
  if (graph.mean.empty() || graph.input.channels > kMostImageChannels) return false;
  bool found = false;
  for (const Output& output : graph.outputs)
    if (output.value == 0) return false;
  for (const Op& op : graph.ops) {
    for (const Step& s : op.steps)
      if ((s.kind == StepKind::Add || s.kind == StepKind::Mul) && s.value == 0) return false;
    if (std::find(op.inputs.begin(), op.inputs.end(), 0) == op.inputs.end()) continue;
    if (op.kind != OpKind::ToBytes) return false;
    found = true;
    for (int c = 0; c < graph.input.channels; c++) {
      const float mean = static_cast<float>(graph.mean[c]), deviation = static_cast<float>(graph.deviation[c]);
      for (int n = 0; n < kLevels; n++) {
        const float x = (static_cast<float>(n) / 255.f - mean) / deviation;
        const float place = x * at(op.range.scale, c) + at(op.range.shift, c);
        if (!(place > static_cast<float>(n) - 0.5f && place < static_cast<float>(n) + 0.5f)) return false;
      }
    }
  }
  return found;
}

std::unique_ptr<Task> make_to_bytes(const Op& op, int input, int output, const std::vector<ValueInfo>& values, int jobs) {
  return std::make_unique<ToBytes>(op, input, output, values, jobs);
}

}  // namespace unflip
