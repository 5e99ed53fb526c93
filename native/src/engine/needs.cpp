// Upper bounds, kept simple: tests compare them with the memory and time that are really used.
// One file of more than 400 lines, because both follow from the same shapes.
//
// The unit of work is one small step of the slowest code for an op: about a nanosecond on one core of a CPU from 2020, or
// less. So the default limit of 10^10 units is about ten seconds per sample. Faster instruction sets and several threads take less
// time for the same work.
#include "needs.h"

#include <algorithm>

#include "../kernels/look_up.h"
#include "../kernels/popcount.h"
#include "../kernels/stem.h"
#include "../kernels/whole_stem.h"
#include "binary_conv.h"
#include "byte_weights.h"
#include "count_epilogue.h"
#include "depthwise_conv.h"
#include "float_conv.h"
#include "pooled_rows.h"
#include "stem_conv.h"

namespace unflip {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kGrowth = 3;              // a vector that grows has its old and its doubled memory at the same time
constexpr int64_t kPart = 64;               // alignment of the parts of a scratch
constexpr int64_t kProcessBytes = 4 << 20;  // code and tables that are touched for the first time, and what the kernel rounds
constexpr int64_t kThreadBytes = 32 << 10;  // stack and thread-local memory that a thread touches
constexpr int64_t kOpBytes = 4096, kStepBytes = 1024, kInputBytes = 512;  // objects and their small vectors

struct TaskNeeds {
  Size kept, temporary;          // memory of the packed op, and more while it is packed
  Size scratch, thread_scratch;  // as in Task
  Size load_work;
};

Size taps_of(const Convolution& c) { return Size(c.kernel.h) * c.kernel.w; }
Size pixels_of(const Shape& s) { return Size(s.height) * s.width; }

// Floats of an op's steps, which are in the graph, in the plan, and laid out for the kernels.
Size steps_bytes(const std::vector<Step>& steps, int channels) {
  Size vectors = 0;
  for (const Step& s : steps) vectors += s.kind == StepKind::Affine ? 2 : s.kind == StepKind::Clamp ? 0 : 1;
  return vectors * padded(channels) * kFloat;
}

Size quantizer_bytes(const Quantizer* q, int channels) {
  if (q == nullptr) return 0;
  const Size stride = padded(channels), columns = q->per_channel ? channels : 1;
  return (kGrowth * (Size(q->steps()) * stride + Size(q->steps()) * columns + 2 * columns) + 4 * stride) * kFloat;
}

// ---------------------------------------------------------------------------------------------------------- binary convolutions

struct CodeConv {
  const Convolution& conv;
  const Quantizer& quantizer;
  Window window;
  CodeLayout layout;
  int64_t stride, bases, planes, terms;
  Size taps, depth, pixels;

  CodeConv(const Op& op, const Quantizer& q, const ValueInfo& in)
      : conv(op.conv), quantizer(q), window(op.conv, in.shape, op.shape), layout(in.layout), stride(padded(op.conv.filters)),
        bases(op.conv.bases), planes(q.planes()), terms((bases + 1) * (planes + 1)), taps(taps_of(op.conv)),
        depth(taps * op.conv.channels), pixels(pixels_of(op.shape)) {}

  // BinarySums.
  TaskNeeds sums() const {
    TaskNeeds n;
    n.kept = Size(bases) * stride * 4 + kGrowth * (Size(terms) * stride * kFloat + Size(terms) * sizeof(SumTerm));
    const Size corners = Size(conv.kernel.h + 1) * (conv.kernel.w + 1) * bases * stride;
    if (quantizer.offset != 0) n.kept += corners * 4;
    n.temporary = taps * 4;
    n.load_work = Size(bases) * conv.filters * depth * 12 + corners;
    return n;
  }

  // CountEpilogue, with strips of `strip` pixels and `channels` channels.
  void add_epilogue(TaskNeeds& n, int64_t strip, int64_t channels) const {
    const int64_t classes = quantizer.offset != 0 ? border_classes(window) : 1;
    n.kept += pixels * 2 + Size(bases) * (classes + planes) * stride * kFloat + kGrowth * Size(terms) * 8;
    n.thread_scratch +=
        Size(terms) * sizeof(CountTerm) + Size(strip) * (channels + planes + 1) * kFloat + Size(layout.columns) * planes * 4;
    n.load_work += pixels + Size(bases) * (classes + planes) * stride;
  }

