// Compares the engine with a plain reference in double precision, written from docs/format.md, on random graphs. All instruction
// sets and numbers of threads must give the same bits. Usage: engine_test [random cases] [first case]
//
// One file of more than 400 lines, because the reference, the random graphs and the checks are one program.
//
// Comparisons with thresholds must not depend on rounding. So numbers are small multiples of powers of two, and the reference
// tracks the binary digits of each value. A case is skipped if a value to be quantized is not exact and near a threshold.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocations.h"
#include "engine.h"
#include "thread_pool.h"

using namespace unflip;

namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15 + 1) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }
  int in(int low, int high) { return low + static_cast<int>(next() % static_cast<uint64_t>(high - low + 1)); }
  bool chance(int percent) { return in(1, 100) <= percent; }
  int pick(std::initializer_list<int> list) { return list.begin()[in(0, static_cast<int>(list.size()) - 1)]; }
  float quarter(int most) { return static_cast<float>(in(-4 * most, 4 * most)) / 4; }               // a multiple of 1/4
  float real() { return static_cast<float>(static_cast<double>(next() >> 11) / (1LL << 52) - 1); }  // -1 .. 1, all digits
  float power() { return static_cast<float>(pick({1, 2, 4})) / 2 * (chance(30) ? -1.f : 1.f); }

 private:
  uint64_t state_;
};

// ------------------------------------------------------------------------------------------------------------ the reference

struct Tensor {
  Shape shape;
  std::vector<double> x;  // C x H x W
  bool exact = true;      // every element is exact in a float, in any order of computation
  int digits = 0;         // elements are multiples of 2^-digits

  Tensor() = default;
  explicit Tensor(Shape s) : shape(s), x(s.size(), 0.0) {}
  double& at(int c, int y, int w) { return x[(int64_t{c} * shape.height + y) * shape.width + w]; }
  double at(int c, int y, int w) const { return x[(int64_t{c} * shape.height + y) * shape.width + w]; }
  double largest() const {
    double m = 0;
    for (double v : x) m = std::max(m, std::fabs(v));
    return m;
  }
  void settle(bool inputs_exact, int d, double partial_sums) {
    digits = d;
    exact = inputs_exact && d < 20 && std::max(largest(), partial_sums) * std::pow(2, d) < (1 << 23);
  }
};

int digits_of(double v) {
  int d = 0;
  while (v != std::floor(v) && d < 40) v *= 2, d++;
  return d;
}

int digits_of(const std::vector<float>& v) {
  int d = 0;
  for (float x : v) d = std::max(d, digits_of(x));
  return d;
}

double element(const std::vector<float>& v, int i) { return v[v.size() == 1 ? 0 : i]; }

struct TooClose : std::runtime_error {
  TooClose() : std::runtime_error("a comparison is a matter of rounding") {}
};

class Reference {
 public:
  Reference(const Graph& graph, const float* input) : graph_(graph) {
    Tensor in(graph.input);
    for (size_t i = 0; i < in.x.size(); i++) in.x[i] = input[i], in.digits = std::max(in.digits, digits_of(input[i]));
    values_.push_back(in);
    for (const Op& op : graph.ops) values_.push_back(evaluate(op));
  }
  const Tensor& output(size_t i = 0) const { return values_[graph_.outputs[i].value]; }

 private:
  const Tensor& input(const Op& op, int i = 0) const { return values_[op.inputs[i]]; }

  Tensor evaluate(const Op& op) {
    switch (op.kind) {
      case OpKind::Quantize: return quantize(op);
      case OpKind::Conv: return steps(op, conv(op));
      case OpKind::Map: return steps(op, input(op));
      case OpKind::MaxPool:
      case OpKind::AvgPool: return pool(op);
      case OpKind::Mean: return mean(op);
      case OpKind::MeanAbs: return mean_abs(op);
      case OpKind::Concat: return concat(op);
      case OpKind::Slice: return slice(op);
      case OpKind::Pad: return pad(op);
      case OpKind::Flatten: return flatten(op);
      case OpKind::Softmax:
      case OpKind::LogSoftmax: return softmax(op);
      case OpKind::Activation: return activation(op);
      case OpKind::Normalize: return normalize(op);
      case OpKind::Upsample:
      case OpKind::PixelShuffle:
      case OpKind::ChannelShuffle: return moved(op);
      case OpKind::Resize: return resize(op);
      case OpKind::ToBytes: return to_bytes(op);
    }
    return Tensor();
  }

  Tensor to_bytes(const Op& op) const {
    const Tensor& in = input(op);
    Tensor out(op.shape);
    for (int c = 0; c < op.shape.channels; c++)
      for (int y = 0; y < op.shape.height; y++)
        for (int x = 0; x < op.shape.width; x++) {
          const double place = in.at(c, y, x) * element(op.range.scale, c) + element(op.range.shift, c);
          const double rest = place - std::floor(place);
          if (!in.exact && std::fabs(rest - 0.5) < 1e-3 * (1 + std::fabs(place))) throw TooClose();
          const int zero = op.range.zero[op.range.zero.size() == 1 ? 0 : c];
          out.at(c, y, x) = std::nearbyint(std::min(std::max(place, 0.0), 255.0)) - zero;
        }
    out.settle(true, 0, 0);
    return out;
  }

  Tensor quantize(const Op& op) const {
    const Quantizer& q = op.quantizer;
    const Tensor& in = input(op);
    const Tensor* unit = op.inputs.size() > 1 ? &input(op, 1) : nullptr;
    Tensor out(op.shape);
    for (int c = 0; c < op.shape.channels; c++)
      for (int y = 0; y < op.shape.height; y++)
        for (int x = 0; x < op.shape.width; x++) {
          double value = q.offset;
          int reached = 0;
          for (int s = 0; s < q.steps(); s++) {
            double t = q.per_channel ? q.thresholds[int64_t{s} * op.shape.channels + c] : q.thresholds[s];
            if (unit) t *= unit->x[0];
            const double v = in.at(c, y, x);
            if ((!in.exact || (unit && !unit->exact)) && std::fabs(v - t) < 1e-3 * (1 + in.largest())) throw TooClose();
            const bool hit = q.strict[s] ? v > t : v >= t;
            reached += hit;
            if (!q.levels && hit) value += q.scales[s];
          }
          if (q.levels)
            for (int p = 0; p < q.planes(); p++)
              if (reached >> p & 1) value += q.scales[p];
          out.at(c, y, x) = value;
        }
    out.settle(true, std::max(digits_of(q.scales), digits_of(q.offset)), 0);
    return out;
  }

  static double weight(const Convolution& conv, int o, int64_t k) {
    const int64_t depth = int64_t{conv.channels} * conv.kernel.h * conv.kernel.w;
    if (conv.int8) return static_cast<double>(conv.bytes[o * depth + k]) * conv.scales[o];
    if (!conv.bases) return conv.weight[o * depth + k];
    double w = conv.offset.empty() ? 0 : element(conv.offset, o);
    for (int b = 0; b < conv.bases; b++) {
      const int64_t bit = (int64_t{b} * conv.filters + o) * depth + k;
      w += conv.scales[int64_t{b} * conv.filters + o] * (conv.bits[bit / 8] >> (bit % 8) & 1 ? 1 : -1);
    }
    return w;
  }

  Tensor conv(const Op& op) const {
    const Convolution& conv = op.conv;
    const Tensor& in = input(op);
    Tensor out(op.shape);
    const int taps = conv.kernel.h * conv.kernel.w;
    double sums = 0;
    for (int o = 0; o < conv.filters; o++) {
      std::vector<double> w(int64_t{conv.channels} * taps);
      for (size_t k = 0; k < w.size(); k++) w[k] = weight(conv, o, static_cast<int64_t>(k));
      const int group = o / (conv.filters / conv.groups);
      for (int y = 0; y < op.shape.height; y++)
        for (int x = 0; x < op.shape.width; x++) {
          double sum = 0, size = 0;
          for (int c = 0; c < conv.channels; c++)
            for (int t = 0; t < taps; t++) {
              const int row = y * conv.stride.h - conv.top + t / conv.kernel.w * conv.dilation.h;
              const int column = x * conv.stride.w - conv.left + t % conv.kernel.w * conv.dilation.w;
              if (row < 0 || column < 0 || row >= in.shape.height || column >= in.shape.width) continue;
              const double term = in.at(group * conv.channels + c, row, column) * w[int64_t{c} * taps + t];
              sum += term;
              size += std::fabs(term);
            }
          out.at(o, y, x) = sum;
          sums = std::max(sums, size);
        }
    }
    int digits = std::max(digits_of(conv.weight), std::max(digits_of(conv.scales), digits_of(conv.offset)));
    if (conv.kernel.h == 7 && conv.stride.h == 2) {  // may use stem.h: 100 products of sums of 4 inputs and of 4 weights
      digits += 2;
      double largest = 0;
      for (int o = 0; o < conv.filters; o++)
        for (int k = 0; k < conv.channels * taps; k++) largest = std::max(largest, std::fabs(weight(conv, o, k)));
      sums = std::max(sums, 100 * conv.channels * 4 * in.largest() * 4 * largest);
    }
    out.settle(in.exact, in.digits + digits, 4 * sums);
    return out;
  }

