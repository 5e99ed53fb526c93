// The loader. One file of more than 400 lines, because every rule of docs/format.md is checked here and nowhere else.
#include "graph.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>

#include "fail.h"
#include "json.h"
#include "safetensors.h"

namespace unflip {
namespace {

constexpr int kMaxSize = 65'536;         // of height, width, and everything measured along them
constexpr int kMaxChannels = 1'048'576;  // large, because a flattened image has many
constexpr size_t kMaxOps = 100'000;
constexpr int64_t kMaxElements = int64_t{1} << 28;     // of a value
constexpr int64_t kMaxSigns = int64_t{1} << 34;        // as many as fit into a file
constexpr int64_t kMaxWeights = int64_t{1} << 24;      // of a filter: sums of as many bits are exact in float32
constexpr int64_t kMaxByteWeights = int64_t{1} << 16;  // of a filter: sums of as many products of bytes fit 32 bits
constexpr int64_t kMaxBases = 64;
constexpr size_t kMaxName = 4096;
constexpr size_t kLabelBytes = 128;  // a string in a vector that grows, and its own block
constexpr int kMaxPlanes = 8, kMaxSteps = 255;
constexpr size_t kMaxInputs = 4096, kMaxOpSteps = 256, kMaxOutputs = 4096;

constexpr std::string_view kActivations[] = {
#define UNFLIP_NAME(activation, name) name,
    UNFLIP_ACTIVATIONS(UNFLIP_NAME)
#undef UNFLIP_NAME
};
constexpr std::string_view kSteps[] = {"affine", "prelu", "clamp", "add", "mul"};

template <size_t n>
int position(const std::string_view (&names)[n], std::string_view name) {
  for (size_t i = 0; i < n; ++i)
    if (names[i] == name) return static_cast<int>(i);
  return -1;
}

template <size_t n>
std::string listed(const std::string_view (&names)[n]) {
  std::string text;
  for (std::string_view name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

std::string text_of(const Shape& s) {
  return std::to_string(s.channels) + " x " + std::to_string(s.height) + " x " + std::to_string(s.width);
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (int64_t size : shape) text.append(text.size() > 1 ? ", " : "").append(std::to_string(size));
  return text + ")";
}

// An object of the graph whose fields are read one by one. Fields that were not read at the end are refused, because an unknown
// field may change what the network computes.
class Fields {
 public:
  Fields(std::string_view text, const Json& object, std::string where) : text_(text), object_(object), where_(std::move(where)) {
    if (object.type != Json::Type::Object) fail("must be an object, not " + shown(text, object));
    taken_.resize(object.keys.size());
  }

  [[noreturn]] void fail(const std::string& what) const { unflip::fail(where_ + ": " + what); }

  [[noreturn]] void wrong(const char* key, const std::string& right) const {
    const Json* found = object_.find(key);
    fail(std::string("'") + key + "' must be " + right + (found != nullptr ? ", not " + shown(text_, *found) : ""));
  }

  void rename(std::string where) { where_ = std::move(where); }
  const std::string& where() const { return where_; }
  std::string_view text() const { return text_; }

  const Json* optional(const char* key) {
    for (size_t i = 0; i < object_.keys.size(); ++i)
      if (object_.keys[i] == key) {
        taken_[i] = true;
        return &object_.items[i];
      }
    return nullptr;
  }

  const Json& required(const char* key) {
    const Json* found = optional(key);
    if (found == nullptr) fail(std::string("the field '") + key + "' is missing");
    return *found;
  }

  const std::string& string(const char* key, const std::string& right = "a string") {
    const Json& value = required(key);
    if (value.type != Json::Type::String) wrong(key, right);
    return value.string;
  }

  bool boolean(const char* key) {
    const Json& value = required(key);
    if (value.type != Json::Type::Bool) wrong(key, "true or false");
    return value.boolean;
  }

  const std::vector<Json>& list(const char* key, const std::string& right) {
    const Json& value = required(key);
    if (value.type != Json::Type::Array) wrong(key, right);
    return value.items;
  }

  int integer(const char* key, int least, int most) {
    int result = 0;
    if (!whole(required(key), least, most, result)) wrong(key, "a whole number " + range(least, most));
    return result;
  }

  // `count` whole numbers; `names` describes them, such as "[h, w]".
  void integers(const char* key, const char* names, int least, int most, int* results, size_t count) {
    const std::string right = std::string(names) + ", whole numbers " + range(least, most);
    const std::vector<Json>& items = list(key, right);
    if (items.size() != count) wrong(key, right);
    for (size_t i = 0; i < count; ++i)
      if (!whole(items[i], least, most, results[i])) wrong(key, right);
  }

  Pair pair(const char* key, int least, int most) {
    int both[2];
    integers(key, "[h, w]", least, most, both, 2);
    return {both[0], both[1]};
  }

  float number(const char* key) {
    float result = 0;
    if (!finite(required(key), result)) wrong(key, "a number that float32 can hold");
    return result;
  }

  std::vector<float> numbers(const char* key, const std::string& right, size_t least, size_t most) {
    std::vector<float> results;
    const std::vector<Json>& items = list(key, right);
    if (items.size() < least || items.size() > most) wrong(key, right);
    for (const Json& item : items) {
      results.push_back(0);
      if (!finite(item, results.back())) wrong(key, right + ", each of which float32 can hold");
    }
    return results;
  }

  void finish() const {
    for (size_t i = 0; i < taken_.size(); ++i)
      if (!taken_[i]) fail("unknown field '" + object_.keys[i].substr(0, 100) + "'");
  }

  static bool finite(const Json& value, float& result) {
    if (value.type != Json::Type::Number || std::fabs(value.number) > std::numeric_limits<float>::max()) return false;
    result = static_cast<float>(value.number);
    return true;
  }

  static bool whole(const Json& value, int least, int most, int& result) {
    if (value.type != Json::Type::Number || !value.whole || value.number < least || value.number > most) return false;
    result = static_cast<int>(value.number);
    return true;
  }

 private:
  static std::string range(int least, int most) { return std::to_string(least) + " .. " + std::to_string(most); }

  std::string_view text_;
  const Json& object_;
  std::string where_;
  std::vector<bool> taken_;
};

class Loader {
 public:
  Loader(Container container, const LoadOptions& options) : container_(std::move(container)), options_(options) {}

  // Reads the graph twice: first without its tensors, to compute what it needs.
  Graph load() {
    const Size memory = container_.memory + json_memory(container_.graph);
    check_memory(memory, options_.limits);
    const Json json = parse_json(container_.graph, "graph: ");
    read(json);
    check_memory(memory + bytes_, options_.limits);
    if (options_.measure) options_.measure(graph_, memory + bytes_);
    graph_ = Graph();
    measuring_ = false;
    read(json);
    return std::move(graph_);
  }

 private:
  void read(const Json& json) {
    Fields fields(container_.graph, json, "graph");
    read_input(fields.required("input"));
    const std::vector<Json>& ops = fields.list("ops", "a list");
    if (ops.size() > kMaxOps) fields.fail("more than 100,000 ops");
    graph_.ops.reserve(ops.size());
    for (const Json& op : ops) read_op(op);
    read_outputs(fields);
    read_labels(fields);
    check_source(fields);
    fields.finish();
    for (const auto& [name, tensor] : container_.tensors)
      if (!tensor.used) fail("tensor '" + name.substr(0, 100) + "': nothing in the graph uses it");
  }

  // --- the graph's own fields

  void read_input(const Json& json) {
    Fields fields(container_.graph, json, "input");
    int shape[3];
    fields.integers("shape", "[C, H, W]", 1, kMaxChannels, shape, 3);
    if (shape[1] > kMaxSize || shape[2] > kMaxSize) fields.wrong("shape", "[C, H, W] with H and W of at most 65,536");
    graph_.input = {shape[0], shape[1], shape[2]};
    if (!fits(graph_.input)) fields.fail("more than 2^28 elements: " + text_of(graph_.input));
    const Json& preprocess = fields.required("preprocess");
    if (preprocess.type != Json::Type::Null) read_preprocess(preprocess);
    fields.finish();
  }

  void read_preprocess(const Json& json) {
    Fields fields(container_.graph, json, "preprocess");
    const size_t channels = static_cast<size_t>(graph_.input.channels);
    const std::string right = std::to_string(channels) + " numbers, one per channel";
    fields.numbers("mean", right, channels, channels);
    for (float deviation : fields.numbers("std", right, channels, channels))
      if (!(deviation > 0)) fields.wrong("std", "numbers above 0");
    bytes_ += 2 * Size(graph_.input.channels) * sizeof(double);
    if (!measuring_) {
      graph_.mean = doubles(fields.required("mean"));
      graph_.deviation = doubles(fields.required("std"));
    }
    fields.finish();
  }

  static std::vector<double> doubles(const Json& list) {
    std::vector<double> numbers;
    numbers.reserve(list.items.size());
    for (const Json& item : list.items) numbers.push_back(item.number);
    return numbers;
  }

  // 'output' is one value. 'outputs' are values with names, and 'structure' is their container.
  void read_outputs(Fields& fields) {
    if (fields.optional("outputs") == nullptr) return add_output(fields, "output", "output");
    if (fields.optional("output") != nullptr) fields.fail("it must have 'output' or 'outputs', not both");
    const std::string& structure = fields.string("structure", "\"tuple\" or \"dict\"");
    if (structure != "tuple" && structure != "dict") fields.wrong("structure", "\"tuple\" or \"dict\"");
    graph_.structure = structure == "dict" ? Structure::Dict : Structure::Tuple;
    const std::string right = "a list of 1 .. 4096 outputs";
    const std::vector<Json>& items = fields.list("outputs", right);
    if (items.empty() || items.size() > kMaxOutputs) fields.wrong("outputs", right);
    std::set<std::string_view> names;
    for (size_t i = 0; i < items.size(); ++i) {
      Fields output(container_.graph, items[i], "output " + std::to_string(i));
      const std::string& name = output.string("name");
      if (name.empty() || name.size() > kMaxName || name.find('\0') != std::string::npos)
        output.wrong("name", "1 .. 4,096 bytes without a NUL");
      if (!names.insert(name).second) output.fail("'name' must differ from those before it: '" + name.substr(0, 200) + "'");
      add_output(output, "value", name);
      output.finish();
    }
  }

  void add_output(Fields& fields, const char* key, const std::string& name) {
    const int value = fields.integer(key, 0, made());
    if (!graph_.is_float(value))
      fields.fail(std::string("'") + key + "' must be a float value, and value " + std::to_string(value) + " is a code");
    const bool pixels = fields.optional("pixels") != nullptr && fields.boolean("pixels");
    graph_.outputs.push_back({name, value, pixels});
  }

  void read_labels(Fields& fields) {
    const Json& labels = fields.required("labels");
    if (labels.type == Json::Type::Null) return;
    std::string channels;
    bool fitting = false;
    for (size_t i = 0; i < graph_.outputs.size(); ++i) {
      const int count = graph_.output_shape(i).channels;
      if (i < 10) channels += (i > 0 ? " or " : "") + std::to_string(count);
      fitting |= labels.items.size() == static_cast<size_t>(count);
    }
    const std::string right =
        "null or " + channels + " strings, one for each channel of " + (graph_.outputs.size() == 1 ? "the output" : "an output");
    if (labels.type != Json::Type::Array || !fitting) fields.wrong("labels", right);
    for (const Json& label : labels.items) {
      if (label.type != Json::Type::String) fields.wrong("labels", right);
      if (label.string.find('\0') != std::string::npos) fields.fail("a label must not contain a NUL");
      bytes_ += static_cast<int64_t>(kLabelBytes + label.string.size());
      if (!measuring_) graph_.labels.push_back(label.string);
    }
  }

  // Where an imported network comes from: texts for people, which nothing here uses.
  void check_source(Fields& fields) const {
    const Json* source = fields.optional("source");
    if (source == nullptr) return;
    const std::string right = "an object of strings of at most 4,096 bytes";
    if (source->type != Json::Type::Object) fields.wrong("source", right);
    for (const Json& text : source->items)
      if (text.type != Json::Type::String || text.string.size() > kMaxName) fields.wrong("source", right);
  }

  // --- ops

  void read_op(const Json& json) {
    const std::string number = "op " + std::to_string(graph_.ops.size());
    Fields fields(container_.graph, json, number);
    Op op;
    const std::string& kind = fields.string("op");
    const int found = position(kOpNames, kind);
    if (found < 0) fields.wrong("op", "one of " + listed(kOpNames));
    op.kind = static_cast<OpKind>(found);
    op.name = fields.string("name");
    if (op.name.size() > kMaxName) fields.fail("'name' is longer than 4,096 bytes");
    if (op.name.find('\0') != std::string::npos) fields.fail("'name' must not contain a NUL");
    fields.rename(number + " (" + kind + " '" + op.name.substr(0, 200) + "')");
    read_inputs(fields, op);
    read_kind(fields, op);
    fields.finish();
    graph_.ops.push_back(std::move(op));
  }

  void read_inputs(Fields& fields, Op& op) const {
    const bool many = op.kind == OpKind::Concat, pair = op.kind == OpKind::Quantize;
    const std::string right = many   ? "a list of 1 .. 4096 values before this op"
                              : pair ? "[x] or [x, unit], values before this op"
                                     : "[x], a value before this op";
    const std::vector<Json>& items = fields.list("inputs", right);
    if (items.empty() || items.size() > (many ? kMaxInputs : pair ? 2 : 1)) fields.wrong("inputs", right);
    for (const Json& item : items) {
      int value = 0;
      if (!Fields::whole(item, 0, made(), value)) fields.wrong("inputs", right + " (0 .. " + std::to_string(made()) + ")");
      if (op.kind != OpKind::Conv && !graph_.is_float(value))
        fields.wrong("inputs", "float values; value " + std::to_string(value) + " is a code");
      op.inputs.push_back(value);
    }
  }

  // The number of the latest value.
  int made() const { return static_cast<int>(graph_.ops.size()); }

  void read_kind(Fields& fields, Op& op) {
    const Shape in = graph_.shape(op.inputs[0]);
    switch (op.kind) {
      case OpKind::Quantize: read_quantize(fields, op, in); break;
      case OpKind::Conv: read_conv(fields, op, in); break;
      case OpKind::Map: set_shape(fields, op, in.channels, in.height, in.width); break;
      case OpKind::MaxPool:
      case OpKind::AvgPool: read_pool(fields, op, in); break;
      case OpKind::Mean: set_shape(fields, op, in.channels, 1, 1); break;
      case OpKind::MeanAbs: read_mean_abs(fields, op, in); break;
      case OpKind::Concat: read_concat(fields, op, in); break;
      case OpKind::Slice: read_slice(fields, op, in); break;
      case OpKind::Pad: read_pad(fields, op, in); break;
      case OpKind::Flatten: set_shape(fields, op, in.size(), 1, 1); break;
      case OpKind::Softmax:
      case OpKind::LogSoftmax: set_shape(fields, op, in.channels, in.height, in.width); break;
      case OpKind::Activation: read_activation(fields, op, in); break;
      case OpKind::Normalize: read_normalize(fields, op, in); break;
      case OpKind::Upsample: read_upsample(fields, op, in); break;
      case OpKind::PixelShuffle: read_pixel_shuffle(fields, op, in); break;
      case OpKind::ChannelShuffle:
        read_groups(fields, op, in);
        set_shape(fields, op, in.channels, in.height, in.width);
        break;
      case OpKind::Resize: read_resize(fields, op, in); break;
      case OpKind::ToBytes: read_to_bytes(fields, op, in); break;
    }
    if (op.kind == OpKind::Conv || op.kind == OpKind::Map) read_steps(fields, op);
  }

  static bool fits(const Shape& shape) { return shape.size() <= kMaxElements; }

  static void set_shape(const Fields& fields, Op& op, int64_t channels, int64_t height, int64_t width) {
    if (channels < 1 || channels > kMaxChannels)
      fields.fail("its output would have " + std::to_string(channels) + " channels; 1 .. 1,048,576 are allowed");
    for (int64_t size : {height, width})
      if (size < 1 || size > kMaxSize)
        fields.fail("its output would have a dimension of " + std::to_string(size) + "; 1 .. 65,536 is allowed");
    op.shape = {static_cast<int>(channels), static_cast<int>(height), static_cast<int>(width)};
    if (!fits(op.shape)) fields.fail("its output would have more than 2^28 elements: " + text_of(op.shape));
  }

  void read_quantize(Fields& fields, Op& op, const Shape& in) {
    Quantizer& q = op.quantizer;
    if (op.inputs.size() == 2 && !(graph_.shape(op.inputs[1]) == Shape{1, 1, 1}))
      fields.wrong("inputs", "[x, unit] with a unit of 1 x 1 x 1; value " + std::to_string(op.inputs[1]) + " is " +
                                 text_of(graph_.shape(op.inputs[1])));
    Tensor& thresholds = tensor(fields, "thresholds", Dtype::F32, 2);
    const int64_t steps = thresholds.shape[0], columns = thresholds.shape[1];
    if (steps > kMaxSteps || (columns != 1 && columns != in.channels))
      wrong_shape(fields, "thresholds", thresholds, "(1 .. 255, " + std::to_string(in.channels) + ") or (1 .. 255, 1)");
    q.per_channel = columns != 1;
    q.thresholds = floats(fields, "thresholds", thresholds);

    const std::string right = "a list of " + std::to_string(steps) + " booleans, one per step";
    const std::vector<Json>& strict = fields.list("strict", right);
    if (strict.size() != static_cast<size_t>(steps)) fields.wrong("strict", right);
    for (const Json& item : strict) {
      if (item.type != Json::Type::Bool) fields.wrong("strict", right);
      q.strict.push_back(item.boolean);
    }

    const std::string& coding = fields.string("coding", "\"planes\" or \"levels\"");
    if (coding != "planes" && coding != "levels") fields.wrong("coding", "\"planes\" or \"levels\"");
    q.levels = coding == "levels";
    read_scales(fields, q, steps);
    q.offset = fields.number("offset");
    set_shape(fields, op, in.channels, in.height, in.width);
  }

  static void read_scales(Fields& fields, Quantizer& q, int64_t steps) {
    size_t planes = static_cast<size_t>(steps);
    if (q.levels)
      for (planes = 0; (steps >> planes) > 0;) ++planes;
    if (planes > kMaxPlanes) fields.fail(std::to_string(planes) + " planes; at most 8 are allowed");
    q.scales = fields.numbers("scales", std::to_string(planes) + " numbers, one per plane", planes, planes);
    for (size_t p = 1; q.levels && p < planes; ++p)
      if (q.scales[p] != std::ldexp(q.scales[0], static_cast<int>(p)))
        fields.wrong("scales", "scales[0] times 1, 2, 4, ... with the coding \"levels\"");
  }

  void read_to_bytes(Fields& fields, Op& op, const Shape& in) {
    op.range.scale = channel_floats(fields, "scale", in.channels);
    op.range.shift = channel_floats(fields, "shift", in.channels);
    const Tensor& zero = tensor(fields, "zero", Dtype::U8, 1);
    if (zero.shape[0] != 1 && zero.shape[0] != in.channels)
      wrong_shape(fields, "zero", zero, "(" + std::to_string(in.channels) + ") or (1)");
    bytes_ += static_cast<int64_t>(zero.bytes);
    if (!measuring_) op.range.zero.assign(zero.data, zero.data + zero.bytes);
    set_shape(fields, op, in.channels, in.height, in.width);
  }

  void read_conv(Fields& fields, Op& op, const Shape& in) {
    Convolution& c = op.conv;
    int shape[4], padding[4];
    fields.integers("shape", "[O, I, kh, kw]", 1, kMaxChannels, shape, 4);  // a kernel that is too large is refused below
    c.filters = shape[0], c.channels = shape[1], c.kernel = {shape[2], shape[3]};
    c.stride = fields.pair("stride", 1, kMaxSize);
    c.dilation = fields.pair("dilation", 1, kMaxSize);
    fields.integers("padding", "[top, left, bottom, right]", 0, kMaxSize, padding, 4);
    c.top = padding[0], c.left = padding[1], c.bottom = padding[2], c.right = padding[3];
    c.groups = fields.integer("groups", 1, kMaxSize);
    if (in.channels % c.groups != 0 || c.filters % c.groups != 0)
      fields.wrong("groups", "a number that divides " + std::to_string(in.channels) + " (the input's channels) and " +
                                 std::to_string(c.filters) + " (filters)");
    if (c.channels != in.channels / c.groups)
      fields.wrong("shape", "[O, " + std::to_string(in.channels / c.groups) + ", kh, kw]: the input has " +
                                std::to_string(in.channels) + " channels in " + std::to_string(c.groups) + " groups");
    const int64_t weights = int64_t{c.channels} * c.kernel.h * c.kernel.w;
    if (weights > kMaxWeights)
      fields.fail("a filter has " + std::to_string(weights) + " weights; at most 16,777,216 are allowed");
    read_weight(fields, op);
    set_shape(fields, op, c.filters, conv_size(fields, in.height, c.top + c.bottom, c.kernel.h, c.stride.h, c.dilation.h),
              conv_size(fields, in.width, c.left + c.right, c.kernel.w, c.stride.w, c.dilation.w));
  }

  static int64_t conv_size(const Fields& fields, int64_t size, int64_t padding, int64_t kernel, int64_t stride,
                           int64_t dilation) {
    const int64_t room = size + padding - (dilation * (kernel - 1) + 1);
    if (room < 0) fields.fail("the kernel is larger than the padded input of " + std::to_string(size + padding) + " pixels");
    return room / stride + 1;
  }

  void read_weight(Fields& fields, Op& op) {
    Convolution& c = op.conv;
    const bool is_float = fields.optional("weight") != nullptr, is_binary = fields.optional("bits") != nullptr;
    const bool is_int8 = fields.optional("bytes") != nullptr;
    if (is_float + is_binary + is_int8 != 1)
      fields.fail("needs exactly one of 'weight', 'bits' (with 'scales') and 'bytes' (with 'scales')");
    if (is_int8 != graph_.is_bytes(op.inputs[0]))
      fields.fail(is_int8 ? "'bytes' need an input from to_bytes" : "its input is from to_bytes, which needs 'bytes'");
    if (is_int8) return read_bytes(fields, op);
    if (is_binary) return read_bits(fields, op);
    if (graph_.is_code(op.inputs[0])) fields.fail("its input is a code, which needs 'bits', not 'weight'");
    Tensor& weight = tensor(fields, "weight", Dtype::F32, 4);
    const std::vector<int64_t> right = {c.filters, c.channels, c.kernel.h, c.kernel.w};
    if (weight.shape != right) wrong_shape(fields, "weight", weight, text_of(right) + ", its 'shape'");
    c.weight = floats(fields, "weight", weight);
  }

  void read_bytes(Fields& fields, Op& op) {
    Convolution& c = op.conv;
    const int64_t weights = int64_t{c.channels} * c.kernel.h * c.kernel.w;
    if (weights > kMaxByteWeights)
      fields.fail("a filter has " + std::to_string(weights) + " weights; at most 65,536 'bytes' are allowed");
    Tensor& bytes = tensor(fields, "bytes", Dtype::U8, 4);
    const std::vector<int64_t> right = {c.filters, c.channels, c.kernel.h, c.kernel.w};
    if (bytes.shape != right) wrong_shape(fields, "bytes", bytes, text_of(right) + ", its 'shape'");
    if (!bytes.checked && std::memchr(bytes.data, 0x80, bytes.bytes) != nullptr)
      fields.fail("'bytes': -128 is not allowed, only -127 .. 127");
    bytes.checked = true;
    Tensor& scales = tensor(fields, "scales", Dtype::F32, 2);
    if (scales.shape[0] != 1 || (scales.shape[1] != 1 && scales.shape[1] != c.filters))
      wrong_shape(fields, "scales", scales, "(1, " + std::to_string(c.filters) + ") or (1, 1)");
    bytes_ += static_cast<int64_t>(bytes.bytes);
    c.int8 = true;
    if (!measuring_) c.bytes.assign(bytes.data, bytes.data + bytes.bytes);
    c.scales = spread(floats(fields, "scales", scales), 1, c.filters, scales.shape[1] == 1);
  }

  void read_bits(Fields& fields, Op& op) {
    Convolution& c = op.conv;
    Tensor& scales = tensor(fields, "scales", Dtype::F32, 2);
    const int64_t bases = scales.shape[0], columns = scales.shape[1];
    if (bases > kMaxBases || (columns != 1 && columns != c.filters))
      wrong_shape(fields, "scales", scales, "(1 .. 64, " + std::to_string(c.filters) + ") or (1 .. 64, 1): one row per base");
    const Tensor& bits = tensor(fields, "bits", Dtype::U8, 1);
    // At most 2^6 * 2^20 * 2^24, which does not overflow.
    const int64_t signs = bases * c.filters * (int64_t{c.channels} * c.kernel.h * c.kernel.w);
    if (signs > kMaxSigns) fields.fail("more than 2^31 bytes of weights");
    const int64_t bytes = (signs + 7) / 8;
    if (bits.shape[0] != bytes)
      wrong_shape(fields, "bits", bits, "(" + std::to_string(bytes) + "): " + std::to_string(signs) + " signs, eight per byte");
    if (signs % 8 != 0 && bits.data[bytes - 1] >> (signs % 8) != 0)
      fields.fail("'bits': the bits left over in the last byte must be 0");
    bytes_ += static_cast<int64_t>(bits.bytes);
    if (!measuring_) c.bits.assign(bits.data, bits.data + bits.bytes);
    c.bases = static_cast<int>(bases);
    c.scales = spread(floats(fields, "scales", scales), bases, c.filters, columns == 1);
    if (fields.optional("offset") == nullptr) return;
    c.offset = channel_floats(fields, "offset", c.filters);
    c.offset = spread(std::move(c.offset), 1, c.filters, c.offset.size() == 1);
  }

  // Repeats each of `rows` numbers `count` times, if it is shared.
  std::vector<float> spread(std::vector<float> values, int64_t rows, int count, bool shared) {
    if (!shared || count == 1) return values;
    bytes_ += Size(rows) * count * sizeof(float);
    if (measuring_) return values;
    std::vector<float> all;
    all.reserve(values.size() * static_cast<size_t>(count));
    for (float value : values) all.insert(all.end(), static_cast<size_t>(count), value);
    return all;
  }

  void read_pool(Fields& fields, Op& op, const Shape& in) {
    Pool& p = op.pool;
    p.kernel = fields.pair("kernel", 1, kMaxSize);
    p.stride = fields.pair("stride", 1, kMaxSize);
    p.padding = fields.pair("padding", 0, kMaxSize);
    const bool ceil = fields.boolean("ceil");
    if (op.kind == OpKind::AvgPool) p.count_padding = fields.boolean("count_padding");
    // PyTorch's rule: with more, a window could consist of padding only.
    if (p.padding.h > p.kernel.h / 2 || p.padding.w > p.kernel.w / 2) fields.wrong("padding", "at most half the kernel");
    set_shape(fields, op, in.channels, pool_size(fields, in.height, p.kernel.h, p.stride.h, p.padding.h, ceil),
              pool_size(fields, in.width, p.kernel.w, p.stride.w, p.padding.w, ceil));
  }

  static int64_t pool_size(const Fields& fields, int64_t size, int64_t kernel, int64_t stride, int64_t padding, bool ceil) {
    const int64_t room = size + 2 * padding - kernel;
    // In PyTorch's formula, rounding up may give one window even if it does not fit completely.
    const int64_t above = room + (ceil ? stride - 1 : 0);
    if (above < 0) fields.fail("the kernel is larger than the padded input of " + std::to_string(size + 2 * padding) + " pixels");
    int64_t windows = above / stride + 1;
    if (ceil && (windows - 1) * stride >= size + padding) --windows;
    return windows;
  }

  void read_mean_abs(Fields& fields, Op& op, const Shape& in) {
    const std::string& over = fields.string("over", "\"channels\" or \"sample\"");
    if (over != "channels" && over != "sample") fields.wrong("over", "\"channels\" or \"sample\"");
    op.over_sample = over == "sample";
    if (op.over_sample) return set_shape(fields, op, 1, 1, 1);
    read_groups(fields, op, in);
    set_shape(fields, op, op.groups, in.height, in.width);
  }

  static void read_groups(Fields& fields, Op& op, const Shape& in) {
    op.groups = fields.integer("groups", 1, kMaxSize);
    if (in.channels % op.groups != 0)
      fields.wrong("groups", "a number that divides " + std::to_string(in.channels) + ", the input's channels");
  }

  static void read_activation(Fields& fields, Op& op, const Shape& in) {
    const int found = position(kActivations, fields.string("function"));
    if (found < 0) fields.wrong("function", "one of " + listed(kActivations));
    op.activation = static_cast<Activation>(found);
    set_shape(fields, op, in.channels, in.height, in.width);
  }

  static void read_normalize(Fields& fields, Op& op, const Shape& in) {
    read_groups(fields, op, in);
    op.epsilon = fields.number("epsilon");
    if (!(op.epsilon > 0)) fields.wrong("epsilon", "a number above 0");  // otherwise a group of equal numbers is divided by 0
    set_shape(fields, op, in.channels, in.height, in.width);
  }

  static void read_upsample(Fields& fields, Op& op, const Shape& in) {
    op.factor = fields.pair("factor", 1, kMaxSize);
    set_shape(fields, op, in.channels, int64_t{in.height} * op.factor.h, int64_t{in.width} * op.factor.w);
  }

  static void read_pixel_shuffle(Fields& fields, Op& op, const Shape& in) {
    op.factor = fields.pair("factor", 1, kMaxSize);
    const int64_t pixels = int64_t{op.factor.h} * op.factor.w;
    if (in.channels % pixels != 0)
      fields.wrong("factor", "[h, w] whose product divides " + std::to_string(in.channels) + ", the input's channels");
    set_shape(fields, op, in.channels / pixels, int64_t{in.height} * op.factor.h, int64_t{in.width} * op.factor.w);
  }

  static void read_resize(Fields& fields, Op& op, const Shape& in) {
    const Pair size = fields.pair("size", 1, kMaxSize);
    op.align_corners = fields.boolean("align_corners");
    set_shape(fields, op, in.channels, size.h, size.w);
  }

  void read_concat(Fields& fields, Op& op, const Shape& first) {
    int64_t channels = 0;
    for (int value : op.inputs) {
      const Shape& shape = graph_.shape(value);
      if (shape.height != first.height || shape.width != first.width)
        fields.wrong("inputs", "values of one height and width; value " + std::to_string(op.inputs[0]) + " is " + text_of(first) +
                                   " and value " + std::to_string(value) + " is " + text_of(shape));
      channels += shape.channels;
    }
    set_shape(fields, op, channels, first.height, first.width);
  }

  static void read_slice(Fields& fields, Op& op, const Shape& in) {
    const int size[3] = {in.channels, in.height, in.width};
    int stop[3];
    int64_t out[3];
    fields.integers("start", "[c, h, w]", 0, kMaxChannels, op.start, 3);
    fields.integers("stop", "[c, h, w]", 1, kMaxChannels, stop, 3);
    fields.integers("step", "[c, h, w]", 1, kMaxChannels, op.step, 3);
    for (int i = 0; i < 3; ++i) {
      if (stop[i] > size[i]) fields.wrong("stop", "at most the input's size, " + text_of(in));
      if (op.start[i] >= stop[i]) fields.wrong("start", "below 'stop'");
      out[i] = (int64_t{stop[i]} - op.start[i] + op.step[i] - 1) / op.step[i];
    }
    set_shape(fields, op, out[0], out[1], out[2]);
  }

  static void read_pad(Fields& fields, Op& op, const Shape& in) {
    int after[3];
    fields.integers("before", "[c, h, w]", 0, kMaxChannels, op.before, 3);
    fields.integers("after", "[c, h, w]", 0, kMaxChannels, after, 3);
    set_shape(fields, op, int64_t{in.channels} + op.before[0] + after[0], int64_t{in.height} + op.before[1] + after[1],
              int64_t{in.width} + op.before[2] + after[2]);
  }

  // --- steps

  void read_steps(Fields& fields, Op& op) {
    const std::vector<Json>& steps = fields.list("steps", "a list");
    if (steps.size() > kMaxOpSteps) fields.fail("more than 256 steps");
    for (size_t i = 0; i < steps.size(); ++i) {
      Fields step(container_.graph, steps[i], fields.where() + ": step " + std::to_string(i));
      op.steps.push_back(read_step(step, op.shape));
      step.finish();
    }
  }

  Step read_step(Fields& fields, const Shape& shape) {
    Step step;
    const std::string& kind = fields.string("step");
    const int found = position(kSteps, kind);
    if (found < 0) fields.wrong("step", "one of " + listed(kSteps));
    step.kind = static_cast<StepKind>(found);
    fields.rename(fields.where() + " (" + kind + ")");
    switch (step.kind) {
      case StepKind::Affine:
        if (fields.optional("scale") != nullptr) step.scale = channel_floats(fields, "scale", shape.channels);
        if (fields.optional("shift") != nullptr) step.shift = channel_floats(fields, "shift", shape.channels);
        break;
      case StepKind::Prelu: step.slope = channel_floats(fields, "slope", shape.channels); break;
      case StepKind::Clamp: read_clamp(fields, step); break;
      case StepKind::Add:
      case StepKind::Mul: read_operand(fields, step, shape); break;
    }
    return step;
  }

  static void read_clamp(Fields& fields, Step& step) {
    const float infinity = std::numeric_limits<float>::infinity();
    step.low = fields.required("low").type == Json::Type::Null ? -infinity : fields.number("low");
    step.high = fields.required("high").type == Json::Type::Null ? infinity : fields.number("high");
    if (step.low > step.high) fields.wrong("low", "at most 'high'");
  }

  void read_operand(Fields& fields, Step& step, const Shape& shape) const {
    step.value = fields.integer("value", 0, made());
    if (!graph_.is_float(step.value)) fields.wrong("value", "a float value; this one is a code");
    const Shape& other = graph_.shape(step.value);
    if (step.kind == StepKind::Add) {
      if (!(other == shape)) fields.wrong("value", "a value of " + text_of(shape) + "; it is " + text_of(other));
      return;
    }
    const bool by_pixel = other.height == shape.height && other.width == shape.width && shape.channels % other.channels == 0;
    if (!by_pixel && !(other == Shape{shape.channels, 1, 1}))
      fields.wrong("value", "g x " + std::to_string(shape.height) + " x " + std::to_string(shape.width) +
                                " with a g that divides " + std::to_string(shape.channels) + ", or " +
                                std::to_string(shape.channels) + " x 1 x 1; it is " + text_of(other));
  }

  // --- tensors

  [[noreturn]] static void wrong_shape(const Fields& fields, const char* key, const Tensor& tensor, const std::string& right) {
    fields.fail(std::string("'") + key + "' must have the shape " + right + ", not " + text_of(tensor.shape));
  }

  Tensor& tensor(Fields& fields, const char* key, Dtype dtype, size_t dimensions) {
    const std::string& name = fields.string(key, "a tensor's name");
    const auto found = container_.tensors.find(name);
    if (found == container_.tensors.end()) fields.wrong(key, "the name of a tensor in the file");
    Tensor& tensor = found->second;
    tensor.used = true;
    if (tensor.dtype != dtype)
      fields.fail(std::string("'") + key + "' must be a tensor of " + (dtype == Dtype::F32 ? "F32, not U8" : "U8, not F32"));
    if (tensor.shape.size() != dimensions)
      fields.fail(std::string("'") + key + "' must be a tensor of " + std::to_string(dimensions) + " dimension" +
                  (dimensions > 1 ? "s" : "") + ", not of shape " + text_of(tensor.shape));
    return tensor;
  }

  // Many ops may use one tensor, and each gets a copy. It is checked only for the first one.
  std::vector<float> floats(const Fields& fields, const char* key, Tensor& tensor) {
    bytes_ += static_cast<int64_t>(tensor.bytes);
    const size_t count = tensor.bytes / sizeof(float);
    if (!tensor.checked) check(fields, key, tensor, count);
    if (measuring_) return {tensor.first};
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = float_at(tensor, i);
    return values;
  }

  static void check(const Fields& fields, const char* key, Tensor& tensor, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const float value = float_at(tensor, i);
      if (!std::isfinite(value))
        fields.fail(std::string("'") + key + "' has a NaN or an infinity at position " + std::to_string(i));
      if (tensor.first == 0) tensor.first = value;
    }
    tensor.checked = true;
  }

  static float float_at(const Tensor& tensor, size_t i) {
    const uint8_t* b = tensor.data + 4 * i;  // little endian on every machine
    const uint32_t bits = uint32_t{b[0]} | uint32_t{b[1]} << 8 | uint32_t{b[2]} << 16 | uint32_t{b[3]} << 24;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  // A tensor of shape (count) or (1).
  std::vector<float> channel_floats(Fields& fields, const char* key, int count) {
    Tensor& found = tensor(fields, key, Dtype::F32, 1);
    if (found.shape[0] != 1 && found.shape[0] != count) wrong_shape(fields, key, found, "(" + std::to_string(count) + ") or (1)");
    return floats(fields, key, found);
  }

  Container container_;
  const LoadOptions& options_;
  Graph graph_;
  bool measuring_ = true;  // count the bytes of tensors, but do not copy them
  Size bytes_ = 0;         // of the graph's copies of tensors
};

}  // namespace

Graph load_graph(const uint8_t* data, size_t size, const LoadOptions& options) {
  return Loader(read_container(data, size, options.limits, options.check_hash), options).load();
}

const char* kind_name(const Op& op) {
  if (op.kind == OpKind::Activation) return kActivations[static_cast<size_t>(op.activation)].data();
  return kOpNames[static_cast<size_t>(op.kind)].data();
}

}  // namespace unflip