  TaskNeeds look_up(int threads) const {
    TaskNeeds n = sums();
    const int64_t nibbles = 2 * layout.pixel_bytes, group = conv.filters / conv.groups;
    // The filters of a group are blocks of 64 and at most two smaller ones.
    const Size blocks = parts(group, 64) + 1, row = parts(group, 64) * 64 + 32;
    const Size copied = parts((taps * nibbles).value() + 2, 3), paired = Size(conv.kernel.h) * (nibbles / conv.groups);
    const bool in_rows = pairs_rows(window, conv.groups);
    n.kept += Size(bases) * conv.groups * row * (in_rows ? paired : copied) * 3 + kGrowth * Size(conv.groups) * blocks * 64;
    // Of a part. There are at least as many jobs as threads.
    const Size below = Size(window.kernel.h) * window.dilation.h, grain = below / window.stride.h + 2;
    const Size pairs = parts(window.out.height, 2 * threads) + grain, rows = pairs * window.stride.h + below;
    const Size windows = parts(pixels.value(), 2 * threads) + 16;
    const Size numbers = in_rows ? rows * (Size(window.columns()) * nibbles + 32) + 32 : windows * (3 * copied + 32) + 32;
    n.thread_scratch = planes * numbers * sizeof(uint16_t) + 256;
    n.thread_scratch += 2 * (taps * layout.pixel_bytes + 16 + kPart) + Size(bases) * planes * 6144 * sizeof(uint16_t) + 2 * kPart;
    add_epilogue(n, 64, 64);
    return n;
  }

  TaskNeeds popcount() const {
    TaskNeeds n = sums();
    const int64_t group = conv.filters / conv.groups;
    const Size words = parts((taps * (layout.pixel_bytes / conv.groups)).value(), 4), step = words + 1;
    n.kept += Size(bases) * conv.groups * (parts(group, 32) * 32) * words * 4 + 64;
    n.kept += kGrowth * conv.groups * parts(group, 16) * 64;
    n.kept += kGrowth * words * 2;
    n.temporary += step * 4;
    const Size windows = 16 * step * 4 * planes + (32 << 10);
    const int64_t strip = 224 + 16;
    n.thread_scratch = windows + planes * (strip * 8 + 4 * kPart) + Size(bases) * planes * strip * 32 * 2 + kPart;
    add_epilogue(n, strip, 32);
    return n;
  }

  TaskNeeds counting() const {
    TaskNeeds n = sums();
    const Size words = parts(depth.value(), 64);
    n.kept += Size(bases) * conv.filters * words * 8;
    n.thread_scratch = planes * words * 8 + Size(bases) * (planes + 1) * stride * 4 + stride * 4 + 4 * kPart;
    return n;
  }

  TaskNeeds channel_count() const {
    TaskNeeds n = sums();
    const Size words = parts(conv.filters, 64);
    n.kept += depth * (Size(bases) * words * 8 + kGrowth * 4);
    n.thread_scratch = Size(bases) * planes * words * 64 + Size(bases + 1) * stride * 4 + 3 * kPart;
    return n;
  }
};

// ----------------------------------------------------------------------------------------------------------- float convolutions

class FloatConvNeeds {
 public:
  FloatConvNeeds(const Op& op, const ValueInfo& in, const Op* pool, bool stores_floats)
      : op_(op), conv_(op.conv), in_(in), window_(op.conv, in.shape, op.shape), depth_(taps_of(op.conv) * op.conv.channels),
        row_(Size(op.shape.width) * padded(op.shape.channels) * kFloat), stores_floats_(stores_floats) {
    if (pool != nullptr) pooled_ = PooledRows::bytes(*pool, op.shape.width, padded(op.shape.channels), 2) + kPart;
  }

  TaskNeeds needs() const {
    TaskNeeds n = is_stem(op_) ? stem() : is_depthwise(op_) ? depthwise() : general();
    n.load_work = Size(conv_.filters) * depth_ * (8 + 4 * Size(conv_.bases));
    return n;
  }

 private:
  TaskNeeds stem() const {
    TaskNeeds n;
    n.kept = parts(conv_.filters, kFloatBlock) * stem_block(conv_.channels) * kFloat;
    if (conv_.int8) n.kept += kGrowth * Size(in_.shape.width) * conv_.channels * sizeof(int16_t);
    n.temporary = Size(conv_.filters) * depth_ * kFloat + Size(kStemTerms) * kStemPointTerms * conv_.channels * sizeof(double);
    const Size line = Size(op_.shape.width + 9) * (kStemTerms / 2 * conv_.channels) + 64;
    n.thread_scratch = largest(pooled_, 2 * row_) + line * (kStemRows + kStemTerms) * kFloat;
    return n;
  }