  Tensor steps(const Op& op, Tensor t) const {
    for (const Step& s : op.steps) step(s, t);
    return t;
  }

  void step(const Step& s, Tensor& t) const {
    const Shape& shape = t.shape;
    const Tensor* other = s.kind == StepKind::Add || s.kind == StepKind::Mul ? &values_[s.value] : nullptr;
    bool exact = t.exact && (!other || other->exact);
    int digits = t.digits;
    for (int c = 0; c < shape.channels; c++)
      for (int y = 0; y < shape.height; y++)
        for (int x = 0; x < shape.width; x++) {
          double& v = t.at(c, y, x);
          switch (s.kind) {
            case StepKind::Affine:
              if (!s.scale.empty()) v *= element(s.scale, c);
              if (!s.shift.empty()) v += element(s.shift, c);
              break;
            case StepKind::Prelu:
              if (v < 0) v *= element(s.slope, c);
              break;
            case StepKind::Clamp: v = std::min<double>(std::max<double>(v, s.low), s.high); break;
            case StepKind::Add: v += other->at(c, y, x); break;
            case StepKind::Mul: v *= factor(*other, shape, c, y, x); break;
          }
        }
    if (s.kind == StepKind::Affine) digits = std::max(digits + digits_of(s.scale), digits_of(s.shift));
    if (s.kind == StepKind::Prelu) digits += digits_of(s.slope);
    if (s.kind == StepKind::Add) digits = std::max(digits, other->digits);
    if (s.kind == StepKind::Mul) digits += other->digits;
    t.settle(exact, digits, 0);
  }

  static double factor(const Tensor& other, const Shape& shape, int c, int y, int x) {
    if (other.shape.height == shape.height && other.shape.width == shape.width)
      return other.at(c / (shape.channels / other.shape.channels), y, x);
    return other.at(c, 0, 0);
  }

  // PyTorch's own loops.
  Tensor pool(const Op& op) const {
    const Tensor& in = input(op);
    const Pool& p = op.pool;
    Tensor out(op.shape);
    for (int c = 0; c < op.shape.channels; c++)
      for (int y = 0; y < op.shape.height; y++)
        for (int x = 0; x < op.shape.width; x++) {
          int y0 = y * p.stride.h - p.padding.h, x0 = x * p.stride.w - p.padding.w;
          int y1 = std::min(y0 + p.kernel.h, in.shape.height + p.padding.h);
          int x1 = std::min(x0 + p.kernel.w, in.shape.width + p.padding.w);
          int count = (y1 - y0) * (x1 - x0);
          y0 = std::max(y0, 0), x0 = std::max(x0, 0);
          y1 = std::min(y1, in.shape.height), x1 = std::min(x1, in.shape.width);
          if (!p.count_padding) count = (y1 - y0) * (x1 - x0);
          double max = -std::numeric_limits<double>::infinity(), sum = 0;
          for (int i = y0; i < y1; i++)
            for (int j = x0; j < x1; j++) max = std::max(max, in.at(c, i, j)), sum += in.at(c, i, j);
          out.at(c, y, x) = op.kind == OpKind::MaxPool ? max : sum / count;
        }
    out.settle(in.exact && op.kind == OpKind::MaxPool, in.digits, 0);
    return out;
  }

  Tensor mean(const Op& op) const {
    const Tensor& in = input(op);
    Tensor out(op.shape);
    const int64_t pixels = int64_t{in.shape.height} * in.shape.width;
    for (int c = 0; c < in.shape.channels; c++)
      for (int64_t i = 0; i < pixels; i++) out.x[c] += in.x[c * pixels + i] / static_cast<double>(pixels);
    out.exact = in.exact && pixels == 1;
    out.digits = in.digits;
    return out;
  }

  Tensor mean_abs(const Op& op) const {
    const Tensor& in = input(op);
    Tensor out(op.shape);
    out.exact = false;
    if (op.over_sample) {
      for (double v : in.x) out.x[0] += std::fabs(v) / static_cast<double>(in.x.size());
      return out;
    }
    const int run = in.shape.channels / op.groups;
    for (int c = 0; c < in.shape.channels; c++)
      for (int y = 0; y < in.shape.height; y++)
        for (int x = 0; x < in.shape.width; x++) out.at(c / run, y, x) += std::fabs(in.at(c, y, x)) / run;
    return out;
  }

  Tensor concat(const Op& op) const {
    Tensor out;
    out.shape = op.shape;
    for (int v : op.inputs) {
      const Tensor& in = values_[v];
      out.x.insert(out.x.end(), in.x.begin(), in.x.end());
      out.exact &= in.exact;
      out.digits = std::max(out.digits, in.digits);
    }
    return out;
  }

  Tensor slice(const Op& op) const {
    const Tensor& in = input(op);
    Tensor out(op.shape);
    for (int c = 0; c < op.shape.channels; c++)
      for (int y = 0; y < op.shape.height; y++)
        for (int x = 0; x < op.shape.width; x++)
          out.at(c, y, x) = in.at(op.start[0] + c * op.step[0], op.start[1] + y * op.step[1], op.start[2] + x * op.step[2]);
    out.exact = in.exact, out.digits = in.digits;
    return out;
  }

  Tensor pad(const Op& op) const {
    const Tensor& in = input(op);
    Tensor out(op.shape);
    for (int c = 0; c < in.shape.channels; c++)
      for (int y = 0; y < in.shape.height; y++)
        for (int x = 0; x < in.shape.width; x++) out.at(c + op.before[0], y + op.before[1], x + op.before[2]) = in.at(c, y, x);
    out.exact = in.exact, out.digits = in.digits;
    return out;
  }

  Tensor flatten(const Op& op) const {
    Tensor out = input(op);
    out.shape = op.shape;
    return out;
  }

  Tensor softmax(const Op& op) const {
    const Tensor& in = input(op);
    Tensor out(op.shape);
    out.exact = false;
    for (int y = 0; y < op.shape.height; y++)
      for (int x = 0; x < op.shape.width; x++) {
        double max = -1e300, sum = 0;
        for (int c = 0; c < op.shape.channels; c++) max = std::max(max, in.at(c, y, x));
        for (int c = 0; c < op.shape.channels; c++) sum += std::exp(in.at(c, y, x) - max);
        for (int c = 0; c < op.shape.channels; c++) {
          const double share = in.at(c, y, x) - max - std::log(sum);
          out.at(c, y, x) = op.kind == OpKind::LogSoftmax ? share : std::exp(share);
        }
      }
    return out;
  }

  static double activation_of(Activation function, double x) {
    switch (function) {
      case Activation::Sigmoid: return 1 / (1 + std::exp(-x));
      case Activation::Tanh: return std::tanh(x);
      case Activation::Silu: return x / (1 + std::exp(-x));
      case Activation::Gelu: return x * std::erfc(-x * std::sqrt(0.5)) / 2;
      case Activation::GeluTanh: return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      case Activation::Elu: return x > 0 ? x : std::expm1(x);
      case Activation::Mish: return x * std::tanh(std::log1p(std::exp(x)));
    }
    return 0;
  }

  Tensor activation(const Op& op) const {
    Tensor out = input(op);
    out.exact = false;
    for (double& v : out.x) v = v > 500 && op.activation == Activation::Mish ? v : activation_of(op.activation, v);
    return out;
  }

  Tensor normalize(const Op& op) const {
    Tensor out = input(op);
    out.exact = false;
    const size_t size = out.x.size() / op.groups;
    for (int g = 0; g < op.groups; g++) {
      double* x = &out.x[g * size];
      double mean = 0, variance = 0;
      for (size_t i = 0; i < size; i++) mean += x[i] / static_cast<double>(size);
      for (size_t i = 0; i < size; i++) variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(size);
      for (size_t i = 0; i < size; i++) x[i] = (x[i] - mean) / std::sqrt(variance + op.epsilon);
    }
    return out;
  }

  static double position(int i, int in, int out, bool align_corners) {
    if (align_corners) return out > 1 ? i * (in - 1.0) / (out - 1) : 0;
    return std::min(std::max((i + 0.5) * in / out - 0.5, 0.0), in - 1.0);
  }

  Tensor resize(const Op& op) const {
    const Tensor& in = input(op);
    Tensor out(op.shape);
    out.exact = false;
    for (int c = 0; c < op.shape.channels; c++)
      for (int y = 0; y < op.shape.height; y++)
        for (int x = 0; x < op.shape.width; x++) {
          const double row = position(y, in.shape.height, op.shape.height, op.align_corners);
          const double column = position(x, in.shape.width, op.shape.width, op.align_corners);
          for (int v = 0; v < in.shape.height; v++)
            for (int w = 0; w < in.shape.width; w++)
              out.at(c, y, x) +=
                  std::max(0.0, 1 - std::fabs(v - row)) * std::max(0.0, 1 - std::fabs(w - column)) * in.at(c, v, w);
        }
    return out;
  }

