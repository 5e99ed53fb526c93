// The engine's speed, compared with the fp32 multiply-add peak of the same core in the same run.
// Usage: bench [seconds for each number] [instruction set]
//
// The machine may be shared. A short loop of known length runs before and after each sample. A sample is quiet if both loops took
// at most 4 % more than the fastest one. Results are the median of the quiet samples (of all samples if too few are quiet: marked
// ~) and the best of all. The peak is that of the fastest loop.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "kernels/cpu.h"
#include "kernels/kernels.h"
#include "thread_pool.h"

using namespace unflip;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// ------------------------------------------------------------------------------------------------------------------- timing

#if defined(__x86_64__)
// 12 independent chains of fused multiply-adds in registers: enough to saturate a core.
__attribute__((target("avx2,fma"))) double multiply_adds(int64_t loops) {
  const double start = now();
#define UNFLIP_ZERO(r) "vxorps %%ymm" #r ", %%ymm" #r ", %%ymm" #r "\n"
#define UNFLIP_FMA(r) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #r "\n"
  // clang-format off
  asm volatile(UNFLIP_ZERO(0) UNFLIP_ZERO(1) UNFLIP_ZERO(2) UNFLIP_ZERO(3) UNFLIP_ZERO(4) UNFLIP_ZERO(5) UNFLIP_ZERO(6)
               UNFLIP_ZERO(7) UNFLIP_ZERO(8) UNFLIP_ZERO(9) UNFLIP_ZERO(10) UNFLIP_ZERO(11) UNFLIP_ZERO(14) UNFLIP_ZERO(15)
               "1:\n"
               UNFLIP_FMA(0) UNFLIP_FMA(1) UNFLIP_FMA(2) UNFLIP_FMA(3) UNFLIP_FMA(4) UNFLIP_FMA(5)
               UNFLIP_FMA(6) UNFLIP_FMA(7) UNFLIP_FMA(8) UNFLIP_FMA(9) UNFLIP_FMA(10) UNFLIP_FMA(11)
               "dec %0\n jnz 1b\n"
               : "+r"(loops)::"cc", "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10",
               "ymm11", "ymm14", "ymm15");
  // clang-format on
  return now() - start;
}
bool can_measure_peak() { return unflip::cpu_has_avx2(); }
#else
double multiply_adds(int64_t) { return 1; }
bool can_measure_peak() { return false; }
#endif

constexpr int64_t kPeakLoops = 2000;

// Some microseconds of work that depends only on the core's speed.
double reference_loop() {
  if (can_measure_peak()) return multiply_adds(kPeakLoops);
  const double start = now();
  uint64_t a = 1, b = 2, c = 3, d = 4;
  for (int i = 0; i < 8000; i++) {
    asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));
    a += 3, b += 5, c += 7, d += 9;
  }
  return now() - start;
}

class Timer {
 public:
  explicit Timer(double seconds) : seconds_(seconds) {
    for (const double end = now() + seconds; now() < end;) fastest_ = std::min(fastest_, reference_loop());
  }

  struct Result {
    double seconds = 0, best = 0;
    bool quiet = true;
  };

  // work() returns the seconds to count. Short work is repeated within a sample.
  Result measure(const std::function<double()>& work) {
    work();
    const int repeat = std::max(1, static_cast<int>(200e-6 / std::max(work(), 1e-9)));
    std::vector<std::pair<double, double>> samples;
    for (const double end = now() + seconds_; now() < end;) {
      const double before = reference_loop();
      double sum = 0;
      for (int i = 0; i < repeat; i++) sum += work();
      const double after = reference_loop();
      fastest_ = std::min({fastest_, before, after});
      samples.push_back({sum / repeat, std::max(before, after)});
    }
    std::vector<double> all, quiet;
    for (const auto& s : samples) {
      all.push_back(s.first);
      if (s.second < fastest_ * 1.04) quiet.push_back(s.first);
    }
    std::sort(all.begin(), all.end());
    std::sort(quiet.begin(), quiet.end());
    Result r;
    r.best = all[0];
    r.quiet = quiet.size() >= 5;
    r.seconds = r.quiet ? quiet[quiet.size() / 2] : all[all.size() / 2];
    return r;
  }

