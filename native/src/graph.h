// A network as described by the file (docs/format.md), validated and with all shapes known.
// It is the only interface between the loader, which makes it, and the engine, which runs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "activation.h"
#include "limits.h"

namespace unflip {

struct Shape {
  int channels = 0, height = 0, width = 0;
  int64_t size() const { return int64_t{channels} * height * width; }
  bool operator==(const Shape& o) const { return channels == o.channels && height == o.height && width == o.width; }
};

struct Pair {
  int h = 1, w = 1;
};

// Every op with its name in the file: the only list of ops in this library.
#define UNFLIP_OPS(OP)                  \
  OP(Quantize, "quantize")              \
  OP(Conv, "conv")                      \
  OP(Map, "map")                        \
  OP(MaxPool, "max_pool")               \
  OP(AvgPool, "avg_pool")               \
  OP(Mean, "mean")                      \
  OP(MeanAbs, "mean_abs")               \
  OP(Concat, "concat")                  \
  OP(Slice, "slice")                    \
  OP(Pad, "pad")                        \
  OP(Flatten, "flatten")                \
  OP(Softmax, "softmax")                \
  OP(LogSoftmax, "log_softmax")         \
  OP(Activation, "curve")               \
  OP(Normalize, "normalize")            \
  OP(Upsample, "upsample")              \
  OP(PixelShuffle, "pixel_shuffle")     \
  OP(ChannelShuffle, "channel_shuffle") \
  OP(Resize, "resize")                  \
  OP(ToBytes, "to_bytes")

enum class OpKind {
#define UNFLIP_OP(kind, name) kind,
  UNFLIP_OPS(UNFLIP_OP)
#undef UNFLIP_OP
};

constexpr std::string_view kOpNames[] = {
#define UNFLIP_OP(kind, name) name,
    UNFLIP_OPS(UNFLIP_OP)
#undef UNFLIP_OP
};

enum class StepKind { Affine, Prelu, Clamp, Add, Mul };

// One element-wise step. Vectors have one element, or one per channel. A missing scale or shift is empty.
struct Step {
  StepKind kind = StepKind::Affine;
  std::vector<float> scale, shift;  // Affine
  std::vector<float> slope;         // Prelu
  float low = 0, high = 0;          // Clamp; -inf and +inf if null in the file
  int value = 0;                    // Add, Mul
};

// Floats to bit planes: value = offset + sum of scales[p] * plane[p].
struct Quantizer {
  std::vector<float> thresholds;  // steps x channels, or steps x 1
  bool per_channel = false;
  std::vector<bool> strict;   // one per step: x > t instead of x >= t
  bool levels = false;        // planes are the binary digits of the number of steps reached
  std::vector<float> scales;  // one per plane
  float offset = 0;
  int steps() const { return static_cast<int>(strict.size()); }
  int planes() const { return static_cast<int>(scales.size()); }
};

// Floats to whole numbers: n - zero, n = round(clamp(x * scale + shift, 0, 255)). Vectors have one element, or one per channel.
struct ByteRange {
  std::vector<float> scale, shift;
  std::vector<uint8_t> zero;
};

struct Convolution {
  int filters = 0, channels = 0;  // channels: of a filter = input channels / groups
  Pair kernel, stride, dilation;
  int top = 0, left = 0, bottom = 0, right = 0;
  int groups = 1;
  std::vector<float> weight;  // filters x channels x kernel; empty for binary weights
  bool int8 = false;          // whole weights: `bytes` times `scales`, for an input of whole numbers
  std::vector<int8_t> bytes;  // filters x channels x kernel, -127 .. 127
  int bases = 0;              // binary weights: sum over bases of scale * sign, plus offset
  std::vector<uint8_t> bits;  // as in the file
  std::vector<float> scales;  // bases x filters (the loader repeats a shared scale); int8: filters
  std::vector<float> offset;  // one per filter, or empty
};

struct Pool {
  Pair kernel, stride, padding{0, 0};
  bool count_padding = false;  // ceil_mode is already part of the output's shape
};

struct Op {
  OpKind kind = OpKind::Map;
  std::string name;
  std::vector<int> inputs;
  std::vector<Step> steps;                        // Conv, Map
  Quantizer quantizer;                            // Quantize
  ByteRange range;                                // ToBytes
  Convolution conv;                               // Conv
  Pool pool;                                      // MaxPool, AvgPool
  int groups = 1;                                 // MeanAbs over channels, Normalize, ChannelShuffle
  bool over_sample = false;                       // MeanAbs
  Activation activation = Activation::Sigmoid;    // Activation
  float epsilon = 0;                              // Normalize
  Pair factor;                                    // Upsample, PixelShuffle
  bool align_corners = false;                     // Resize; its size is `shape`
  int start[3] = {0, 0, 0}, step[3] = {1, 1, 1};  // Slice; where it stops follows from `shape`
  int before[3] = {0, 0, 0};                      // Pad; the padding after follows from `shape`
  Shape shape;                                    // of the op's value
};

// A value that is returned. The same value may be returned under several names.
struct Output {
  std::string name;
  int value = 0;
  bool pixels = false;  // a value of C x 1 x 1 is an image of one pixel, not a vector
};

// What the user's model returned, so that bindings can return the same structure.
enum class Structure { Tensor, Tuple, Dict };

struct Graph {
  Shape input;
  std::vector<Op> ops;          // ops[i] makes value i + 1
  std::vector<Output> outputs;  // at least one; for Structure::Tensor one named "output"
  Structure structure = Structure::Tensor;
  std::vector<double> mean, deviation;  // of the input's channels; empty if the file has no preprocessing
  std::vector<std::string> labels;      // empty if the file has none

  const Shape& shape(int value) const { return value == 0 ? input : ops[value - 1].shape; }
  const Shape& output_shape(size_t output) const { return shape(outputs[output].value); }
  bool is_code(int value) const { return value > 0 && ops[value - 1].kind == OpKind::Quantize; }
  bool is_bytes(int value) const { return value > 0 && ops[value - 1].kind == OpKind::ToBytes; }
  bool is_float(int value) const { return !is_code(value) && !is_bytes(value); }
};

struct LoadOptions {
  Limits limits;
  bool check_hash = true;  // false for files that were changed on purpose: by the fuzzer, or on the page that flips weights
  // Called before any tensor is copied, with the memory for the file and the graph. The graph has all shapes, but each of its
  // vectors of numbers has at most one element: the first one that is not 0, if there is one. May throw to refuse the graph.
  std::function<void(const Graph& without_tensors, Size memory)> measure;
};

// Reads a .unflip file's bytes and checks every rule of docs/format.md. Throws std::runtime_error with the op, the field and the
// accepted values.
Graph load_graph(const uint8_t* data, size_t size, const LoadOptions& options = {});

const char* kind_name(const Op& op);  // as in the file: "max_pool"; for an activation its function

}  // namespace unflip