  // The source of an output element.
  Tensor moved(const Op& op) const {
    const Tensor& in = input(op);
    Tensor out(op.shape);
    const int run = in.shape.channels / op.groups;
    for (int c = 0; c < op.shape.channels; c++)
      for (int y = 0; y < op.shape.height; y++)
        for (int x = 0; x < op.shape.width; x++) {
          int from = c;
          if (op.kind == OpKind::PixelShuffle) from = (c * op.factor.h + y % op.factor.h) * op.factor.w + x % op.factor.w;
          if (op.kind == OpKind::ChannelShuffle) from = c % op.groups * run + c / op.groups;
          out.at(c, y, x) = in.at(from, y / op.factor.h, x / op.factor.w);
        }
    out.exact = in.exact, out.digits = in.digits;
    return out;
  }

  const Graph& graph_;
  std::vector<Tensor> values_;
};

// ------------------------------------------------------------------------------------------------------------ random graphs

class Builder {
 public:
  Builder(Random& random, Shape input) : r(random) { graph.input = input; }

  int last() const { return static_cast<int>(graph.ops.size()); }
  const Shape& shape(int v) const { return graph.shape(v); }

  int add(Op op) {
    op.name = "op" + std::to_string(graph.ops.size());
    graph.ops.push_back(std::move(op));
    return last();
  }

  int quantize(int x, bool unit_allowed = false) {
    Op op;
    op.kind = OpKind::Quantize;
    op.inputs = {x};
    op.shape = shape(x);
    if (unit_allowed && r.chance(30)) {
      int over_sample = mean_abs(x, true);
      op.inputs.push_back(over_sample);
    }
    Quantizer& q = op.quantizer;
    const int kind = r.in(0, 5);
    int steps = 1;
    if (kind <= 1) {
      q.scales = {2}, q.offset = -1;  // +-1
    } else if (kind == 2) {
      q.scales = {1}, q.offset = 0;  // 0 and 1
    } else if (kind == 3) {
      q.levels = true, steps = 2, q.scales = {1, 2}, q.offset = -1;  // ternary
    } else if (kind == 4) {
      q.levels = true, steps = r.in(1, 9);
      int planes = steps < 2 ? 1 : steps < 4 ? 2 : steps < 8 ? 3 : 4;
      for (int p = 0; p < planes; p++) q.scales.push_back(0.5f * static_cast<float>(1 << p));
      q.offset = r.chance(50) ? 0.f : -0.75f;
    } else {
      steps = r.in(1, 3);
      for (int s = 0; s < steps; s++) q.scales.push_back(r.chance(50) ? r.quarter(2) : 0.3125f + static_cast<float>(s));
      q.offset = r.chance(50) ? 0.f : r.quarter(1);
      if (r.chance(30)) q.scales[0] = 0.70001f;  // not a multiple of a unit
    }
    q.per_channel = r.chance(50);
    for (int s = 0; s < steps; s++) {
      q.strict.push_back(r.chance(50));
      for (int c = 0; c < (q.per_channel ? op.shape.channels : 1); c++)
        q.thresholds.push_back(kind <= 1 && r.chance(50) ? 0.f : r.quarter(3));
    }
    return add(op);
  }

  int to_bytes(int x) {
    Op op;
    op.kind = OpKind::ToBytes;
    op.inputs = {x};
    op.shape = shape(x);
    auto count = [&] { return r.chance(50) ? op.shape.channels : 1; };
    op.range.scale.resize(count()), op.range.shift.resize(count()), op.range.zero.resize(count());
    for (float& v : op.range.scale) v = static_cast<float>(r.pick({1, 2, 8, 32}));
    for (float& v : op.range.shift) v = static_cast<float>(r.in(-20, 520)) / 2;
    for (uint8_t& v : op.range.zero) v = static_cast<uint8_t>(r.pick({0, 128, 255, r.in(0, 255)}));
    return add(op);
  }

  int mean_abs(int x, bool over_sample) {
    Op op;
    op.kind = OpKind::MeanAbs;
    op.inputs = {x};
    op.over_sample = over_sample;
    op.groups = over_sample ? 1 : divisor(shape(x).channels);
    op.shape = over_sample ? Shape{1, 1, 1} : Shape{op.groups, shape(x).height, shape(x).width};
    return add(op);
  }

  int divisor(int n) {
    for (;;) {
      int d = r.in(1, std::min(n, 8));
      if (n % d == 0) return d;
    }
  }

  struct ConvOptions {
    int filters = 8;
    Pair kernel{3, 3}, stride{1, 1}, dilation{1, 1};
    int top = 1, left = 1, bottom = 1, right = 1, groups = 1, bases = 1;
    bool weight_offset = false;
  };

  ConvOptions random_conv(int x, int most_filters) {
    ConvOptions o;
    const Shape s = shape(x);
    o.groups = r.chance(25) ? divisor(s.channels) : 1;
    if (r.chance(5)) o.groups = s.channels;
    o.filters = o.groups * std::max(1, r.pick({1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 49, 63, 64, 65, 100}) /
                                           (o.groups > 1 ? o.groups : 1));
    o.filters = std::min(o.filters, std::max(o.groups, most_filters / o.groups * o.groups));
    const int few = r.pick({2, 4});
    if (s.channels % few == 0 && s.channels > few && r.chance(15)) o.groups = s.channels / few, o.filters = s.channels;
    const int groups = r.in(2, 4);
    if (s.channels % (8 * groups) == 0 && r.chance(30)) o.groups = groups, o.filters = groups * r.pick({8, 16, 24, 40});
    const int kernel = r.pick({1, 1, 2, 3, 3, 3, 3, 4, 5, 7});
    o.kernel = {kernel, r.chance(80) ? kernel : r.in(1, 5)};
    o.stride = {r.pick({1, 1, 1, 2, 2, 3, 5}), 1};
    o.stride.w = r.chance(80) ? o.stride.h : r.in(1, 3);
    o.dilation = r.chance(80) ? Pair{1, 1} : Pair{r.in(1, 3), r.in(1, 3)};
    if (r.chance(60)) {
      o.top = o.bottom = o.kernel.h / 2;
      o.left = o.right = o.kernel.w / 2;
    } else {
      const int most = r.chance(10) ? 40 : 3;
      o.top = r.in(0, most), o.left = r.in(0, most), o.bottom = r.in(0, most), o.right = r.in(0, most);
    }
    while (out_size(s.height, o.kernel.h, o.stride.h, o.dilation.h, o.top + o.bottom) < 1) o.bottom++;
    while (out_size(s.width, o.kernel.w, o.stride.w, o.dilation.w, o.left + o.right) < 1) o.right++;
    o.bases = r.chance(70) ? 1 : r.in(2, 3);
    o.weight_offset = r.chance(15);
    return o;
  }

  static int out_size(int size, int kernel, int stride, int dilation, int padding) {
    const int room = size + padding - (kernel - 1) * dilation - 1;
    return room < 0 ? 0 : room / stride + 1;
  }

  Op conv_op(int x, const ConvOptions& o, bool binary) {
    Op op;
    op.kind = OpKind::Conv;
    op.inputs = {x};
    Convolution& c = op.conv;
    const Shape s = shape(x);
    c.filters = o.filters, c.channels = s.channels / o.groups, c.groups = o.groups;
    c.kernel = o.kernel, c.stride = o.stride, c.dilation = o.dilation;
    c.top = o.top, c.left = o.left, c.bottom = o.bottom, c.right = o.right;
    op.shape = {o.filters, out_size(s.height, o.kernel.h, o.stride.h, o.dilation.h, o.top + o.bottom),
                out_size(s.width, o.kernel.w, o.stride.w, o.dilation.w, o.left + o.right)};
    const int64_t count = int64_t{o.filters} * c.channels * o.kernel.h * o.kernel.w;
    if (graph.is_bytes(x)) {
      c.int8 = true;
      for (int64_t i = 0; i < count; i++)
        c.bytes.push_back(static_cast<int8_t>(r.chance(10) ? r.pick({-127, 127}) : r.in(-127, 127)));
      for (int i = 0; i < o.filters; i++) c.scales.push_back(r.power() / 1024);
      return op;
    }
    if (!binary) {
      for (int64_t i = 0; i < count; i++) c.weight.push_back(r.quarter(1));
      return op;
    }
    c.bases = o.bases;
    c.bits.assign((count * o.bases + 7) / 8, 0);
    for (int64_t i = 0; i < count * o.bases; i++)
      if (r.chance(50)) c.bits[i / 8] = static_cast<uint8_t>(c.bits[i / 8] | 1 << (i % 8));
    for (int i = 0; i < o.bases * o.filters; i++) c.scales.push_back(r.power());
    if (o.weight_offset) c.offset.resize(r.chance(50) ? 1 : o.filters);
    for (float& v : c.offset) v = r.quarter(1);
    return op;
  }