  // Multiply-adds per second, or 0.
  double peak() const { return can_measure_peak() ? kPeakLoops * 12 * 8 / fastest_ : 0; }

 private:
  double seconds_, fastest_ = 1e9;
};

// ------------------------------------------------------------------------------------------------------------------ networks

float uniform() {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1;
}

std::vector<float> uniforms(int64_t count, float low, float high) {
  std::vector<float> v(count);
  for (float& x : v) x = low + (high - low) * (uniform() + 1) / 2;
  return v;
}

class Network {
 public:
  explicit Network(Shape input) { graph.input = input; }

  int add(Op op) {
    op.name = "op";
    graph.ops.push_back(std::move(op));
    graph.outputs = {{"output", static_cast<int>(graph.ops.size())}};
    return graph.outputs[0].value;
  }

  int sign(int x) {
    Op op;
    op.kind = OpKind::Quantize;
    op.inputs = {x};
    op.shape = graph.shape(x);
    op.quantizer.thresholds = uniforms(op.shape.channels, -0.1f, 0.1f);
    op.quantizer.per_channel = true;
    op.quantizer.strict = {false};
    op.quantizer.scales = {2};
    op.quantizer.offset = -1;
    return add(op);
  }

  int conv(int x, int filters, int kernel, int stride, bool binary, std::vector<Step> steps, int groups = 1) {
    Op op;
    op.kind = OpKind::Conv;
    op.inputs = {x};
    const Shape in = graph.shape(x);
    Convolution& c = op.conv;
    c.filters = filters, c.channels = in.channels / groups, c.groups = groups;
    c.kernel = {kernel, kernel}, c.stride = {stride, stride};
    c.top = c.left = c.bottom = c.right = kernel / 2;
    op.shape = {filters, (in.height + 2 * (kernel / 2) - kernel) / stride + 1,
                (in.width + 2 * (kernel / 2) - kernel) / stride + 1};
    const int64_t count = int64_t{filters} * c.channels * kernel * kernel;
    if (binary) {
      c.bases = 1;
      for (int64_t i = 0; i < (count + 7) / 8; i++) c.bits.push_back(static_cast<uint8_t>(uniform() * 127 + 128));
      c.scales = uniforms(filters, 0.01f, 0.05f);
      binary_macs += static_cast<double>(count) * op.shape.height * op.shape.width;
    } else {
      c.weight = uniforms(count, -0.1f, 0.1f);
      float_macs += static_cast<double>(count) * op.shape.height * op.shape.width;
    }
    op.steps = std::move(steps);
    return add(op);
  }

  Step norm(int channels) {
    Step s;
    s.kind = StepKind::Affine;
    s.scale = uniforms(channels, 0.5f, 1.5f);
    s.shift = uniforms(channels, -0.1f, 0.1f);
    return s;
  }
  Step prelu(int channels) {
    Step s;
    s.kind = StepKind::Prelu;
    s.slope = uniforms(channels, 0.2f, 0.3f);
    return s;
  }
  static Step plus(int value) {
    Step s;
    s.kind = StepKind::Add;
    s.value = value;
    return s;
  }

  int pool(int x, OpKind kind, int kernel, int stride, int padding) {
    Op op;
    op.kind = kind;
    op.inputs = {x};
    op.pool.kernel = {kernel, kernel}, op.pool.stride = {stride, stride}, op.pool.padding = {padding, padding};
    const Shape in = graph.shape(x);
    op.shape = {in.channels, (in.height + 2 * padding - kernel) / stride + 1, (in.width + 2 * padding - kernel) / stride + 1};
    return add(op);
  }

  int mean(int x) {
    Op op;
    op.kind = OpKind::Mean;
    op.inputs = {x};
    op.shape = {graph.shape(x).channels, 1, 1};
    return add(op);
  }

  // Sign, binary 3 x 3, BatchNorm, shortcut, PReLU.
  int binary_layer(int x, int filters, int stride) {
    int shortcut = x;
    if (stride > 1) shortcut = conv(pool(x, OpKind::AvgPool, 2, 2, 0), filters, 1, 1, false, {norm(filters)});
    return conv(sign(x), filters, 3, stride, true, {norm(filters), plus(shortcut), prelu(filters)});
  }