  TaskNeeds depthwise() const {
    TaskNeeds n;
    n.kept = (depth_ + 2) * padded(conv_.filters) * kFloat + Size(window_.columns()) * in_.stride * kFloat + 256 +
             kGrowth * Size(op_.shape.width) * 4;
    n.temporary = Size(conv_.filters) * depth_ * kFloat;
    n.thread_scratch = largest(pooled_, row_) + kPart + depth_ * kDepthwisePixels * 8;
    return n;
  }

  TaskNeeds general() const {
    TaskNeeds n;
    n.kept = Size(conv_.groups) * parts(conv_.filters / conv_.groups, kFloatBlock) * depth_ * kFloatBlock * kFloat + 64 +
             kGrowth * taps_of(conv_) * 8;
    n.temporary = depth_ * kFloatBlock * kFloat;
    n.thread_scratch = pooled_;
    if (!stores_floats_ && pooled_.value() == 0) {
      const int64_t stride = padded(conv_.filters), job = 2 * std::max<int64_t>(384, 8192 / stride) + 2 * kFloatPixels;
      const Size pixels = std::min(job, pixels_of(op_.shape).value() + kFloatPixels);
      n.thread_scratch = pixels * stride * kFloat + kPart;
    }
    if (!window_.has_border()) return n;
    if (window_.padding_is_moderate())
      n.scratch = (Size(window_.rows()) * window_.columns() * window_.in.channels + kLanes) * kFloat;
    else
      n.thread_scratch += kFloatPixels * depth_ * kFloat;
    return n;
  }

  const Op& op_;
  const Convolution& conv_;
  const ValueInfo& in_;
  Window window_;
  Size depth_, row_;
  bool stores_floats_;
  Size pooled_ = 0;  // bytes of PooledRows; 0 without a pool
};

// ----------------------------------------------------------------------------------------------------------- 8-bit convolutions

// The bytes of a tap, or of a row of taps, are rounded up to whole steps.
Size byte_steps(const Convolution& c) { return taps_of(c) * parts(c.channels, kByteGroup); }

TaskNeeds byte_conv_needs(const Op& op, const Kernels& kernels, const Op* pool, bool stores_floats) {
  const Convolution& c = op.conv;
  const int64_t stride = padded(c.filters);
  const Size blocks = Size(c.groups) * parts(c.filters / c.groups, kFloatBlock), rest = gathered_steps(c, kernels);
  const Size steps = byte_steps(c) + rest;
  TaskNeeds n;
  const Size numbers = steps * kByteGroup, size = is_wide(op, kernels) ? sizeof(int16_t) : 1;
  n.kept = blocks * kFloatBlock * (numbers * size + 16) + kGrowth * (steps + rest * kByteGroup) * 8 + kPart;
  n.load_work = Size(c.filters) * taps_of(c) * c.channels * 8 + n.kept;
  const int64_t job = 2 * std::max<int64_t>(384, 8192 / stride) + 2 * kBytePixels;  // pixels, at most
  const Size pixels = pool != nullptr ? op.shape.width : std::min(job, pixels_of(op.shape).value() + kBytePixels);
  if (pool != nullptr)
    n.thread_scratch = PooledRows::bytes(*pool, op.shape.width, stride, 1) + kPart;
  else if (!stores_floats)
    n.thread_scratch = pixels * stride * kFloat + kPart;
  n.thread_scratch += 2 * pixels * rest * kByteGroup + 4 * kPart;  // with a pool, of two rows
  if (is_wide(op, kernels)) n.thread_scratch += kBytePixels * numbers * size;
  return n;
}

// ------------------------------------------------------------------------------------------------------------------------- tasks

class Estimate {
 public:
  Estimate(const Graph& graph, const Kernels& kernels, int threads)
      : graph_(graph), kernels_(kernels), threads_(threads), plan_(make_plan(graph, kernels)) {}

  Needs needs() {
    Needs all;
    all.load_memory = kProcessBytes;
    Size temporary = 0, scratch = 0, thread_scratch = 0;
    for (const PlannedOp& planned : plan_.ops) {
      const TaskNeeds n = task(planned);
      all.load_memory += n.kept;
      all.load_work += n.load_work;
      temporary = largest(temporary, n.temporary);
      scratch = largest(scratch, n.scratch);
      thread_scratch = largest(thread_scratch, n.thread_scratch);
    }
    all.load_memory += temporary;
    for (const Op& op : graph_.ops) add_objects(op, all);
    const Size arena = plan_.bytes + scratch + kPart + Size(threads_) * (thread_scratch + kPart) + 2 * kPart;
    // Threads have separate arenas if these are small. A bound above the limit may belong to an arena below it.
    const int64_t largest_separate = std::max(kCoreCache, kSharedCache / threads_);
    const Size separate = Size(threads_) * std::min(arena.value(), largest_separate);
    all.run_memory = largest(arena, separate) + Size(threads_) * (Size(plan_.values.size()) * 3 * 16 + kThreadBytes);
    return all;
  }