  std::vector<float> vector(int channels, bool powers) {
    std::vector<float> v(r.chance(70) ? channels : 1);
    for (float& x : v) x = powers ? r.power() : r.quarter(2);
    return v;
  }

  // A float value of this shape among those made so far, or -1.
  int find(const Shape& wanted) {
    for (int tries = 0; tries < 10; tries++) {
      int v = r.in(0, last());
      if (graph.is_float(v) && shape(v) == wanted) return v;
    }
    return -1;
  }

  void random_steps(Op& op, int most) {
    const int channels = op.shape.channels;
    for (int n = r.in(0, most); n > 0; n--) {
      Step s;
      switch (r.in(0, 4)) {
        case 0:
          s.kind = StepKind::Affine;
          if (r.chance(80)) s.scale = vector(channels, true);
          if (s.scale.empty() || r.chance(80)) s.shift = vector(channels, false);
          break;
        case 1:
          s.kind = StepKind::Prelu;
          s.slope = vector(channels, true);
          break;
        case 2:
          s.kind = StepKind::Clamp;
          s.low = r.chance(70) ? -2.f : -std::numeric_limits<float>::infinity();
          s.high = r.chance(70) ? 2.f : std::numeric_limits<float>::infinity();
          break;
        case 3:
          s.kind = StepKind::Add;
          s.value = find(op.shape);
          if (s.value < 0) continue;
          break;
        default:
          s.kind = StepKind::Mul;
          s.value = find({divisor(channels), op.shape.height, op.shape.width});
          if (s.value < 0 || r.chance(30)) s.value = find({channels, 1, 1});
          if (s.value < 0) continue;
          break;
      }
      op.steps.push_back(s);
    }
  }

  int any_float() {
    for (;;) {
      int v = r.chance(60) ? last() : r.in(0, last());
      if (graph.is_float(v)) return v;
      v = r.in(0, last());
      if (graph.is_float(v)) return v;
    }
  }

  void max_pool(int x, int kernel, int stride) {
    Op op;
    op.kind = OpKind::MaxPool;
    op.inputs = {x};
    op.pool.kernel = {kernel, kernel}, op.pool.stride = {stride, stride}, op.pool.padding = {kernel / 2, kernel / 2};
    const Shape s = shape(x);
    op.shape = {s.channels, pool_size(s.height, kernel, stride, kernel / 2, false),
                pool_size(s.width, kernel, stride, kernel / 2, false)};
    add(op);
  }

  void random_pool(int x) {
    Op op;
    op.kind = r.chance(50) ? OpKind::MaxPool : OpKind::AvgPool;
    op.inputs = {x};
    const Shape s = shape(x);
    op.pool.kernel = {r.in(1, std::min(4, s.height)), r.in(1, std::min(4, s.width))};
    op.pool.stride = {r.in(1, 4), r.in(1, 4)};
    op.pool.padding = {r.in(0, op.pool.kernel.h / 2), r.in(0, op.pool.kernel.w / 2)};
    op.pool.count_padding = r.chance(50);
    const bool ceil = r.chance(50);
    op.shape = {s.channels, pool_size(s.height, op.pool.kernel.h, op.pool.stride.h, op.pool.padding.h, ceil),
                pool_size(s.width, op.pool.kernel.w, op.pool.stride.w, op.pool.padding.w, ceil)};
    add(op);
  }

  static int pool_size(int size, int kernel, int stride, int padding, bool ceil) {
    int out = (size + 2 * padding - kernel + (ceil ? stride - 1 : 0)) / stride + 1;
    if (ceil && (out - 1) * stride >= size + padding) out--;
    return out;
  }

  void random_smooth(int x) {
    Op op;
    op.inputs = {x};
    op.shape = shape(x);
    static constexpr OpKind kKinds[] = {OpKind::LogSoftmax, OpKind::Activation,   OpKind::Activation,     OpKind::Normalize,
                                        OpKind::Upsample,   OpKind::PixelShuffle, OpKind::ChannelShuffle, OpKind::Resize};
    op.kind = kKinds[r.in(0, 7)];
    op.activation = static_cast<Activation>(r.in(0, 6));
    op.epsilon = 0.1f;
    if (op.kind == OpKind::Normalize || op.kind == OpKind::ChannelShuffle) op.groups = divisor(op.shape.channels);
    if (op.kind == OpKind::Upsample) op.factor = {r.in(1, 3), r.in(1, 3)};
    if (op.kind == OpKind::PixelShuffle) {
      op.factor = {divisor(op.shape.channels), 1};
      if (op.factor.h > 4) op.factor.h = 1;
      op.factor.w = divisor(op.shape.channels / op.factor.h);
      if (op.factor.w > 4) op.factor.w = 1;
      op.shape.channels /= op.factor.h * op.factor.w;
    }
    op.shape.height *= op.factor.h, op.shape.width *= op.factor.w;
    if (op.kind == OpKind::Resize) {
      op.shape.height = r.in(1, 2 * op.shape.height), op.shape.width = r.in(1, 2 * op.shape.width);
      op.align_corners = r.chance(50);
    }
    add(op);
  }

  void random_rest(int x) {
    Op op;
    op.inputs = {x};
    const Shape s = shape(x);
    switch (r.in(0, 9)) {
      case 0:
        op.kind = OpKind::Mean;
        op.shape = {s.channels, 1, 1};
        break;
      case 1: mean_abs(x, r.chance(30)); return;
      case 2: {
        op.kind = OpKind::Concat;
        int channels = s.channels;
        for (int n = r.in(0, 2); n > 0; n--) {
          int other = any_float();
          if (shape(other).height != s.height || shape(other).width != s.width) continue;
          op.inputs.push_back(other);
          channels += shape(other).channels;
        }
        op.shape = {channels, s.height, s.width};
        break;
      }
      case 3: {
        op.kind = OpKind::Slice;
        const int sizes[3] = {s.channels, s.height, s.width};
        int out[3];
        for (int i = 0; i < 3; i++) {
          op.start[i] = r.in(0, sizes[i] - 1);
          const int stop = r.in(op.start[i] + 1, sizes[i]);
          op.step[i] = r.in(1, 3);
          out[i] = (stop - op.start[i] + op.step[i] - 1) / op.step[i];
        }
        op.shape = {out[0], out[1], out[2]};
        break;
      }
      case 4:
        op.kind = OpKind::Pad;
        for (int& b : op.before) b = r.in(0, 2);
        op.shape = {s.channels + op.before[0] + r.in(0, 2), s.height + op.before[1] + r.in(0, 2),
                    s.width + op.before[2] + r.in(0, 2)};
        break;
      case 5:
        op.kind = OpKind::Flatten;
        op.shape = {static_cast<int>(s.size()), 1, 1};
        break;
      case 6:
        op.kind = OpKind::Softmax;
        op.shape = s;
        break;
      case 7:
      case 8: random_smooth(x); return;
      default:
        op.kind = OpKind::Map;
        op.shape = s;
        random_steps(op, 4);
        break;
    }
    add(op);
  }

  Graph graph;
  Random& r;
};

int random_channels(Random& r) {
  return r.pick({1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 63, 64, 65, 66, 96, 127, 128, 130});
}

int random_side(Random& r) { return r.pick({1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 14, 16, 17}); }

// A code and one convolution of it.
Graph binary_conv_graph(Random& r) {
  Builder b(r, {random_channels(r), random_side(r), random_side(r)});
  int code = b.quantize(0, true);
  Op op = b.conv_op(code, b.random_conv(code, 200), true);
  if (r.chance(50)) b.random_steps(op, 4);
  b.add(op);
  if (r.chance(30)) b.quantize(b.last());
  b.graph.outputs = {{"output", b.last()}};
  return std::move(b.graph);
}

Graph float_conv_graph(Random& r) {
  Builder b(r, {random_channels(r), random_side(r), random_side(r)});
  Op op = b.conv_op(0, b.random_conv(0, 100), r.chance(30));
  b.random_steps(op, 3);
  b.add(op);
  if (r.chance(40)) {
    int code = b.quantize(b.last());
    b.add(b.conv_op(code, b.random_conv(code, 40), true));
  }
  b.graph.outputs = {{"output", b.last()}};
  return std::move(b.graph);
}

