#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>

#include "engine/binary_conv.h"
#include "engine/byte_conv.h"
#include "engine/float_conv.h"
#include "engine/needs.h"
#include "engine/plan.h"
#include "engine/simple_tasks.h"
#include "engine/transpose.h"
#include "fail.h"

namespace unflip {
namespace {

const Kernels* find_kernels(const std::string& isa) {
  for (const Kernels* k :
       {avx512_kernels(), avx2_kernels(), neon_kernels(), wasm_kernels(), portable_kernels(), avx2_intrinsics_kernels(),
        neon_base_kernels(), portable_look_up_kernels(), portable_popcount_kernels()})
    if (k && (isa.empty() || isa == k->name)) return k;
  fail("instruction set '" + isa + "' is not supported by this build or this CPU");
}

#if defined(_WIN32)  // which does not have C11's aligned_alloc
uint8_t* allocate(size_t alignment, size_t size) { return static_cast<uint8_t*>(_aligned_malloc(size, alignment)); }
void release(uint8_t* data) { _aligned_free(data); }
#else
uint8_t* allocate(size_t alignment, size_t size) { return static_cast<uint8_t*>(std::aligned_alloc(alignment, size)); }
void release(uint8_t* data) { std::free(data); }
#endif

// Memory aligned for vectors and cache lines.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t size, uint8_t content = 0) {
    const int64_t whole = round_up(std::max<int64_t>(size, 1), 64);
    data_ = allocate(64, static_cast<size_t>(whole));
    if (!data_) fail_for_memory();
    std::fill(data_, data_ + whole, content);
  }
  ~AlignedBytes() { release(data_); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
};

// Bytes of the parts of an arena: the values, then these.
struct ArenaSizes {
  int64_t scratch = 0, thread_scratch = 0;
  int threads = 1;
};

// The buffers of one image.
class Arena {
 public:
  Arena(const Plan& plan, const ArenaSizes& sizes, Layout layout) : separate_(layout == Layout::Separate) {
    const int64_t bytes = plan.bytes + sizes.scratch + sizes.threads * sizes.thread_scratch + kSlack;
    if (!separate_) blocks_.push_back(std::make_unique<AlignedBytes>(bytes));
    for (size_t v = 0; v < plan.values.size(); v++) {
      uint8_t* place = plan.offset[v] < 0 ? nullptr : part(plan.offset[v], plan.size[v]);
      values.push_back(plan.values[v].code ? nullptr : reinterpret_cast<float*>(place));
      codes.push_back(plan.values[v].code ? place : nullptr);
    }
    scratch = part(plan.bytes, sizes.scratch);
    for (int t = 0; t < sizes.threads; t++)
      thread_scratch.push_back(part(plan.bytes + sizes.scratch + t * sizes.thread_scratch, sizes.thread_scratch));
  }

  std::vector<float*> values;
  std::vector<uint8_t*> codes;
  uint8_t* scratch;
  std::vector<uint8_t*> thread_scratch;

 private:
  static constexpr int64_t kSlack = 64;  // so that a vector may also be read at the end of the last part

  uint8_t* part(int64_t offset, int64_t bytes) {
    if (!separate_) return blocks_[0]->data() + offset;
    blocks_.push_back(std::make_unique<AlignedBytes>(bytes, uint8_t{0xFF}));
    return blocks_.back()->data();
  }