  const Plan& plan() const { return plan_; }

 private:
  static void add_objects(const Op& op, Needs& all) {
    all.load_memory +=
        kOpBytes + kStepBytes * Size(op.steps.size()) + kInputBytes * Size(op.inputs.size()) + 4 * Size(op.name.size());
    all.load_work += 2000 + 500 * Size(op.steps.size()) + 200 * Size(op.inputs.size());
  }

  TaskNeeds task(const PlannedOp& planned) const {
    const Op& op = graph_.ops[planned.op];
    TaskNeeds n = op.kind == OpKind::Conv ? conv(op, planned) : simple(op);
    const int channels = op.shape.channels;
    const Size floats = 4 * steps_bytes(planned.steps, channels) + quantizer_bytes(planned.emits.quantizer, channels);
    n.kept += floats;
    n.load_work += floats;
    return n;
  }

  TaskNeeds conv(const Op& op, const PlannedOp& planned) const {
    const int input = op.inputs[0];
    const ValueInfo& in = plan_.values[input];
    TaskNeeds n;
    if (graph_.is_code(input)) {
      n = code_conv(op, in);
    } else {
      const Op* pool = planned.pool < 0 ? nullptr : &graph_.ops[planned.pool];
      const bool stores_floats = planned.emits.value >= 0;
      const bool direct = op.conv.int8 && !(kernels_.whole_stem_tile && is_stem(op));
      n = direct ? byte_conv_needs(op, kernels_, pool, stores_floats) : FloatConvNeeds(op, in, pool, stores_floats).needs();
      if (pool != nullptr) add_pool_runs(n, *pool);
    }
    // Scales and offsets, folded into others.
    n.temporary += Size(op.conv.bases + 1) * op.conv.filters * kFloat;
    return n;
  }

  // PoolWindow.
  static void add_pool_runs(TaskNeeds& n, const Op& pool) {
    n.kept += kGrowth * Size(pool.shape.width) * sizeof(PoolRun);
    n.load_work += pool.shape.width;
  }

  TaskNeeds code_conv(const Op& op, const ValueInfo& in) const {
    const Quantizer& quantizer = graph_.ops[op.inputs[0] - 1].quantizer;
    const CodeConv c(op, quantizer, in);
    if (!looks_up(op, quantizer, in.shape, kernels_)) return counts_channels(op) ? c.channel_count() : c.counting();
    return kernels_.popcount_tile && !small_groups(op, in.shape) ? c.popcount() : c.look_up(threads_);
  }

  TaskNeeds simple(const Op& op) const {
    const Shape& in = graph_.shape(op.inputs[0]);
    TaskNeeds n;
    if (op.kind == OpKind::MaxPool || op.kind == OpKind::AvgPool) {
      n.thread_scratch = Size(op.shape.width) * padded(op.shape.channels) * kFloat;
      add_pool_runs(n, op);
    }
    if (op.kind == OpKind::MeanAbs) n.scratch = Size(in.height) * 8, n.thread_scratch = Size(in.width) * 8;
    if (op.kind == OpKind::ToBytes) n.kept = kGrowth * (1024 + 2 * Size(in.channels)) * 2 * kFloat, n.load_work = n.kept;
    if (op.kind == OpKind::Resize) n.kept = Size(op.shape.height + op.shape.width) * 16, n.load_work = n.kept;
    return n;
  }