// A convolution of whole numbers: of the input, or of a value with padded channels. Often a stem, and often with a pool.
Graph byte_conv_graph(Random& r) {
  Builder b(r, {r.chance(50) ? r.in(1, 4) : random_channels(r), random_side(r), r.chance(50) ? r.in(1, 40) : random_side(r)});
  if (r.chance(30)) b.max_pool(0, 1, 1);
  const int bytes = b.to_bytes(b.last());
  for (int users = r.chance(20) ? 2 : 1; users > 0; users--) {
    Builder::ConvOptions o = b.random_conv(bytes, 100);
    if (r.chance(40)) o.groups = 1;
    if (r.chance(30)) {
      o.kernel = {7, 7}, o.stride = {2, 2}, o.dilation = {1, 1}, o.groups = 1;
      o.top = o.left = o.bottom = o.right = r.in(3, 6);
    }
    Op op = b.conv_op(bytes, o, false);
    if (r.chance(60)) {  // BatchNorm with factors of both signs: the engine moves it after a max pool
      Step norm;
      norm.kind = StepKind::Affine;
      norm.scale = b.vector(o.filters, true), norm.shift = b.vector(o.filters, false);
      op.steps.push_back(norm);
    }
    b.random_steps(op, 2);
    b.add(op);
  }
  if (r.chance(30))
    b.max_pool(b.last(), 3, 2);
  else if (r.chance(30))
    b.random_pool(b.last());
  if (r.chance(30)) {
    int code = b.quantize(b.last());
    b.add(b.conv_op(code, b.random_conv(code, 20), true));
  }
  b.graph.outputs = {{"output", b.last()}};
  return std::move(b.graph);
}

Graph mixed_graph(Random& r) {
  Builder b(r, {r.in(1, 40), r.in(1, 12), r.in(1, 12)});
  for (int n = r.in(1, 10); n > 0; n--) {
    const int x = b.any_float(), kind = r.in(0, 9);
    if (b.shape(x).size() > 20000) continue;
    if (kind == 0) {
      const int bytes = b.to_bytes(x);
      Op op = b.conv_op(bytes, b.random_conv(bytes, 24), false);
      b.random_steps(op, 3);
      b.add(op);
    } else if (kind <= 3) {
      int code = b.quantize(x, true);
      for (int users = r.chance(20) ? 2 : 1; users > 0; users--) {
        Op op = b.conv_op(code, b.random_conv(code, 40), true);
        b.random_steps(op, 3);
        b.add(op);
      }
    } else if (kind == 4) {
      Op op = b.conv_op(x, b.random_conv(x, 24), r.chance(30));
      b.random_steps(op, 3);
      b.add(op);
    } else if (kind == 5) {
      b.random_pool(x);
    } else {
      b.random_rest(x);
    }
  }
  b.graph.outputs = {{"output", r.chance(80) ? b.last() : r.in(0, b.last())}};
  // Adds other outputs: any value of the graph, possibly the same again.
  if (r.chance(50))
    for (int more = r.in(1, 4); more > 0; more--) b.graph.outputs.push_back({"more", r.in(0, b.last())});
  for (Output& output : b.graph.outputs)
    if (b.graph.is_bytes(output.value)) output.value = b.last();  // which is a convolution, or a later value
  return std::move(b.graph);
}

// A float convolution and a pool, as at the start of many networks.
Graph pooled_graph(Random& r) {
  Builder b(r, {r.pick({1, 3, 3, 8, 13}), r.in(3, 20), r.in(3, 20)});
  Builder::ConvOptions o = b.random_conv(0, 70);
  o.groups = 1;
  o.filters = r.pick({5, 8, 16, 33, 64, 70});
  Op op = b.conv_op(0, o, false);
  if (r.chance(60)) {  // BatchNorm with factors of both signs: the engine moves it after a max pool
    Step norm;
    norm.kind = StepKind::Affine;
    for (int c = 0; c < o.filters; c++) norm.scale.push_back(r.power());
    norm.shift = b.vector(o.filters, false);
    op.steps.push_back(norm);
  }
  b.random_steps(op, 2);
  b.add(op);
  b.random_pool(b.last());
  if (b.graph.ops.back().kind == OpKind::MaxPool && r.chance(50)) {
    int code = b.quantize(b.last());
    if (r.chance(70)) b.add(b.conv_op(code, b.random_conv(code, 20), true));
  }
  b.graph.outputs = {{"output", b.last()}};
  return std::move(b.graph);
}

// 7 x 7 with stride 2 of value x: borders of any width.
Op stem_op(Builder& b, int x, int filters) {
  Random& r = b.r;
  Builder::ConvOptions o;
  o.filters = filters, o.kernel = {7, 7}, o.stride = {2, 2};
  o.top = r.in(0, 8), o.left = r.in(0, 8), o.bottom = r.in(0, 8), o.right = r.in(0, 8);
  if (r.chance(50)) o.top = o.left = o.bottom = o.right = 3;
  while (Builder::out_size(b.shape(x).height, 7, 2, 1, o.top + o.bottom) < 1) o.bottom++;
  while (Builder::out_size(b.shape(x).width, 7, 2, 1, o.left + o.right) < 1) o.right++;
  return b.conv_op(x, o, r.chance(10));
}

// One on an image, or on the value of another (which leaves its numbers in the scratch of the second), and possibly a pool.
Graph stem_graph(Random& r) {
  Builder b(r, {r.pick({1, 2, 3, 3, 3, 4, 5}), r.in(1, 40), r.in(1, 60)});
  if (r.chance(30)) b.add(stem_op(b, 0, r.in(1, 5)));
  Op op = stem_op(b, b.last(), r.pick({1, 8, 9, 16, 24, 33, 40, 56, 64, 70, 80}));
  b.random_steps(op, 2);
  b.add(op);
  if (r.chance(50)) b.random_pool(b.last());
  if (r.chance(30)) b.quantize(b.last());
  b.graph.outputs = {{"output", b.last()}};
  return std::move(b.graph);
}

// One filter per channel of value x, with windows that do not overlap or extend beyond both sides of the image.
Op depthwise_op(Builder& b, int x, bool binary) {
  Random& r = b.r;
  const Shape s = b.shape(x);
  Builder::ConvOptions o;
  o.filters = o.groups = s.channels;
  o.kernel = {r.in(1, 6), r.in(1, 6)}, o.stride = {r.in(1, 3), r.in(1, 3)};
  if (r.chance(50)) o.kernel = {3, 3}, o.stride = {1, 1};
  if (r.chance(10)) o.stride = {r.in(1, 9), r.in(1, 9)};
  if (r.chance(30)) o.dilation = {r.in(1, 3), r.in(1, 3)};
  const int most = r.pick({0, 1, 1, 3, 3, 12});
  o.top = r.in(0, most), o.left = r.in(0, most), o.bottom = r.in(0, most), o.right = r.in(0, most);
  while (Builder::out_size(s.height, o.kernel.h, o.stride.h, o.dilation.h, o.top + o.bottom) < 1) o.bottom++;
  while (Builder::out_size(s.width, o.kernel.w, o.stride.w, o.dilation.w, o.left + o.right) < 1) o.right++;
  return b.conv_op(x, o, binary);
}

// One or two depthwise convolutions, of floats or of a code. The second reads a value with padded channels.
Graph depthwise_graph(Random& r) {
  Builder b(r, {r.chance(80) ? r.in(1, 40) : random_channels(r), random_side(r), r.chance(50) ? r.in(1, 30) : random_side(r)});
  if (r.chance(50)) b.add(depthwise_op(b, 0, r.chance(20)));
  const bool of_code = r.chance(40);
  if (of_code) b.quantize(b.last());
  Op op = depthwise_op(b, b.last(), of_code || r.chance(20));
  if (r.chance(30)) {
    Step norm;
    norm.kind = StepKind::Affine;
    norm.scale = b.vector(op.shape.channels, true), norm.shift = b.vector(op.shape.channels, false);
    op.steps.push_back(norm);
  }
  b.random_steps(op, 3);
  b.add(op);
  if (r.chance(30)) b.random_pool(b.last());
  if (r.chance(40)) {
    int code = b.quantize(b.last());
    if (r.chance(70)) b.add(b.conv_op(code, b.random_conv(code, 20), true));
  }
  b.graph.outputs = {{"output", b.last()}};
  return std::move(b.graph);
}

// A small residual network with the important fusions.
Graph residual_graph(Random& r) {
  const int channels = r.pick({8, 16, 32, 64, 72});
  Builder b(r, {channels, r.in(2, 14), r.in(2, 14)});
  int x = 0;
  for (int n = r.in(1, 3); n > 0; n--) {
    int code = b.quantize(x);
    Builder::ConvOptions o;
    o.filters = channels;
    Op op = b.conv_op(code, o, true);
    Step scale;
    scale.kind = StepKind::Affine;
    scale.scale = {0.25f}, scale.shift = b.vector(channels, false);
    op.steps.push_back(scale);
    int sum = b.add(op);
    Op map;
    map.kind = OpKind::Map;
    map.inputs = {sum};
    map.shape = b.shape(sum);
    Step residual;
    residual.kind = StepKind::Add;
    residual.value = x;
    Step prelu;
    prelu.kind = StepKind::Prelu;
    prelu.slope = b.vector(channels, true);
    map.steps = {residual, prelu};
    x = b.add(map);
  }
  b.graph.outputs = {{"output", x}};
  return std::move(b.graph);
}

// -------------------------------------------------------------------------------------------------------------------- checks