  Graph graph;
  double binary_macs = 0, float_macs = 0;
};

Network resnet18() {
  Network n({3, 224, 224});
  int x = n.pool(n.conv(0, 64, 7, 2, false, {n.norm(64)}), OpKind::MaxPool, 3, 2, 1);
  for (int stage = 0; stage < 4; stage++)
    for (int i = 0; i < 4; i++) x = n.binary_layer(x, 64 << stage, stage && !i ? 2 : 1);
  n.conv(n.mean(x), 1000, 1, 1, false, {n.norm(1000)});
  return n;
}

Network resnet20() {
  Network n({3, 32, 32});
  int x = n.conv(0, 16, 3, 1, false, {n.norm(16)});
  for (int stage = 0; stage < 3; stage++)
    for (int i = 0; i < 6; i++) x = n.binary_layer(x, 16 << stage, stage && !i ? 2 : 1);
  n.conv(n.mean(x), 10, 1, 1, false, {n.norm(10)});
  return n;
}

// --------------------------------------------------------------------------------------------------------------------- tables

struct Running {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<ThreadPool> pool;
  std::vector<float> input, output;
  float* place;
  std::vector<double> seconds;
  int batch;

  template <class Which>
  Running(const Graph& graph, const Which& isa_or_kernels, int threads, int batch_) : batch(batch_) {
    engine = Engine::create(graph, isa_or_kernels, threads);
    workspace = engine->workspace();
    if (threads > 1) pool = std::make_unique<ThreadPool>(threads);
    input = uniforms(graph.input.size() * batch, -1, 1);
    output.resize(graph.output_shape(0).size() * batch);
    place = output.data();
    seconds.resize(graph.ops.size());
  }
  double run() {
    const double start = now();
    engine->run(input.data(), &place, batch, *workspace, pool.get(), nullptr);
    return now() - start;
  }
  // Seconds of one op.
  double run_op(int op) {
    seconds[op] = 0;
    engine->run(input.data(), &place, batch, *workspace, pool.get(), seconds.data());
    return seconds[op];
  }
};

// Instead of the epilogue: stores the counts of differing bits, 16 bits each.
void keep_counts(const EpilogueParams& params, const EpilogueTarget& target, const Counts& c, int first, int last, int channel,
                 int channels) {
  uint16_t* to = reinterpret_cast<uint16_t*>(target.out) + int64_t{first} * params.stride + channel;
  for (int i = 0; i < last - first; i++)
    std::memcpy(to + i * int64_t{params.stride}, c.count + i * c.count_stride, channels * sizeof(uint16_t));
}

Kernels without_epilogue(const std::string& isa) {
  Kernels kernels = *portable_kernels();
  for (const Kernels* k : {neon_kernels(), avx2_kernels(), avx512_kernels()})
    if (k && (isa.empty() || isa == k->name)) kernels = *k;
  kernels.epilogue_counts = keep_counts;
  return kernels;
}

const char* mark(const Timer::Result& r) { return r.quiet ? " " : "~"; }

