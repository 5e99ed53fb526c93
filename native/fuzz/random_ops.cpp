// Random ops with random fields: Grower::fit then makes them fit the values before.
#include <cmath>
#include <cstring>

#include "grow.h"

namespace fuzz {
namespace {

constexpr int kMaxSize = 65'536, kMaxChannels = 1'048'576;

Json empty_list() { return list({}); }

}  // namespace

int Grower::float_value() {
  const int value = static_cast<int>(random_.below(graph_.ops.size() + 1));
  return graph_.is_float(value) ? value : 0;
}

Json Grower::random_conv(int x) {
  Json op;
  set(op, "op", text("conv"));
  set(op, "name", text("conv"));
  set(op, "inputs", list({double(x)}));
  const unflip::Shape in = graph_.shape(x);
  const int limit = random_.chance(90) ? 100 : kMaxChannels;
  auto window = [&](int size) {
    return double(random_.chance(60) ? random_.in(1, 3) : std::min(random_.size(kMaxSize), 2 * size + 1));
  };
  auto padding = [&] { return double(random_.chance(50) ? 0 : random_.chance(70) ? random_.in(0, 2) : random_.size(kMaxSize)); };
  set(op, "groups", number(random_.chance(60) ? 1 : random_.chance(50) ? in.channels : random_.size(64)));
  set(op, "shape", list({double(random_.size(limit)), 1, window(in.height), window(in.width)}));
  set(op, "stride", list({window(in.height), window(in.width)}));
  set(op, "dilation", list({random_.chance(80) ? 1 : window(in.height), random_.chance(80) ? 1 : window(in.width)}));
  set(op, "padding", list({padding(), padding(), padding(), padding()}));
  if (graph_.is_float(x) && random_.chance(60)) {
    set(op, "weight", text(new_tensor(true, {1, 1, 1, 1})));
    reshape(op, "weight", true, {1, 1, 3, 67});  // to be repeated
  } else {
    const int64_t bases = random_.chance(60) ? 1 : random_.chance(80) ? random_.in(1, 8) : random_.size(64);
    set(op, "scales", text(new_tensor(true, {bases, random_.chance(50) ? 1 : 37})));
    set(op, "bits", text(new_tensor(false, {211})));
    if (random_.chance(20)) set(op, "offset", text(new_tensor(true, {random_.chance(50) ? 1 : 29})));
  }
  set(op, "steps", random_steps(3));
  return op;
}

Json Grower::random_quantize(int x) {
  Json op;
  set(op, "op", text("quantize"));
  set(op, "name", text("quantize"));
  Json inputs = list({double(x)});
  const int unit = float_value();
  if (random_.chance(10) && is_one(unit)) inputs.items.push_back(number(unit));
  set(op, "inputs", inputs);
  const bool levels = random_.chance(40);
  const int steps = random_.chance(50) ? 1 : levels ? random_.in(1, 255) : random_.in(1, 8);
  const bool even = random_.chance(50);
  set(op, "thresholds", text(new_tensor(true, {steps, random_.chance(50) ? 1 : 23})));
  if (even) {  // evenly spaced, or nearly: these have kernels of their own
    Tensor& tensor = *this->tensor(op, "thresholds");
    const int64_t columns = tensor.shape[1];
    const float from = random_.value(), by = std::fabs(random_.value());
    for (int64_t i = 0; i < steps * columns; ++i) {
      const float value = from + by * static_cast<float>(i / columns);
      if (std::isfinite(value)) std::memcpy(&tensor.bytes[static_cast<size_t>(i) * sizeof value], &value, sizeof value);
    }
  }
  Json strict = empty_list();
  for (int s = 0; s < steps; ++s) strict.items.push_back(boolean(random_.chance(50)));
  set(op, "strict", strict);
  set(op, "coding", text(levels ? "levels" : "planes"));
  if (random_.chance(60)) set(op, "scales", list({2, 1, 0.5, 0.25, 2, 2, 1, 1}));  // multiples of a unit
  set(op, "offset", number(random_.chance(50) ? random_.pick({-1.0, 0.0, -0.5}) : static_cast<double>(random_.value())));
  return op;
}

Json Grower::random_steps(int most) {
  Json steps = empty_list();
  for (int left = random_.in(0, most); left > 0; --left) {
    Json step;
    const std::string kind = random_.pick({"affine", "prelu", "clamp", "add", "mul"});
    set(step, "step", text(kind));
    const int64_t count = random_.chance(30) ? 1 : 41;
    if (kind == "affine") {
      if (random_.chance(70)) set(step, "scale", text(new_tensor(true, {count})));
      if (random_.chance(70)) set(step, "shift", text(new_tensor(true, {count})));
    } else if (kind == "prelu") {
      set(step, "slope", text(new_tensor(true, {count})));
    } else if (kind == "clamp") {
      const double low = static_cast<double>(random_.value());
      set(step, "low", random_.chance(30) ? Json() : number(low));
      set(step, "high", random_.chance(30) ? Json() : number(std::max(low, static_cast<double>(random_.value()))));
    } else {
      set(step, "value", number(float_value()));
    }
    steps.items.push_back(step);
  }
  return steps;
}

void Grower::add_pool_fields(Json& op) {
  const int height = random_.chance(80) ? random_.in(1, 4) : random_.size(kMaxSize);
  const int width = random_.chance(80) ? random_.in(1, 4) : random_.size(kMaxSize);
  set(op, "kernel", list({double(height), double(width)}));
  set(op, "stride", list({double(random_.size(height + 1)), double(random_.size(width + 1))}));
  set(op, "padding", list({double(random_.in(0, height / 2)), double(random_.in(0, width / 2))}));
  set(op, "ceil", boolean(random_.chance(50)));
}

Json Grower::random_op(const std::string& kind, int x) {
  if (kind == "conv") return random_conv(x);
  if (kind == "quantize") return random_quantize(x);
  Json op;
  set(op, "op", text(kind));
  set(op, "name", text(kind));
  set(op, "inputs", list({double(x)}));
  const auto sizes = [&] {
    return list({double(random_.size(70)), double(random_.size(kMaxSize)), double(random_.size(kMaxSize))});
  };
  const auto pair = [&](int limit) { return list({double(random_.size(limit)), double(random_.size(limit))}); };
  if (kind == "map") set(op, "steps", random_steps(5));
  if (kind == "to_bytes") {
    const int64_t count = random_.chance(40) ? 1 : 13;
    for (const char* key : {"scale", "shift"}) set(op, key, text(new_tensor(true, {count})));
    set(op, "zero", text(new_tensor(false, {count})));
  }
  if (kind == "max_pool" || kind == "avg_pool") add_pool_fields(op);
  if (kind == "avg_pool") set(op, "count_padding", boolean(random_.chance(50)));
  if (kind == "mean_abs") {
    const bool sample = random_.chance(40);
    set(op, "over", text(sample ? "sample" : "channels"));
    if (!sample) set(op, "groups", number(random_.size(kMaxSize)));
  }
  if (kind == "concat")
    for (int more = random_.in(0, 3); more > 0; --more) find(op, "inputs")->items.push_back(number(float_value()));
  if (kind == "slice")
    for (const char* key : {"start", "stop", "step"}) set(op, key, sizes());
  if (kind == "pad")
    for (const char* key : {"before", "after"}) set(op, key, random_.chance(50) ? list({0, 1, 2}) : sizes());
  if (kind == "curve") set(op, "function", text(random_.pick({"sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "elu", "mish"})));
  if (kind == "normalize" || kind == "channel_shuffle") set(op, "groups", number(random_.size(kMaxSize)));
  if (kind == "normalize") set(op, "epsilon", number(random_.pick({1e-5, 1e-45, 1.0, 3e38})));
  if (kind == "upsample" || kind == "pixel_shuffle") set(op, "factor", random_.chance(70) ? pair(4) : pair(kMaxSize));
  if (kind == "resize") {
    set(op, "size", pair(kMaxSize));
    set(op, "align_corners", boolean(random_.chance(50)));
  }
  return op;
}

}  // namespace fuzz