std::vector<std::string> all_sets() {
  std::vector<std::string> sets = instruction_sets();
  if (std::find(sets.begin(), sets.end(), "avx2") != sets.end()) sets.push_back("avx2-intrinsics");
  if (std::find(sets.begin(), sets.end(), "neon") != sets.end()) sets.push_back("neon-base");
  sets.push_back("portable-look-up");
  sets.push_back("portable-popcount");
  return sets;
}

std::string describe(const Graph& g) {
  auto text = [](const Shape& s) {
    return std::to_string(s.channels) + "x" + std::to_string(s.height) + "x" + std::to_string(s.width);
  };
  std::string d = "input " + text(g.input) + "\n";
  for (size_t i = 0; i < g.ops.size(); i++) {
    const Op& op = g.ops[i];
    d += "  " + std::to_string(i + 1) + ": " + std::string(kOpNames[static_cast<size_t>(op.kind)]) + " of";
    for (int v : op.inputs) d += " " + std::to_string(v);
    d += " -> " + text(op.shape) + ", " + std::to_string(op.steps.size()) + " steps";
    if (op.kind == OpKind::Conv) {
      const Convolution& c = op.conv;
      char more[200];
      std::snprintf(more, sizeof more, " kernel %dx%d stride %d,%d dilation %d,%d padding %d,%d,%d,%d groups %d bases %d%s",
                    c.kernel.h, c.kernel.w, c.stride.h, c.stride.w, c.dilation.h, c.dilation.w, c.top, c.left, c.bottom, c.right,
                    c.groups, c.bases, c.offset.empty() ? "" : " offset");
      d += more;
    }
    if (op.kind == OpKind::Quantize)
      d += " " + std::to_string(op.quantizer.steps()) + (op.quantizer.levels ? " levels" : " planes") + " offset " +
           std::to_string(op.quantizer.offset);
    d += "\n";
  }
  for (const Output& output : g.outputs) d += "  output " + std::to_string(output.value) + "\n";
  return d;
}

bool close(double expected, float got, bool exact, double scale) {
  if (exact) return expected == got;
  return std::fabs(expected - got) <= 1e-4 * (scale + 1e-3);
}

struct Totals {
  int run = 0, dropped = 0, exact = 0;
};

int64_t output_size(const Graph& graph) {
  int64_t size = 0;
  for (size_t o = 0; o < graph.outputs.size(); o++) size += graph.output_shape(o).size();
  return size;
}

// A graph of one float convolution, computed by a chain of multiply-adds in single precision. The border is zeros.
std::vector<float> plain_conv(const Graph& graph, const std::vector<float>& input) {
  const Convolution& c = graph.ops[0].conv;
  const Shape in = graph.input, out = graph.ops[0].shape;
  const int taps = c.kernel.h * c.kernel.w;
  std::vector<float> sums;
  for (int o = 0; o < out.channels; o++)
    for (int y = 0; y < out.height; y++)
      for (int x = 0; x < out.width; x++) {
        float sum = 0;
        for (int t = 0; t < taps; t++)
          for (int i = 0; i < c.channels; i++) {
            const int64_t channel = o / (c.filters / c.groups) * c.channels + i;
            const int row = y * c.stride.h - c.top + t / c.kernel.w * c.dilation.h;
            const int column = x * c.stride.w - c.left + t % c.kernel.w * c.dilation.w;
            const bool inside = row >= 0 && column >= 0 && row < in.height && column < in.width;
            const float value = inside ? input[(channel * in.height + row) * in.width + column] : 0;
            sum = std::fma(value, c.weight[(int64_t{o} * c.channels + i) * taps + t], sum);
          }
        sums.push_back(sum);
      }
  return sums;
}

// Whether the memory of loading and running stays below the bounds computed before.
bool within_needs(const Graph& graph, const std::string& isa, int threads) {
  const Needs needs = Engine::needs(graph, isa, threads);
  Graph moved = graph;
  std::unique_ptr<Engine> engine;
  const int64_t loading = allocations::peak_of([&] { engine = Engine::create(std::move(moved), isa, threads); });
  const int64_t running = static_cast<int64_t>(engine->workspace_bytes());
  if (loading <= needs.load_memory.value() && running <= needs.run_memory.value()) return true;
  std::printf("%s with %d threads: loading takes %lld bytes (bound %lld), running %lld (bound %lld)\n%s", isa.c_str(), threads,
              static_cast<long long>(loading), static_cast<long long>(needs.load_memory.value()), static_cast<long long>(running),
              static_cast<long long>(needs.run_memory.value()), describe(graph).c_str());
  return false;
}

// The outputs of a graph on all instruction sets, with one and three threads and both layouts of memory, concatenated. Empty if
// they differ.
std::vector<float> run_all(const Graph& graph, const std::vector<float>& input, int batch, Random& r) {
  static ThreadPool pool(3);
  std::vector<float> first;
  for (const std::string& isa : all_sets())
    for (int threads : {1, 3}) {
      if (!within_needs(graph, isa, threads)) return {};
      std::unique_ptr<Engine> engine = Engine::create(graph, isa, threads);
      auto workspace = engine->workspace(threads > 1 ? Layout::Separate : Layout::Shared);
      std::vector<float> output(output_size(graph) * batch, -77.f);
      std::vector<float*> places = {output.data()};
      for (size_t o = 0; o + 1 < graph.outputs.size(); o++) places.push_back(places[o] + graph.output_shape(o).size() * batch);
      std::vector<double> seconds(graph.ops.size(), 0.0);
      engine->run(input.data(), places.data(), batch, *workspace, threads > 1 ? &pool : nullptr,
                  r.chance(30) ? seconds.data() : nullptr);
      if (first.empty()) first = output;
      if (std::memcmp(first.data(), output.data(), output.size() * sizeof(float)) != 0) {
        std::printf("%s with %d threads gives other bits\n%s", isa.c_str(), threads, describe(graph).c_str());
        return {};
      }
    }
  return first;
}

bool check(const Graph& graph, Random& r, Totals& totals) {
  const int batch = r.chance(60) ? 1 : r.in(2, 9);
  const int64_t in_size = graph.input.size();
  if (in_size * batch > 2000000 || output_size(graph) * batch > 2000000) return totals.dropped++, true;
  std::vector<float> input(in_size * batch);
  for (float& x : input) x = r.quarter(4);

  std::vector<Reference> expected;
  try {
    for (int i = 0; i < batch; i++) expected.emplace_back(graph, &input[i * in_size]);
  } catch (const TooClose&) {
    return totals.dropped++, true;
  }
  totals.run++;
  totals.exact += expected[0].output().exact;

  const std::vector<float> output = run_all(graph, input, batch, r);
  if (output.empty()) return false;
  const float* got = output.data();
  for (size_t o = 0; o < graph.outputs.size(); o++)
    for (int i = 0; i < batch; i++, got += graph.output_shape(o).size()) {
      const Tensor& right = expected[i].output(o);
      const double scale = right.largest();
      for (size_t k = 0; k < right.x.size(); k++)
        if (!close(right.x[k], got[k], right.exact, scale)) {
          std::printf("output %zu, sample %d, element %zu is %.9g, not %.9g\n%s", o, i, k, got[k], right.x[k],
                      describe(graph).c_str());
          return false;
        }
    }
  return true;
}

// Sums of the numbers above are exact in any order. Here they are not: all sets must still give the same bits, with errors about
// as small as those of a plain chain of multiply-adds.
bool check_rounding() {
  const int shapes[][6] = {{3, 64, 37, 51, 7, 2}, {3, 24, 64, 64, 7, 2}, {1, 16, 30, 29, 7, 2},
                           {4, 40, 21, 90, 7, 2}, {3, 16, 20, 21, 3, 1}, {24, 40, 9, 10, 1, 1}};
  Random r(9);
  for (const auto& s : shapes) {
    Builder b(r, {s[0], s[2], s[3]});
    Builder::ConvOptions o;
    o.filters = s[1], o.kernel = {s[4], s[4]}, o.stride = {s[5], s[5]};
    o.top = o.left = o.bottom = o.right = s[4] / 2;
    b.add(b.conv_op(0, o, false));
    b.graph.outputs = {{"output", b.last()}};
    for (float& w : b.graph.ops[0].conv.weight) w = r.real();
    std::vector<float> input(b.graph.input.size());
    for (float& x : input) x = r.real();
    const std::vector<float> output = run_all(b.graph, input, 1, r);
    if (output.empty()) return false;
    const Tensor expected = Reference(b.graph, input.data()).output();
    const std::vector<float> plain = plain_conv(b.graph, input);
    double error = 0, plain_error = 0;
    for (size_t i = 0; i < output.size(); i++) {
      error += std::pow(output[i] - expected.x[i], 2);
      plain_error += std::pow(plain[i] - expected.x[i], 2);
    }
    if (std::sqrt(error) > 1.5 * std::sqrt(plain_error)) {
      std::printf("errors are %.2f times those of a plain sum\n%s", std::sqrt(error / plain_error), describe(b.graph).c_str());
      return false;
    }
    b.max_pool(b.last(), 3, 2);
    b.graph.outputs = {{"output", b.last()}};
    if (run_all(b.graph, input, 1, r).empty()) return false;
  }
  return true;
}