void layers(Timer& timer, const std::string& isa, double peak) {
  const int shapes[][4] = {{64, 64, 56, 1},   {128, 128, 28, 1}, {256, 256, 14, 1}, {512, 512, 7, 1}, {64, 128, 56, 2},
                           {128, 256, 28, 2}, {256, 512, 14, 2}, {16, 16, 32, 1},   {32, 32, 16, 1},  {64, 64, 8, 1}};
  const Kernels counting = without_epilogue(isa);
  std::printf("binary 3x3 convolution, one thread: to floats with BatchNorm, and to 16-bit counts alone\n");
  for (const auto& s : shapes) {
    Network n({s[0], s[2], s[2]});
    n.conv(n.sign(0), s[1], 3, s[3], true, {n.norm(s[1])});
    Running running(n.graph, isa, 1, 1);
    const Timer::Result r = timer.measure([&] { return running.run_op(1); });
    Running alone(n.graph, counting, 1, 1);
    const Timer::Result a = timer.measure([&] { return alone.run_op(1); });
    const double rate = n.binary_macs / r.seconds * 1e-9, alone_rate = n.binary_macs / a.seconds * 1e-9;
    std::printf("  %3d -> %3d at %2d / %d: %s%7.1f us %6.0f GMAC/s %5.1f x peak   %s%7.1f us %6.0f GMAC/s %5.1f x peak\n", s[0],
                s[1], s[2], s[3], mark(r), r.seconds * 1e6, rate, rate / peak, mark(a), a.seconds * 1e6, alone_rate,
                alone_rate / peak);
  }
  std::printf("float convolution, one thread\n");
  const int floats[][6] = {{3, 64, 224, 7, 2, 1},  {64, 128, 28, 1, 1, 1},    {128, 256, 14, 1, 1, 1},
                           {256, 512, 7, 1, 1, 1}, {512, 1000, 1, 1, 1, 1},   {3, 16, 32, 3, 1, 1},
                           {64, 64, 56, 3, 1, 64}, {128, 128, 56, 3, 2, 128}, {256, 256, 14, 5, 1, 256}};
  for (const auto& s : floats) {
    Network n({s[0], s[2], s[2]});
    n.conv(0, s[1], s[3], s[4], false, {n.norm(s[1])}, s[5]);
    Running running(n.graph, isa, 1, 1);
    const Timer::Result r = timer.measure([&] { return running.run_op(0); });
    const double rate = n.float_macs / r.seconds * 1e-9;
    std::printf("  %3d -> %4d at %3d, %dx%d / %d%s: %s%7.1f us %6.1f GMAC/s %4.0f %% of peak (best %5.1f)\n", s[0], s[1], s[2],
                s[3], s[3], s[4], s[5] > 1 ? " depthwise" : "", mark(r), r.seconds * 1e6, rate, 100 * rate / peak,
                n.float_macs / r.best * 1e-9);
  }
}

void network(Timer& timer, const char* name, const Network& n, const std::string& isa) {
  std::printf("%s: %.1f MMAC binary, %.1f float\n", name, n.binary_macs * 1e-6, n.float_macs * 1e-6);
  for (int threads : {1, 2})
    for (int batch : {1, 32}) {
      Running running(n.graph, isa, threads, batch);
      const Timer::Result r = timer.measure([&] { return running.run(); });
      std::printf("  %d thread%s batch %2d: %s%8.3f ms an image (best %8.3f)\n", threads, threads > 1 ? "s," : ", ", batch,
                  mark(r), r.seconds / batch * 1e3, r.best / batch * 1e3);
    }
}

// The time of one image by kind of op: sums of the fastest profiled run.
void parts(const char* name, const Network& n, const std::string& isa, double seconds) {
  Running running(n.graph, isa, 1, 1);
  std::vector<double> best;
  double best_sum = 1e9;
  for (const double end = now() + seconds; now() < end;) {
    std::fill(running.seconds.begin(), running.seconds.end(), 0.0);
    running.engine->run(running.input.data(), &running.place, 1, *running.workspace, nullptr, running.seconds.data());
    double sum = 0;
    for (double s : running.seconds) sum += s;
    if (sum < best_sum) best_sum = sum, best = running.seconds;
  }
  double binary = 0, floats = 0, rest = 0;
  for (size_t i = 0; i < best.size(); i++) {
    const Op& op = n.graph.ops[i];
    (op.kind != OpKind::Conv ? rest : op.conv.bases ? binary : floats) += best[i];
  }
  std::printf("%s: binary %.3f ms, float %.3f (of it stem %.3f), rest %.3f\n", name, binary * 1e3, floats * 1e3, best[0] * 1e3,
              rest * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  const std::string isa = argc > 2 ? argv[2] : "";
  Timer timer(seconds);
  const double peak = std::max(timer.peak() * 1e-9, 1e-9);
  std::printf("fp32 fused multiply-add peak: %.1f GMAC/s\n", peak);
  layers(timer, isa, peak);
  network(timer, "ResNet-18", resnet18(), isa);
  parts("ResNet-18", resnet18(), isa, seconds);
  network(timer, "ResNet-20", resnet20(), isa);
  parts("ResNet-20", resnet20(), isa, seconds);
  return 0;
}
