#include "epilogue.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace unflip {
namespace {

constexpr int kFewSteps = 3;  // up to this many, comparing one by one is as fast

// EvenSteps of one channel: the line that maps its thresholds to about 1/2, 3/2, 5/2, ...
struct EvenLine {
  float scale, shift, low = 1, high = 0;
  bool apart = true;  // threshold n maps to a value between n and n + 1

  explicit EvenLine(const std::vector<float>& thresholds) {
    const double first = thresholds.front(), last = thresholds.back();
    const double exact = static_cast<double>(thresholds.size() - 1) / (last - first);
    scale = static_cast<float>(exact);
    shift = static_cast<float>(0.5 - first * exact);
    for (size_t i = 0; i < thresholds.size(); i++) {
      const float rest = (thresholds[i] * scale + shift) - static_cast<float>(i);
      apart = apart && rest > 0 && rest < 1;
      low = std::min(low, rest);
      high = std::max(high, rest);
    }
  }

  // This is the arithmetic of the kernels, with the same rounding. With a positive scale, rounding never changes an order: if the
  // line puts x before or after a threshold, x is below or above it.
  bool right() const { return std::isfinite(scale) && scale > 0 && apart; }
};

}  // namespace

Epilogue::Epilogue(const Shape& shape, const std::vector<Step>& steps, const Emits& emits, const std::vector<ValueInfo>& values)
    : shape_(shape), emits_(emits) {
  params_.width = shape.width;
  params_.stride = padded(shape.channels);
  for (const Step& step : steps) add_step(step, values);
  params_.steps = steps_.data();
  params_.step_count = static_cast<int>(steps_.size());
  if (emits.code >= 0) {
    add_quantizer(*emits.quantizer);
    if (emits.unit < 0) add_even_steps(*emits.quantizer);
    params_.unit = emits.unit;
    params_.one_at_least = params_.thresholds == 1 && !strict_[0] && emits.unit < 0;
    params_.code = values[emits.code].layout;
  }
}

// One element per padded channel.
const float* Epilogue::keep(const std::vector<float>& vector, float padding) {
  AlignedVector<float> spread(params_.stride, padding);
  for (int c = 0; c < shape_.channels; c++) spread[c] = vector.size() == 1 ? vector[0] : vector[c];
  floats_.push_back(std::move(spread));
  return floats_.back().data();
}

void Epilogue::add_step(const Step& step, const std::vector<ValueInfo>& values) {
  EpilogueStep s;
  s.value = step.value;
  switch (step.kind) {
    case StepKind::Affine:
      if (step.scale.empty() && step.shift.empty()) return;
      if (!step.scale.empty()) s.scale = keep(step.scale, 0);
      if (!step.shift.empty()) s.shift = keep(step.shift, 0);
      s.kind = !s.shift ? EpilogueKind::Scale : s.scale ? EpilogueKind::ScaleShift : EpilogueKind::Shift;
      break;
    case StepKind::Prelu:
      s.kind = EpilogueKind::Prelu;
      s.scale = keep(step.slope, 0);
      break;
    case StepKind::Clamp:
      s.kind = EpilogueKind::Clamp;
      s.low = step.low;
      s.high = step.high;
      break;
    case StepKind::Add:
      s.kind = EpilogueKind::Add;
      s.value_stride = values[step.value].stride;
      break;
    case StepKind::Mul: {
      const ValueInfo& factor = values[step.value];
      bool whole_image = factor.shape.height == shape_.height && factor.shape.width == shape_.width;
      bool per_channel = factor.shape.channels == shape_.channels;
      s.value_stride = factor.stride;
      if (per_channel && (!whole_image || pixels() == 1)) {
        s.kind = EpilogueKind::MulChannels;
        break;
      }
      s.kind = EpilogueKind::MulGroups;
      std::vector<int> group(params_.stride, factor.shape.channels - 1);
      int run = shape_.channels / factor.shape.channels;
      for (int c = 0; c < shape_.channels; c++) group[c] = c / run;
      groups_.push_back(std::move(group));
      s.group = groups_.back().data();
      break;
    }
  }
  steps_.push_back(s);
}