// Depthwise sums are computed in the order of the taps, so they have the bits of the plain chain. Tested with all digits, with
// products so small that a sum is -0 (a zero of the border makes it 0), and with infinite weights (a zero of the border gives
// NaN).
bool check_depthwise_bits() {
  for (int i = 0; i < 60; i++) {
    Random r(static_cast<uint64_t>(i) + 11);
    Builder b(r, {r.in(1, 40), random_side(r), r.in(1, 30)});
    Op op = depthwise_op(b, 0, false);
    Convolution& c = op.conv;
    c.bases = 0;
    c.bits.clear(), c.scales.clear(), c.offset.clear();
    c.weight.resize(static_cast<size_t>(c.filters) * c.kernel.h * c.kernel.w);
    const float unit = i % 3 == 1 ? 1e-30f : 1.f;
    for (float& w : c.weight) w = i % 3 == 2 && r.chance(5) ? std::numeric_limits<float>::infinity() : unit * r.real();
    b.add(op);
    b.graph.outputs = {{"output", b.last()}};
    std::vector<float> input(b.graph.input.size());
    for (float& x : input) x = unit * r.real();
    const std::vector<float> output = run_all(b.graph, input, 1, r), plain = plain_conv(b.graph, input);
    if (output.empty()) return false;
    if (std::memcmp(output.data(), plain.data(), plain.size() * sizeof(float)) != 0) {
      std::printf("not the bits of a plain sum, case %d\n%s", i, describe(b.graph).c_str());
      return false;
    }
  }
  return true;
}

// Thresholds of one channel: evenly spaced, as in a method that rounds, or nearly so; or in any order, with duplicates or out of
// reach.
std::vector<float> many_thresholds(Random& r, int steps, int kind) {
  const double gap = kind == 0 ? 1.0 / steps : std::pow(2.0, r.in(-20, 20)) * (1 + std::fabs(r.real()));
  const double first = kind == 0 ? 0.5 * gap : r.real() * gap * steps;
  std::vector<float> thresholds;
  for (int s = 0; s < steps; s++) {
    const double jitter = kind == 1 ? 0.0 : kind == 2 ? 0.3 * r.real() : 3.0 * r.real();
    thresholds.push_back(static_cast<float>(first + gap * (s + (kind == 0 ? 0.0 : jitter))));
  }
  const float inf = std::numeric_limits<float>::infinity(), odd[] = {inf, -inf, std::nanf(""), 0.f, -0.f, thresholds[0]};
  if (kind == 4) thresholds[r.in(0, steps - 1)] = odd[r.in(0, 5)];
  return thresholds;
}

// A graph whose output is the number of thresholds that each input reaches.
Graph levels_graph(Random& r, const Shape& shape, int steps, int kind) {
  Builder b(r, shape);
  Op op;
  op.kind = OpKind::Quantize;
  op.inputs = {0};
  op.shape = shape;
  Quantizer& q = op.quantizer;
  q.levels = true;
  for (int p = 0; steps >> p; p++) q.scales.push_back(static_cast<float>(1 << p));
  q.strict.assign(steps, r.chance(50));
  if (r.chance(20)) q.strict[r.in(0, steps - 1)] = r.chance(50);
  q.per_channel = r.chance(50);
  const int columns = q.per_channel ? shape.channels : 1;
  q.thresholds.resize(int64_t{steps} * columns);
  for (int c = 0; c < columns; c++) {
    const std::vector<float> own = many_thresholds(r, steps, kind);
    for (int s = 0; s < steps; s++) q.thresholds[int64_t{s} * columns + c] = own[s];
  }
  b.add(op);
  b.graph.outputs = {{"output", b.last()}};
  return std::move(b.graph);
}

// A threshold or a float near it, a number between two thresholds, an infinity or NaN.
float near_thresholds(Random& r, const Quantizer& q, int channel, int channels) {
  const float inf = std::numeric_limits<float>::infinity(), odd[] = {inf, -inf, std::nanf(""), 0.f, -0.f, 3e38f, -3e38f, 1e-45f};
  auto threshold = [&] {
    const int s = r.in(0, q.steps() - 1);
    return q.thresholds[q.per_channel ? int64_t{s} * channels + channel : s];
  };
  if (r.chance(10)) return odd[r.in(0, 7)];
  float x = threshold();
  if (r.chance(30)) return x + (threshold() - x) * r.real();
  const float end = r.chance(50) ? inf : -inf;
  for (int n = r.in(0, 3); n > 0; n--) x = std::nextafter(x, end);
  return x;
}

// The number of thresholds reached is exactly that of comparing with one after another.
bool check_levels() {
  for (int i = 0; i < 250; i++) {
    Random r(static_cast<uint64_t>(i) + 12);
    const int steps = r.chance(40) ? (1 << r.in(1, 8)) - 1 : r.in(1, 255);
    const Graph graph = levels_graph(r, {r.in(1, 40), r.in(1, 6), r.in(1, 20)}, steps, i % 5);
    const Quantizer& q = graph.ops[0].quantizer;
    const int channels = graph.input.channels, pixels = graph.input.height * graph.input.width;
    std::vector<float> input(graph.input.size()), expected;
    for (int k = 0; k < channels * pixels; k++) {
      const float x = input[k] = near_thresholds(r, q, k / pixels, channels);
      int reached = 0;
      for (int s = 0; s < steps; s++) {
        const float t = q.thresholds[q.per_channel ? int64_t{s} * channels + k / pixels : s];
        reached += q.strict[s] ? x > t : x >= t;
      }
      expected.push_back(static_cast<float>(reached));
    }
    const std::vector<float> output = run_all(graph, input, 1, r);
    if (output.empty()) return false;
    if (output != expected) {
      const size_t k = std::mismatch(output.begin(), output.end(), expected.begin()).first - output.begin();
      std::printf("%.9g reaches %g thresholds, not %g, case %d\n%s", input[k], expected[k], output[k], i,
                  describe(graph).c_str());
      return false;
    }
  }
  return true;
}

// Means of absolute values are within one float of the exact result and have the same bits everywhere.
bool check_mean_abs() {
  for (int i = 0; i < 200; i++) {
    Random r(static_cast<uint64_t>(i) + 13);
    Builder b(r, {r.in(1, 140), random_side(r), random_side(r)});
    if (r.chance(50)) b.max_pool(0, 1, 1);  // gives a value with padded channels
    b.mean_abs(b.last(), r.chance(50));
    b.graph.outputs = {{"output", b.last()}};
    std::vector<float> input(b.graph.input.size());
    for (float& x : input) x = r.real() * static_cast<float>(r.chance(20) ? 1000 : 1);
    const std::vector<float> output = run_all(b.graph, input, 1, r);
    if (output.empty()) return false;
    const Tensor expected = Reference(b.graph, input.data()).output();
    for (size_t k = 0; k < output.size(); k++)
      if (std::fabs(output[k] - expected.x[k]) > 1.2e-7 * expected.x[k]) {
        std::printf("the mean is %.9g, not %.9g\n%s", output[k], expected.x[k], describe(b.graph).c_str());
        return false;
      }
  }
  return true;
}

// A graph of one convolution of whole numbers: the exact sum, rounded to a float, times the scale. in: channels x height x width.
std::vector<float> whole_conv(const Graph& graph, const std::vector<int>& in) {
  const Convolution& c = graph.ops[1].conv;
  const Shape shape = graph.input, out = graph.ops[1].shape;
  const int taps = c.kernel.h * c.kernel.w;
  std::vector<float> sums;
  for (int o = 0; o < out.channels; o++)
    for (int y = 0; y < out.height; y++)
      for (int x = 0; x < out.width; x++) {
        int64_t sum = 0;
        for (int i = 0; i < c.channels * taps; i++) {
          const int64_t channel = o / (c.filters / c.groups) * c.channels + i / taps;
          const int row = y * c.stride.h - c.top + i % taps / c.kernel.w * c.dilation.h;
          const int column = x * c.stride.w - c.left + i % taps % c.kernel.w * c.dilation.w;
          if (row < 0 || column < 0 || row >= shape.height || column >= shape.width) continue;
          sum += in[(channel * shape.height + row) * shape.width + column] * c.bytes[int64_t{o} * c.channels * taps + i];
        }
        sums.push_back(static_cast<float>(sum) * c.scales[o]);
      }
  return sums;
}