  const Graph& graph_;
  const Kernels& kernels_;
  int threads_;
  Plan plan_;
};

// ------------------------------------------------------------------------------------------------------------------------- work

// Every window of every group is copied tap by tap, then compared with the filters, 64 weights at a time.
Size code_conv_work(const Op& op, const Quantizer& quantizer) {
  const Convolution& c = op.conv;
  const Size taps = taps_of(c), bases = c.bases, planes = quantizer.planes(), terms = (bases + 1) * (planes + 1);
  const Size copy = planes * c.groups * taps * (10 + Size(c.channels) / 16);
  const Size compare = bases * planes * c.filters * (parts((taps * c.channels).value(), 64) + 4);
  // With an offset, the ones of the window are counted for every block of filters: blocks of 64, and one smaller.
  const Size ones = c.offset.empty() ? 0 : planes * (parts(c.filters, 64) + 1) * taps * (4 + Size(c.channels) / 16);
  // Channels are counted digit by digit, for 64 of them at a time.
  const Size count = counts_channels(op) ? bases * planes * parts(c.filters, 64) * taps * c.channels * 8 : 0;
  return pixels_of(op.shape) * (copy + compare + ones + count + terms * (padded(c.filters) + 8));
}

// Eight filters at a time; a window in the border is copied for every 16 filters.
Size float_conv_work(const Op& op, const Shape& in) {
  const Convolution& c = op.conv;
  const Size taps = taps_of(c), depth = taps * c.channels, pixels = pixels_of(op.shape);
  const Window window(c, in, op.shape);
  if (is_depthwise(op)) return pixels * taps * (8 + Size(padded(c.filters)) / 4);
  const Size group = parts(c.filters / c.groups, 8) * (2 * depth + 4 * taps) + 32;
  Size work = pixels * c.groups * group;
  if (window.has_border() && window.padding_is_moderate()) work += Size(window.rows()) * window.columns() * in.channels;
  if (window.has_border() && !window.padding_is_moderate())
    work += pixels * c.groups * parts(c.filters / c.groups, 16) * (depth + 4 * taps);
  return work;
}

// Eight filters and four weights at a time.
Size byte_conv_work(const Op& op) {
  const Convolution& c = op.conv;
  const Size group = parts(c.filters / c.groups, 8) * (2 * byte_steps(c) + 4 * taps_of(c)) + 32;
  return pixels_of(op.shape) * c.groups * group;
}

Size pool_work(const Op& op, const Shape& in) {
  const Size rows = std::min(op.pool.kernel.h, in.height), columns = std::min(op.pool.kernel.w, in.width);
  return pixels_of(op.shape) * (rows * columns * (padded(in.channels) / 4) + 16);
}

Size op_work(const Graph& graph, const Op& op) {
  const int input = op.inputs[0];
  const Shape& in = graph.shape(input);
  const Size elements = pixels_of(op.shape) * padded(op.shape.channels);
  Size work = 1000 + elements * (1 + Size(op.steps.size()));
  for (int read : op.inputs) work += pixels_of(graph.shape(read)) * padded(graph.shape(read).channels);
  switch (op.kind) {
    case OpKind::Quantize: return work + elements * (1 + Size(op.quantizer.steps()));
    case OpKind::Conv:
      if (op.conv.int8) return work + byte_conv_work(op);
      return work + (graph.is_code(input) ? code_conv_work(op, graph.ops[input - 1].quantizer) : float_conv_work(op, in));
    case OpKind::MaxPool:
    case OpKind::AvgPool: return work + pool_work(op, in);
    case OpKind::Softmax:
    case OpKind::LogSoftmax: return work + elements * 40;  // 14 divisions
    case OpKind::Activation: return work + elements * 20;
    case OpKind::Normalize: return work + elements * 48;  // reads three times, each time from another page if groups are small
    case OpKind::MeanAbs: return work + elements * 32;    // of small groups: each is read from another page
    default: return work + elements * 4;
  }
}

Size run_work(const Graph& graph, const Plan& plan) {
  Size work = 4 * Size(graph.input.size());
  for (const Op& op : graph.ops) work += op_work(graph, op);
  for (size_t o = 0; o < graph.outputs.size(); o++) work += 4 * Size(graph.output_shape(o).size());
  for (const ValueInfo& value : plan.values)  // zeros around the codes
    if (value.code) work += Size(value.layout.planes) * value.layout.plane_bytes;
  return work;
}

}  // namespace

Size planned_work(const Graph& graph, const PlannedOp& planned) {
  Size work = op_work(graph, graph.ops[planned.op]);
  if (planned.pool >= 0) work += op_work(graph, graph.ops[planned.pool]);
  return work;
}

Needs engine_needs(const Graph& graph, const Kernels& kernels, int threads) {
  Estimate estimate(graph, kernels, threads);
  Needs needs = estimate.needs();
  needs.run_memory += kFloat * Size(graph.input.size());
  for (size_t o = 0; o < graph.outputs.size(); o++) needs.run_memory += kFloat * Size(graph.output_shape(o).size());
  needs.run_work = run_work(graph, estimate.plan());
  return needs;
}

}  // namespace unflip
