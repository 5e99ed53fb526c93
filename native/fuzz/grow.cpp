#include "grow.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <stdexcept>

#include "engine.h"

namespace fuzz {
namespace {

constexpr int kMaxChannels = 1'048'576;
constexpr int64_t kMaxTensor = 1 << 20;  // elements; larger files would make the fuzzer slow
constexpr int kThreads = 3;

bool is_kind(Json& op, const char* kind) {
  const Json* found = op.find("op");
  return found != nullptr && found->string == kind;
}

Json empty_list() { return list({}); }

}  // namespace

unflip::Graph load(const Bytes& file, const unflip::Limits& limits, bool check_hash) {
  unflip::LoadOptions options;
  options.limits = limits;
  options.check_hash = check_hash;
  options.measure = [&](const unflip::Graph& graph, unflip::Size memory) {
    for (const std::string& isa : unflip::instruction_sets()) {
      unflip::Needs needs = unflip::Engine::needs(graph, isa, kThreads);
      needs.load_memory += memory;
      unflip::check_limits(needs, limits);
    }
  };
  return unflip::load_graph(file.data(), file.size(), options);
}

Grower::Grower(const Json& input, std::map<std::string, Tensor> tensors, const unflip::Limits& limits, Random& random)
    : tensors_(std::move(tensors)), limits_(limits), random_(random) {
  set(draft_.graph, "input", input);
  set(draft_.graph, "ops", empty_list());
  set(draft_.graph, "output", number(0));
  set(draft_.graph, "labels", Json());
  if (reload()) return;
  Json small;
  set(small, "shape", list({double(random.in(1, 9)), double(random.in(1, 9)), double(random.in(1, 9))}));
  set(small, "preprocess", Json());
  set(draft_.graph, "input", small);
  if (!reload()) throw std::runtime_error("the limits are too low for any network");
}

bool Grower::reload() try {
  graph_ = load(written(draft_), limits_, false);
  return true;
} catch (const std::runtime_error&) {
  return false;
}

int Grower::add(Json op) {
  taken_.clear();
  Json& ops = *find(draft_.graph, "ops");
  if (!fit(op)) return -1;
  const std::map<std::string, Tensor> before = draft_.tensors;
  for (const std::string& name : taken_) draft_.tensors[name] = tensors_[name];
  ops.items.push_back(op);
  if (reload()) return static_cast<int>(ops.items.size());
  ops.items.pop_back();
  draft_.tensors = before;
  return -1;
}

int Grower::add_random() {
  std::vector<int> floats = {0};
  for (int v = 1; v <= static_cast<int>(graph_.ops.size()); ++v)
    if (graph_.is_float(v)) floats.push_back(v);
  const int last = static_cast<int>(graph_.ops.size());
  if (!graph_.is_float(last)) return add(random_conv(last));
  const int x = random_.chance(70) ? floats.back() : random_.of(floats);
  const size_t kind = random_.below(10);
  if (kind < 3) return add(random_quantize(x));
  if (kind < 5) return add(random_conv(x));
  return add(random_op(std::string(unflip::kOpNames[random_.below(std::size(unflip::kOpNames))]), x));
}

Bytes Grower::finished() {
  Draft draft = draft_;
  std::vector<int> floats;
  for (int v = 0; v <= static_cast<int>(graph_.ops.size()); ++v)
    if (graph_.is_float(v)) floats.push_back(v);
  std::vector<int> returned = {floats.back()};
  set(draft.graph, "output", number(floats.back()));
  if (random_.chance(30)) {
    erase(draft.graph, "output");
    Json outputs = empty_list();
    for (int i = random_.in(0, 3); i >= 0; --i) {
      Json output;
      set(output, "name", text("o" + std::to_string(i)));
      set(output, "value", number(returned.emplace_back(random_.of(floats))));
      if (random_.chance(30)) set(output, "pixels", boolean(random_.chance(50)));
      outputs.items.push_back(output);
    }
    set(draft.graph, "outputs", outputs);
    set(draft.graph, "structure", text(random_.chance(50) ? "dict" : "tuple"));
  }
  Json& input = *find(draft.graph, "input");
  if (random_.chance(30) && graph_.input.channels <= 16) {  // some networks then take pixels
    Json preprocess;
    for (const char* key : {"mean", "std"}) {
      std::vector<double> numbers;
      for (int c = 0; c < graph_.input.channels; ++c) numbers.push_back(0.1 + random_.unit());
      set(preprocess, key, list(numbers));
    }
    set(input, "preprocess", preprocess);
  }
  const int channels = graph_.shape(returned.back()).channels;
  if (random_.chance(20) && channels < 50) {
    Json labels = empty_list();
    for (int c = 0; c < channels; ++c) labels.items.push_back(text("\x1b\xe2\x80\xae label " + std::to_string(c)));
    set(draft.graph, "labels", labels);
  }
  return written(draft);
}

// --- fields that fit

int64_t Grower::whole(Json& op, const std::string& key, size_t index, int least) {
  Json* field = find(op, key);
  if (field != nullptr && field->type == Json::Type::Array) field = index < field->items.size() ? &field->items[index] : nullptr;
  if (field == nullptr || field->type != Json::Type::Number) return least;
  return static_cast<int64_t>(std::clamp(std::floor(field->number), double(least), double(kMaxChannels) + 1));
}

Tensor* Grower::tensor(Json& op, const std::string& key) {
  const Json* name = op.find(key);
  const auto found = name == nullptr ? tensors_.end() : tensors_.find(name->string);
  return found == tensors_.end() ? nullptr : &found->second;
}

std::string Grower::new_tensor(bool is_float, std::vector<int64_t> shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  Tensor made{is_float, std::move(shape), {}};
  const int64_t different = std::min<int64_t>(count, 500);  // random numbers take time: the rest repeats them
  const int zeros = random_.chance(20) ? 70 : 0;            // in percent: as in a network with pruned filters
  for (int64_t i = 0; i < count; ++i) {
    const size_t width = is_float ? sizeof(float) : 1;
    const float value = is_float && i < different && !random_.chance(zeros) ? random_.value() : 0;
    if (i >= different) {
      for (size_t b = 0; b < width; ++b) made.bytes.push_back(made.bytes[static_cast<size_t>(i % different) * width + b]);
    } else if (is_float) {
      uint8_t bytes[sizeof value];
      std::memcpy(bytes, &value, sizeof value);
      made.bytes.insert(made.bytes.end(), bytes, bytes + sizeof value);
    } else {
      made.bytes.push_back(static_cast<uint8_t>(random_.below(256)));
    }
  }
  const std::string name = "n" + std::to_string(tensors_.size());
  tensors_[name] = std::move(made);
  taken_.insert(name);
  return name;
}

void Grower::reshape(Json& op, const std::string& key, bool is_float, std::vector<int64_t> shape) {
  const Tensor* old = tensor(op, key);
  if (old == nullptr || old->is_float != is_float || old->bytes.empty()) {
    set(op, key, text(new_tensor(is_float, std::move(shape))));
    return;
  }
  if (old->shape == shape) {
    taken_.insert(op.find(key)->string);
    return;
  }
  size_t bytes = is_float ? sizeof(float) : 1;
  for (int64_t size : shape) bytes *= static_cast<size_t>(size);
  Tensor made{is_float, std::move(shape), Bytes(bytes)};
  for (size_t i = 0; i < bytes; ++i) made.bytes[i] = old->bytes[i % old->bytes.size()];
  const std::string name = "n" + std::to_string(tensors_.size());
  tensors_[name] = std::move(made);
  taken_.insert(name);
  set(op, key, text(name));
}

bool Grower::fit(Json& op) {
  Json* inputs = find(op, "inputs");
  if (inputs == nullptr || inputs->items.empty()) return false;
  for (Json& item : inputs->items) item = number(std::clamp(std::floor(item.number), 0.0, double(graph_.ops.size())));
  const int x = static_cast<int>(inputs->items[0].number);
  const unflip::Shape in = graph_.shape(x);
  if (is_kind(op, "conv")) return fit_conv(op, in);
  if (!graph_.is_float(x)) return false;
  if (is_kind(op, "quantize")) return fit_quantize(op, in);
  if (is_kind(op, "concat")) return fit_concat(op);
  if (is_kind(op, "map")) fit_steps(op, in);
  if (is_kind(op, "to_bytes"))
    for (const char* key : {"scale", "shift", "zero"}) {
      const Tensor* old = tensor(op, key);
      const bool shared = old != nullptr && old->shape == std::vector<int64_t>{1};
      reshape(op, key, key != std::string("zero"), {shared ? 1 : in.channels});
    }
  if (is_kind(op, "slice")) fit_slice(op, in);
  if (is_kind(op, "normalize") || is_kind(op, "channel_shuffle")) fit_groups(op, in);
  if (is_kind(op, "mean_abs") && op.find("groups") != nullptr) fit_groups(op, in);
  if (is_kind(op, "pixel_shuffle")) fit_factor(op, in);
  return true;
}

bool Grower::fit_conv(Json& op, const unflip::Shape& in) {
  const int x = static_cast<int>(find(op, "inputs")->items[0].number);
  const bool of_code = graph_.is_code(x), of_bytes = graph_.is_bytes(x);
  int64_t groups = std::gcd(whole(op, "groups"), int64_t{in.channels});
  int64_t filters = (whole(op, "shape", 0) + groups - 1) / groups * groups;
  int64_t height = whole(op, "shape", 2), width = whole(op, "shape", 3);
  const int64_t channels = in.channels / groups;
  const int64_t most = of_code || op.find("bits") != nullptr ? 8 * kMaxTensor : kMaxTensor;
  if (filters * channels * height * width > most) filters = groups;
  if (filters * channels * height * width > most) height = 1;
  if (filters * channels * height * width > most) width = 1;
  if (filters * channels * height * width > most) return false;
  set(op, "groups", number(static_cast<double>(groups)));
  set(op, "shape", list({double(filters), double(channels), double(height), double(width)}));
  if (of_bytes)
    fit_bytes(op);
  else if (!fit_weights(op, filters, channels * height * width, of_code))
    return false;
  // The output's shape follows only from the loader, but steps need no more than its channels, and a value to add.
  auto room = [&](int size, size_t before, size_t after, int64_t kernel, size_t axis) {
    const int64_t padding = whole(op, "padding", before, 0) + whole(op, "padding", after, 0);
    const int64_t span = size + padding - (kernel - 1) * whole(op, "dilation", axis) - 1;
    return span < 0 ? int64_t{0} : span / whole(op, "stride", axis) + 1;
  };
  const int64_t rows = room(in.height, 0, 2, height, 0), columns = room(in.width, 1, 3, width, 1);
  fit_steps(op, {static_cast<int>(filters), static_cast<int>(rows), static_cast<int>(columns)});
  return true;
}

std::vector<int64_t> Grower::weight_shape(const Json& op) {
  std::vector<int64_t> sizes;
  for (const Json& size : op.find("shape")->items) sizes.push_back(static_cast<int64_t>(size.number));
  return sizes;
}

// Weights of 8 bits, of which -128 is not allowed.
void Grower::fit_bytes(Json& op) {
  for (const char* key : {"weight", "bits", "offset"}) erase(op, key);
  const std::vector<int64_t> shape = weight_shape(op);
  const Tensor* scales = tensor(op, "scales");
  const bool shared = scales != nullptr && scales->shape.size() == 2 && scales->shape[1] == 1;
  reshape(op, "scales", true, {1, shared ? 1 : shape[0]});
  reshape(op, "bytes", false, shape);
  Bytes& bytes = tensor(op, "bytes")->bytes;
  std::replace(bytes.begin(), bytes.end(), uint8_t{0x80}, uint8_t{0x81});
}

bool Grower::fit_weights(Json& op, int64_t filters, int64_t depth, bool of_code) {
  erase(op, "bytes");
  if (of_code) erase(op, "weight");
  if (op.find("weight") != nullptr) {
    reshape(op, "weight", true, weight_shape(op));
    return true;
  }
  const Tensor* scales = tensor(op, "scales");
  const bool known = scales != nullptr && scales->shape.size() == 2;
  const int64_t bases = known ? std::min<int64_t>(scales->shape[0], 100) : 1,
                columns = known && scales->shape[1] == 1 ? 1 : filters;
  const int64_t signs = bases * filters * depth;
  if (signs > 64 * kMaxTensor) return false;
  reshape(op, "scales", true, {bases, columns});
  reshape(op, "bits", false, {(signs + 7) / 8});
  if (signs % 8 != 0) tensor(op, "bits")->bytes.back() &= static_cast<uint8_t>((1 << (signs % 8)) - 1);
  if (const Tensor* offset = tensor(op, "offset"))
    reshape(op, "offset", true, {offset->shape == std::vector<int64_t>{1} ? 1 : filters});
  return true;
}

bool Grower::fit_quantize(Json& op, const unflip::Shape& in) {
  Json& inputs = *find(op, "inputs");
  if (inputs.items.size() > 1 && !is_one(static_cast<int>(inputs.items[1].number))) inputs.items.resize(1);
  const Tensor* thresholds = tensor(op, "thresholds");
  const bool known = thresholds != nullptr && thresholds->shape.size() == 2;
  const int64_t steps = known ? std::clamp<int64_t>(thresholds->shape[0], 1, 255) : 1;
  reshape(op, "thresholds", true, {steps, known && thresholds->shape[1] == 1 ? 1 : in.channels});
  Json strict = empty_list();
  const Json* old = op.find("strict");
  for (int64_t s = 0; s < steps; ++s) {
    const size_t i = static_cast<size_t>(s);
    strict.items.push_back(boolean(old != nullptr && i < old->items.size() && old->items[i].boolean));
  }
  const Json* coding = op.find("coding");
  const bool levels = steps > 8 || (coding != nullptr && coding->string == "levels");
  size_t planes = static_cast<size_t>(steps);
  if (levels)
    for (planes = 0; (steps >> planes) > 0;) ++planes;
  Json* scales = find(op, "scales");
  std::vector<double> numbers;
  for (size_t p = 0; p < planes; ++p) {
    const bool has = scales != nullptr && p < scales->items.size();
    const double own = has ? scales->items[p].number : static_cast<double>(random_.value());
    numbers.push_back(levels && p > 0 ? std::ldexp(numbers[0], static_cast<int>(p)) : own);
  }
  set(op, "strict", strict);
  set(op, "coding", text(levels ? "levels" : "planes"));
  set(op, "scales", list(numbers));
  return true;
}

void Grower::fit_steps(Json& op, const unflip::Shape& shape) {
  Json kept = empty_list();
  if (Json* steps = find(op, "steps"))
    for (Json& step : steps->items)
      if (fit_step(step, shape)) kept.items.push_back(step);
  set(op, "steps", kept);
}

bool Grower::fit_step(Json& step, const unflip::Shape& shape) {
  for (const char* key : {"scale", "shift", "slope"})
    if (step.find(key) != nullptr) {
      const Tensor* old = tensor(step, key);
      reshape(step, key, true, {old != nullptr && old->shape == std::vector<int64_t>{1} ? 1 : shape.channels});
    }
  const Json* kind = step.find("step");
  if (kind == nullptr || step.find("value") == nullptr) return true;
  const std::vector<int> equal = values_like(shape);
  const bool adds = kind->string == "add";
  const int value = static_cast<int>(std::clamp(step.find("value")->number, 0.0, double(graph_.ops.size())));
  const unflip::Shape& other = graph_.shape(value);
  const bool by_pixel = other.height == shape.height && other.width == shape.width && shape.channels % other.channels == 0;
  const bool fits =
      graph_.is_float(value) && (other == shape || (!adds && (by_pixel || other == unflip::Shape{shape.channels, 1, 1})));
  if (!fits && equal.empty()) return false;
  set(step, "value", number(fits ? value : random_.of(equal)));
  return true;
}

std::vector<int> Grower::values_like(const unflip::Shape& shape) const {
  std::vector<int> found;
  for (int v = 0; v <= static_cast<int>(graph_.ops.size()); ++v)
    if (graph_.shape(v) == shape && graph_.is_float(v)) found.push_back(v);
  return found;
}

bool Grower::fit_concat(Json& op) {
  Json& inputs = *find(op, "inputs");
  const unflip::Shape first = graph_.shape(static_cast<int>(inputs.items[0].number));
  Json kept = empty_list();
  for (const Json& item : inputs.items) {
    const int value = static_cast<int>(item.number);
    const unflip::Shape& shape = graph_.shape(value);
    if (graph_.is_float(value) && shape.height == first.height && shape.width == first.width) kept.items.push_back(item);
  }
  inputs = kept;
  return !kept.items.empty();
}

void Grower::fit_slice(Json& op, const unflip::Shape& in) {
  const int sizes[3] = {in.channels, in.height, in.width};
  std::vector<double> start, stop, step;
  for (size_t i = 0; i < 3; ++i) {
    stop.push_back(std::min<double>(double(whole(op, "stop", i)), sizes[i]));
    start.push_back(std::min<double>(double(whole(op, "start", i, 0)), stop.back() - 1));
    step.push_back(double(std::min<int64_t>(whole(op, "step", i), kMaxChannels)));
  }
  set(op, "start", list(start));
  set(op, "stop", list(stop));
  set(op, "step", list(step));
}

void Grower::fit_groups(Json& op, const unflip::Shape& in) {
  const int64_t groups = std::gcd(whole(op, "groups"), int64_t{in.channels});
  set(op, "groups", number(static_cast<double>(groups)));
}

void Grower::fit_factor(Json& op, const unflip::Shape& in) {
  const int64_t height = std::gcd(whole(op, "factor", 0), int64_t{in.channels});
  const int64_t width = std::gcd(whole(op, "factor", 1), in.channels / height);
  set(op, "factor", list({double(height), double(width)}));
}

}  // namespace fuzz