void Epilogue::add_quantizer(const Quantizer& q) {
  const float never = std::numeric_limits<float>::quiet_NaN();
  const int columns = q.per_channel ? shape_.channels : 1;
  AlignedVector<float> all;
  for (int s = 0; s < q.steps(); s++) {
    std::vector<float> row(q.thresholds.begin() + int64_t{s} * columns, q.thresholds.begin() + int64_t{s + 1} * columns);
    const float* spread = keep(row, never);
    all.insert(all.end(), spread, spread + params_.stride);
    floats_.pop_back();
    strict_.push_back(q.strict[s]);
  }
  floats_.push_back(std::move(all));
  params_.thresholds = q.steps();
  params_.threshold = floats_.back().data();
  params_.strict = strict_.data();
  params_.levels = q.levels;
}

// Sets EvenSteps if the thresholds of all channels are evenly spaced.
void Epilogue::add_even_steps(const Quantizer& q) {
  if (!q.levels || q.steps() <= kFewSteps || std::count(q.strict.begin(), q.strict.end(), q.strict[0]) != q.steps()) return;
  const int columns = q.per_channel ? shape_.channels : 1;
  std::vector<float> scale, shift;
  AlignedVector<float> all;
  EvenSteps even;
  even.low = 1;
  for (int c = 0; c < columns; c++) {
    std::vector<float> own;
    for (int s = 0; s < q.steps(); s++) own.push_back(q.thresholds[int64_t{s} * columns + c]);
    const EvenLine line(own);
    if (!line.right()) return;
    scale.push_back(line.scale);
    shift.push_back(line.shift);
    even.low = std::min(even.low, line.low);
    even.high = std::max(even.high, line.high);
    all.insert(all.end(), own.begin(), own.end());
  }
  even_first_.assign(params_.stride, static_cast<int>(all.size()));  // of the padding
  for (int c = 0; c < shape_.channels; c++) even_first_[c] = q.per_channel ? c * q.steps() : 0;
  all.push_back(std::numeric_limits<float>::quiet_NaN());
  even.scale = keep(scale, 0);
  even.shift = keep(shift, 0);
  even.most = std::nextafter(static_cast<float>(q.steps()), 0.f);
  even.first = even_first_.data();
  floats_.push_back(std::move(all));
  even.threshold = floats_.back().data();
  params_.even = even;
}

EpilogueTarget Epilogue::target(const RunContext& context) const {
  EpilogueTarget t;
  t.values = context.values;
  if (emits_.value >= 0) t.out = context.values[emits_.value];
  if (emits_.code >= 0) t.bits = context.codes[emits_.code];
  return t;
}

void Epilogue::clear_border(const RunContext& context, int first, int last) const {
  if (emits_.code < 0) return;
  const CodeLayout& l = params_.code;
  const int width = shape_.width, below = l.top + shape_.height;
  const int64_t image_row = int64_t{width} * l.pixel_bytes, left = int64_t{l.left} * l.pixel_bytes;
  for (int p = 0; p < l.planes; p++) {
    uint8_t* plane = context.codes[emits_.code] + p * l.plane_bytes;
    if (first == 0) std::memset(plane, 0, l.top * l.row_bytes);
    if (last == pixels()) std::memset(plane + below * l.row_bytes, 0, (l.rows - below) * l.row_bytes);
    if (l.row_bytes == image_row) continue;
    uint8_t* rows = plane + l.top * l.row_bytes;
    for (int y = (first + width - 1) / width; y < (last + width - 1) / width; y++) std::memset(rows + y * l.row_bytes, 0, left);
    for (int y = first / width; y < last / width; y++)
      std::memset(rows + y * l.row_bytes + left + image_row, 0, l.row_bytes - left - image_row);
  }
}

}  // namespace unflip