// Pixels instead of floats give the same bits.
bool same_with_pixels(const Graph& graph, const std::vector<uint8_t>& pixels, const std::vector<float>& expected) {
  static ThreadPool pool(3);
  for (const std::string& isa : all_sets())
    for (int threads : {1, 3}) {
      std::unique_ptr<Engine> engine = Engine::create(graph, isa, threads);
      if (!engine->takes_pixels()) return std::printf("it takes no pixels\n"), false;
      std::vector<float> output(expected.size());
      float* place = output.data();
      engine->run_pixels(pixels.data(), &place, 1, *engine->workspace(), threads > 1 ? &pool : nullptr, nullptr);
      if (output != expected) return std::printf("%s: pixels give other results than floats\n", isa.c_str()), false;
    }
  return true;
}

// Whole numbers: every sum is exact, up to the largest that fit 32 bits.
bool check_bytes() {
  for (int i = 0; i < 150; i++) {
    Random r(static_cast<uint64_t>(i) + 14);
    const bool largest = i < 3;  // 65,536 weights per filter, as large as possible
    Builder b(r, largest ? Shape{16384, 2, 2} : Shape{r.chance(50) ? 3 : r.in(1, 40), random_side(r), r.in(1, 30)});
    const int channels = b.graph.input.channels;
    Op image;
    image.kind = OpKind::ToBytes;
    image.inputs = {0};
    image.shape = b.graph.input;
    for (int c = 0; c < channels; c++) {
      const float mean = std::fabs(r.real()), deviation = 0.1f + std::fabs(r.real());
      b.graph.mean.push_back(mean), b.graph.deviation.push_back(deviation);
      image.range.scale.push_back(255 * deviation), image.range.shift.push_back(255 * mean);
      image.range.zero.push_back(static_cast<uint8_t>(std::nearbyint(255 * mean)));
    }
    b.add(image);
    Builder::ConvOptions o = b.random_conv(1, 80);
    if (i % 3 == 2 && channels <= 4)
      o.kernel = {7, 7}, o.stride = {2, 2}, o.dilation = {1, 1}, o.groups = 1, o.bottom += 6, o.right += 6;
    if (largest) o = Builder::ConvOptions(), o.kernel = {2, 2}, o.top = o.left = o.bottom = o.right = 0;
    Op op = b.conv_op(1, o, false);
    for (float& s : op.conv.scales) s = r.real();
    if (largest) std::fill(op.conv.bytes.begin(), op.conv.bytes.end(), static_cast<int8_t>(i == 0 ? 127 : -127));
    b.add(op);
    b.graph.outputs = {{"output", 2}};
    std::vector<uint8_t> pixels(b.graph.input.size());
    std::vector<float> input;
    std::vector<int> whole;
    const int64_t plane = b.graph.input.size() / channels;
    for (size_t k = 0; k < pixels.size(); k++) {
      const int64_t c = static_cast<int64_t>(k) / plane;
      pixels[k] = static_cast<uint8_t>(largest ? (i == 1 ? 0 : 255) : r.in(0, 255));
      const float mean = static_cast<float>(b.graph.mean[c]), deviation = static_cast<float>(b.graph.deviation[c]);
      input.push_back((static_cast<float>(pixels[k]) / 255.f - mean) / deviation);
      whole.push_back(pixels[k] - image.range.zero[c]);
    }
    const std::vector<float> output = run_all(b.graph, input, 1, r), expected = whole_conv(b.graph, whole);
    if (output.empty()) return false;
    if (output != expected || (channels <= 16 && !same_with_pixels(b.graph, pixels, expected))) {
      const size_t k = std::mismatch(output.begin(), output.end(), expected.begin()).first - output.begin();
      std::printf("element %zu is not exact, case %d\n%s", k, i, describe(b.graph).c_str());
      return false;
    }
  }
  return true;
}

// The bounds of memory hold for graphs of many wide layers, too: in small graphs, what the process needs hides what is missing.
bool check_large_needs() {
  constexpr int kLayers = 100, kFilters = 10000;
  for (const bool pool : {false, true})
    for (int kind = 0; kind < 3; kind++) {
      Random r(15);
      Builder b(r, {1, 1, 2});
      const int in = kind == 0 ? 0 : kind == 1 ? b.to_bytes(0) : b.quantize(0);
      for (int i = 0; i < kLayers; i++) {
        Builder::ConvOptions o;
        o.filters = kFilters;
        o.kernel = {1, 1};
        o.top = o.left = o.bottom = o.right = 0;
        b.add(b.conv_op(in, o, b.graph.is_code(in)));
        if (pool) b.max_pool(b.last(), 3, 2);
        b.graph.outputs.push_back({"output " + std::to_string(i), b.last()});
      }
      for (const std::string& isa : all_sets())
        if (!within_needs(b.graph, isa, 1)) return false;
    }
  return true;
}

// All widths and heights of a stem's last tile with all remainders of its filters, of floats and of whole numbers.
bool check_stem_sizes(Totals& totals) {
  Random r(10);
  const int filters[] = {8, 16, 24, 40, 64, 72};
  for (int i = 2; i < 66; i++) {
    const int size = i / 2;
    const int width = size <= 30 ? 2 * size - size % 2 : 52 * size;  // the last two: nearly too wide, and too wide
    Builder b(r, {size <= 30 ? 3 : 4, 2 * (size * 7 % 11 + 1), width});
    Builder::ConvOptions o;
    o.filters = filters[size % 6];
    o.kernel = {7, 7}, o.stride = {2, 2};
    o.top = o.left = o.bottom = o.right = 3;
    Op op = b.conv_op(i % 2 ? b.to_bytes(0) : 0, o, false);
    Step norm;
    norm.kind = StepKind::Affine;
    norm.scale = b.vector(o.filters, true), norm.shift = b.vector(o.filters, false);
    op.steps.push_back(norm);
    b.add(op);
    if (size % 3) b.max_pool(b.last(), 3, 2);
    b.graph.outputs = {{"output", b.last()}};
    if (!check(b.graph, r, totals)) return false;
  }
  return true;
}

// Shapes of real networks, on all code paths.
bool check_real_shapes(Totals& totals) {
  const int shapes[][5] = {{64, 64, 12, 14, 1}, {64, 128, 12, 12, 2}, {128, 128, 7, 7, 1}, {256, 64, 7, 7, 1},
                           {16, 16, 16, 16, 1}, {16, 32, 16, 16, 2},  {32, 32, 8, 8, 1},   {16, 16, 9, 11, 1},
                           {32, 32, 5, 7, 1},   {512, 80, 7, 7, 1},   {1024, 48, 3, 3, 1}, {64, 64, 2, 1, 1}};
  Random r(7);
  for (const auto& s : shapes) {
    Builder b(r, {s[0], s[2], s[3]});
    int code = b.quantize(0);
    Builder::ConvOptions o;
    o.filters = s[1];
    o.stride = {s[4], s[4]};
    b.add(b.conv_op(code, o, true));
    b.graph.outputs = {{"output", b.last()}};
    if (!check(b.graph, r, totals)) return false;
  }
  return true;
}

// Sums that do not fit into 16 bits, and padding too large for a padded copy.
bool check_extremes(Totals& totals) {
  Random r(8);
  for (int kind = 0; kind < 5; kind++) {
    Builder b(r, kind == 0 ? Shape{7000, 3, 3} : Shape{5, 3, 2});
    int x = kind >= 2 ? 0 : b.quantize(0);
    Builder::ConvOptions o;
    o.filters = 3;
    if (kind == 4) o.filters = o.groups = 5;
    if (kind > 0) {
      o.top = o.bottom = 3000, o.left = o.right = 4000;
      o.stride = {2999, 3999};
      o.kernel = {2, 3};
    }
    b.add(b.conv_op(x, o, kind < 2));
    if (kind == 3) b.max_pool(b.last(), 2, 1);
    b.graph.outputs = {{"output", b.last()}};
    if (!check(b.graph, r, totals)) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 400, first = argc > 2 ? std::atoi(argv[2]) : 0;
  Totals totals;
  if (!check_real_shapes(totals) || !check_extremes(totals) || !check_rounding() || !check_depthwise_bits() || !check_levels() ||
      !check_mean_abs() || !check_stem_sizes(totals) || !check_bytes() || !check_large_needs())
    return 1;
  for (int i = first; i < first + cases; i++) {
    Random r(static_cast<uint64_t>(i) + 1000);
    const int kind = r.in(0, 10);
    const Graph graph = i % 8 == 7   ? stem_graph(r)
                        : i % 8 == 3 ? depthwise_graph(r)
                        : i % 8 == 5 ? byte_conv_graph(r)
                        : kind < 4   ? binary_conv_graph(r)
                        : kind < 6   ? float_conv_graph(r)
                        : kind < 7   ? pooled_graph(r)
                        : kind < 8   ? residual_graph(r)
                                     : mixed_graph(r);
    if (!check(graph, r, totals)) {
      std::printf("case %d\n", i);
      return 1;
    }
  }
  std::printf("%d graphs, %d of them exact; %d dropped. Sets:", totals.run, totals.exact, totals.dropped);
  for (const std::string& name : all_sets()) std::printf(" %s", name.c_str());
  std::printf("\n");
  return 0;
}