  bool separate_;
  std::vector<std::unique_ptr<AlignedBytes>> blocks_;
};

// The samples of a batch: floats, or pixels 0 .. 255.
struct Samples {
  const float* floats = nullptr;
  const uint8_t* pixels = nullptr;
};

struct EngineWorkspace : Workspace {
  std::vector<std::unique_ptr<Arena>> arenas;  // one, or one per thread
};

// Units of work (see needs.cpp). About 80 take a nanosecond.
constexpr int64_t kJobWork = 80'000;       // of a job, at least, if threads get more than one
constexpr float kLeastFolded = 1e-18f, kMostFolded = 1e18f;
// A task is shared if it has this work per nanosecond of overhead. It rises with the overhead per thread: if cores are far apart,
// data moves slowly, too.
constexpr int64_t kLeastPerOverhead = 200, kMostPerOverhead = 840;
constexpr double kPerNanosecond = 1.2;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class EngineImpl : public Engine {
 public:
  EngineImpl(Graph graph, const Kernels& kernels, int threads)
      : graph_(std::move(graph)), kernels_(kernels), isa_(kernels.name), threads_(std::max(1, threads)),
        plan_(make_plan(graph_, kernels)), takes_pixels_(unflip::takes_pixels(graph_)) {
    for (PlannedOp& planned : plan_.ops) {
      work_.push_back(planned_work(graph_, planned).value());
      const int64_t jobs = threads_ * std::clamp<int64_t>(work_.back() / kJobWork / threads_, 1, kJobsPerThread);
      tasks_.push_back(make_task(planned, threads_ == 1 ? 1 : static_cast<int>(jobs)));
      give_up_weights(graph_.ops[planned.op].conv);
    }
    for (Op& op : graph_.ops) give_up_weights(op.conv);  // those of ops that no output needs
    sizes_.threads = threads_;
    for (const auto& task : tasks_) {
      sizes_.scratch = std::max(sizes_.scratch, round_up(task->scratch_bytes, 64));
      sizes_.thread_scratch = std::max(sizes_.thread_scratch, round_up(task->thread_scratch_bytes, 64));
    }
    arena_bytes_ = plan_.bytes + sizes_.scratch + threads_ * sizes_.thread_scratch;
  }

  std::unique_ptr<Workspace> workspace(Layout layout) const override {
    auto workspace = std::make_unique<EngineWorkspace>();
    for (int i = 0; i < arenas(); i++) workspace->arenas.push_back(std::make_unique<Arena>(plan_, sizes_, layout));
    return workspace;
  }

  void run(const float* input, float* const* outputs, int batch, Workspace& workspace, ThreadPool* pool,
           double* seconds) const override {
    run_samples({input, nullptr}, outputs, batch, workspace, pool, seconds);
  }

  void run_pixels(const uint8_t* input, float* const* outputs, int batch, Workspace& workspace, ThreadPool* pool,
                  double* seconds) const override {
    run_samples({nullptr, input}, outputs, batch, workspace, pool, seconds);
  }

  bool takes_pixels() const override { return takes_pixels_; }
  const Graph& graph() const override { return graph_; }
  const std::string& isa() const override { return isa_; }
  size_t workspace_bytes() const override { return static_cast<size_t>(arena_bytes_) * arenas(); }

 private:
  void run_samples(const Samples& input, float* const* outputs, int batch, Workspace& workspace, ThreadPool* pool,
                   double* seconds) const {
    auto& arenas = static_cast<EngineWorkspace&>(workspace).arenas;
    if (pool && (pool->threads() == 1 || pool->threads() > threads_)) pool = nullptr;
    int done = 0;
    if (pool && !seconds && static_cast<int>(arenas.size()) >= pool->threads() && batch > 1) {
      // Images that run in parallel do not wait for each other. All threads share the remaining ones.
      done = batch / pool->threads() * pool->threads();
      auto image = [&](int i, int thread) { run_image(input, outputs, i, *arenas[thread], nullptr, nullptr); };
      RunContext context;
      context.pool = pool;
      parallel(context, done, image);
    }
    for (int i = done; i < batch; i++) run_image(input, outputs, i, *arenas[0], pool, seconds);
  }

  int arenas() const { return separate_images(arena_bytes_, threads_) ? threads_ : 1; }

  std::unique_ptr<Task> make_task(PlannedOp& planned, int jobs) {
    Op& op = graph_.ops[planned.op];
    if (op.kind == OpKind::Conv) return make_conv(op, planned, jobs);
    auto epilogue = [&] { return std::make_unique<Epilogue>(op.shape, planned.steps, planned.emits, plan_.values); };
    const int input = op.inputs[0];
    switch (op.kind) {
      case OpKind::Quantize:
      case OpKind::Map: return make_map(input, plan_.values, epilogue(), jobs);
      case OpKind::MaxPool:
      case OpKind::AvgPool: return make_pool(op, input, plan_.values, epilogue());
      case OpKind::ToBytes: return make_to_bytes(op, input, planned.emits.value, plan_.values, jobs);
      default: return make_simple(op, planned.emits.value, plan_.values);
    }
  }

  // Changes the op's weights in place, because nothing else reads them and a copy may be large.
  std::unique_ptr<Task> make_conv(Op& op, PlannedOp& planned, int jobs) const {
    if (op.conv.bases) fold_scale(op.conv, planned.steps);
    const int input = op.inputs[0];
    if (planned.pool >= 0) {
      const Op& pool = graph_.ops[planned.pool];
      std::vector<Step> before = planned.steps, after;
      if (pool.kind == OpKind::MaxPool && make_rising(op.conv, before)) before.swap(after);
      auto own = std::make_unique<Epilogue>(op.shape, before, Emits(), plan_.values);
      auto last = std::make_unique<Epilogue>(pool.shape, after, planned.emits, plan_.values);
      return make_dense_conv(op, std::move(own), &pool, std::move(last), jobs);
    }
    auto epilogue = std::make_unique<Epilogue>(op.shape, planned.steps, planned.emits, plan_.values);
    if (!graph_.is_code(input)) return make_dense_conv(op, std::move(epilogue), nullptr, nullptr, jobs);
    const Quantizer& quantizer = graph_.ops[input - 1].quantizer;
    if (!looks_up(op, quantizer, graph_.shape(input), kernels_))
      return (counts_channels(op) ? make_channel_count : make_counting_conv)(op, quantizer, input, plan_.values,
                                                                             std::move(epilogue), jobs);
    const bool popcount = kernels_.popcount_tile && !small_groups(op, graph_.shape(input));
    const auto make = popcount ? make_popcount_conv : make_look_up_conv;
    return make(op, quantizer, input, plan_.values, std::move(epilogue), kernels_, jobs);
  }

  // Of floats or of whole numbers.
  std::unique_ptr<Task> make_dense_conv(const Op& op, std::unique_ptr<Epilogue> epilogue, const Op* pool,
                                        std::unique_ptr<Epilogue> pool_epilogue, int jobs) const {
    const int input = op.inputs[0];
    if (!op.conv.int8) return make_float_conv(op, input, plan_.values, std::move(epilogue), pool, std::move(pool_epilogue), jobs);
    return make_byte_conv(op, graph_.ops[input - 1].range, input, plan_.values, std::move(epilogue), pool,
                          std::move(pool_epilogue), kernels_, jobs);
  }

  // Folds a factor that directly follows into the scales of the weights, unless a product is very large or small. If it overflows,
  // a sum of 0 would become NaN, and below the normal floats it loses digits that a large sum still has; it is yet to be multiplied
  // by the values of the codes. An offset must not become 0, because the plan has chosen the layout of the input by whether there
  // is one.
  static void fold_scale(Convolution& conv, std::vector<Step>& steps) {
    if (steps.empty() || steps[0].kind != StepKind::Affine || steps[0].scale.empty()) return;
    if (conv.offset.size() == 1) conv.offset.resize(conv.filters, conv.offset[0]);
    const std::vector<float>& scale = steps[0].scale;
    auto factor = [&](size_t i) { return scale[scale.size() == 1 ? 0 : i % conv.filters]; };
    auto keeps_digits = [&](const std::vector<float>& numbers, bool may_vanish) {
      for (size_t i = 0; i < numbers.size(); i++) {
        const bool vanishes = may_vanish && factor(i) == 0;
        const float product = std::abs(numbers[i] * factor(i));
        if (numbers[i] != 0 && !vanishes && !(product >= kLeastFolded && product <= kMostFolded)) return false;
      }
      return true;
    };
    if (!keeps_digits(conv.scales, true) || !keeps_digits(conv.offset, false)) return;
    for (size_t i = 0; i < conv.scales.size(); i++) conv.scales[i] *= factor(i);
    for (size_t i = 0; i < conv.offset.size(); i++) conv.offset[i] *= factor(i);
    steps[0].scale.clear();
  }

  // Monotone steps commute with a max pool, to the last bit, because rounding never changes an order. So they can run after the
  // pool, where a stem has a quarter of the pixels. Filters with a negative factor are negated together with the factor. Returns
  // whether all steps are monotone now.
  static bool make_rising(Convolution& conv, std::vector<Step>& steps) {
    if (!steps.empty() && steps[0].kind == StepKind::Affine && (conv.int8 || !conv.weight.empty())) {
      std::vector<float>& scale = steps[0].scale;
      if (scale.size() == 1) scale.resize(conv.filters, scale[0]);
      const size_t weights = conv.weight.size() / conv.filters;
      for (size_t o = 0; o < scale.size(); o++)
        if (scale[o] < 0) {
          scale[o] = -scale[o];
          if (conv.int8) conv.scales[o] = -conv.scales[o];
          for (size_t i = 0; i < weights; i++) conv.weight[o * weights + i] = -conv.weight[o * weights + i];
        }
    }
    auto positive = [](const std::vector<float>& v) { return std::all_of(v.begin(), v.end(), [](float x) { return x >= 0; }); };
    return std::all_of(steps.begin(), steps.end(), [&](const Step& s) {
      return s.kind == StepKind::Clamp || (s.kind == StepKind::Affine && positive(s.scale)) ||
             (s.kind == StepKind::Prelu && positive(s.slope));
    });
  }

  // The task has a packed copy.
  static void give_up_weights(Convolution& conv) {
    std::vector<float>().swap(conv.weight);
    std::vector<int8_t>().swap(conv.bytes);
    std::vector<uint8_t>().swap(conv.bits);
  }

  // overhead: nanoseconds.
  int64_t least_shared_work(int64_t overhead) const {
    const auto per_overhead = static_cast<int64_t>(kPerNanosecond * overhead / std::max(threads_ - 1, 1));
    return overhead * std::clamp(per_overhead, kLeastPerOverhead, kMostPerOverhead);
  }

  // Sample number i of the batch.
  void run_image(const Samples& input, float* const* outputs, int64_t i, Arena& arena, ThreadPool* pool, double* seconds) const {
    const int64_t least_work = pool ? least_shared_work(pool->overhead()) : 0;
    RunContext context;
    context.kernels = &kernels_;
    context.pool = 4 * graph_.input.size() >= least_work ? pool : nullptr;
    context.values = arena.values.data();
    context.codes = arena.codes.data();
    context.scratch = arena.scratch;
    context.thread_scratch = arena.thread_scratch.data();
    if (input.pixels)
      context.pixels = input.pixels + i * graph_.input.size();
    else
      read_input(context, input.floats + i * graph_.input.size());
    for (size_t t = 0; t < tasks_.size(); t++) {
      const double start = seconds ? now() : 0;
      context.pool = work_[t] >= least_work ? pool : nullptr;
      tasks_[t]->run(context);
      if (seconds) seconds[plan_.ops[t].op] += now() - start;
    }
    for (size_t o = 0; o < graph_.outputs.size(); o++)
      write_output(context, graph_.outputs[o].value, outputs[o] + i * graph_.output_shape(o).size());
  }

  // C x H x W to H x W x C.
  void read_input(const RunContext& context, const float* input) const {
    const int channels = graph_.input.channels, pixels = graph_.input.height * graph_.input.width;
    const Cut cut(pixels, context.pool ? threads_ * kJobsPerThread : 1, kTransposeBlock);
    parallel(context, cut.jobs, [&](int job, int) {
      const int first = cut.first(job), count = cut.last(job) - first;
      const float* from = input + first;
      float* to = context.values[0] + int64_t{first} * channels;
      if (channels != 3) return transpose(from, pixels, channels, count, to, channels);
      if (kernels_.interleave3) return kernels_.interleave3(from, pixels, count, to);
      for (int i = 0; i < count; i++)
        for (int c = 0; c < 3; c++) to[3 * i + c] = from[c * int64_t{pixels} + i];
    });
  }

  void write_output(const RunContext& context, int number, float* output) const {
    const ValueInfo& value = plan_.values[number];
    const Shape& s = value.shape;
    const int64_t pixels = int64_t{s.height} * s.width;
    if (value.code) return write_code(context, number, output);
    transpose(context.values[number], value.stride, pixels, s.channels, output, pixels);
  }

  void write_code(const RunContext& context, int number, float* output) const {
    const ValueInfo& value = plan_.values[number];
    const Quantizer& quantizer = graph_.ops[number - 1].quantizer;
    const Shape& s = value.shape;
    for (int c = 0; c < s.channels; c++)
      for (int y = 0; y < s.height; y++)
        for (int x = 0; x < s.width; x++) {
          float sum = quantizer.offset;
          for (int p = 0; p < value.layout.planes; p++) {
            const uint8_t* pixel = context.codes[number] + p * value.layout.plane_bytes + value.layout.at(y, x);
            if (pixel[c / 8] >> (c % 8) & 1) sum += quantizer.scales[p];
          }
          *output++ = sum;
        }
  }

  Graph graph_;
  const Kernels& kernels_;
  std::string isa_;
  int threads_;
  Plan plan_;
  bool takes_pixels_;
  std::vector<std::unique_ptr<Task>> tasks_;  // one for each of plan_.ops
  std::vector<int64_t> work_;                 // of each task
  ArenaSizes sizes_;
  int64_t arena_bytes_ = 0;
};

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* k : {avx512_kernels(), avx2_kernels(), neon_kernels(), wasm_kernels(), portable_kernels()})
    if (k) names.push_back(k->name);
  return names;
}

Needs Engine::needs(const Graph& graph, const std::string& isa, int threads) {
  return engine_needs(graph, *find_kernels(isa), std::max(1, threads));
}

std::unique_ptr<Engine> Engine::create(Graph graph, const std::string& isa, int threads) {
  return create(std::move(graph), *find_kernels(isa), threads);
}

std::unique_ptr<Engine> Engine::create(Graph graph, const Kernels& kernels, int threads) {
  return std::make_unique<EngineImpl>(std::move(graph), kernels, threads);
}

}  // namespace unflip
