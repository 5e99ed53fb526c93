// The WebAssembly module: what unflip.js calls. One network per instance of the module, on one thread. There are no C++
// exceptions: errors become calls of JavaScript, which throws and drops the instance.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "engine.h"
#include "engine/binary_conv.h"
#include "engine/byte_pool_conv.h"
#include "engine/byte_weights.h"
#include "fail.h"
#include "graph.h"
#include "printable.h"
#include "thread_pool.h"

#define UNFLIP_IMPORT(name) __attribute__((import_module("unflip"), import_name(name)))
#define UNFLIP_EXPORT(name) __attribute__((export_name(name)))

extern "C" {
UNFLIP_IMPORT("fail") [[noreturn]] void unflip_js_fail(const char* text, size_t size);
}

// What libc++ and its language support call if their own checks fail. The defaults print, which needs much code.
void std::__libcpp_verbose_abort(const char* format, ...) noexcept { unflip_js_fail(format, std::strlen(format)); }
extern "C" void __abort_message(const char* format, ...) { unflip_js_fail(format, std::strlen(format)); }

namespace unflip {

void fail(const std::string& what) {
  const std::string text = printable(what);  // it may quote the file
  unflip_js_fail(text.data(), text.size());
}

void fail_for_memory() {
  constexpr char kText[] = "not enough memory";
  unflip_js_fail(kText, sizeof kText - 1);
}

// There is one thread, and nobody makes a pool.
struct ThreadPool::State {};
ThreadPool::ThreadPool(int) {}
ThreadPool::~ThreadPool() = default;
int ThreadPool::threads() const { return 1; }
int ThreadPool::overhead() { return 0; }
void ThreadPool::run(int jobs, void (*work)(void* context, int job, int thread), void* context) {
  for (int job = 0; job < jobs; ++job) work(context, job, 0);
}

// Not part of the modules: no kernels there prefer it.
std::unique_ptr<Task> make_popcount_conv(const Op&, const Quantizer&, int, const std::vector<ValueInfo>&,
                                         std::unique_ptr<Epilogue>, const Kernels&, int) {
  fail("convolution by popcount is not part of this module");
}

// Nor is what only AVX-512 has: a pool of whole sums, and gathered steps.
bool pools_sums(const Op&, const Epilogue&, const Op&, const Kernels&) { return false; }
std::unique_ptr<Task> make_byte_pool_conv(const Op&, const ByteRange&, int, const std::vector<ValueInfo>&,
                                          std::unique_ptr<Epilogue>, const Kernels&, int) {
  fail("a pool of whole sums is not part of this module");
}
int gathered_steps(const Convolution&, const Kernels&) { return 0; }
void ByteWeights::gather(const Kernels&, const uint8_t*, int, uint8_t*, int64_t) const {}

namespace {

// A network and the memory of its runs.
struct Network {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Workspace> workspace;
  Needs needs;
  std::vector<float> input;
  std::vector<uint8_t> pixels;
  std::vector<std::vector<float>> outputs;
  std::vector<double> seconds;  // of each op
  std::string description;
};

std::string quoted(const std::string& text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string json = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20) {
      json.append("\\u00").append(1, kDigits[byte >> 4]).append(1, kDigits[byte & 15]);
      continue;
    }
    if (c == '"' || c == '\\') json += '\\';
    json += c;
  }
  return json + "\"";
}

template <class Items, class Text>
std::string listed(const Items& items, const Text& text) {
  std::string json;
  for (const auto& item : items) json.append(json.empty() ? "[" : ",").append(text(item));
  return json.empty() ? "[]" : json + "]";
}

std::string shape_of(const Shape& s) {
  return "[" + std::to_string(s.channels) + "," + std::to_string(s.height) + "," + std::to_string(s.width) + "]";
}

std::string address_of(const void* p) { return std::to_string(reinterpret_cast<uintptr_t>(p)); }

// As JSON: what JavaScript does not find in the file. Addresses stay valid as long as the instance.
std::string described(const Network& network) {
  const Graph& graph = network.engine->graph();
  size_t next = 0;
  auto output = [&](const Output& o) {
    const Shape& shape = graph.shape(o.value);
    return "{\"name\":" + quoted(o.name) + ",\"shape\":" + shape_of(shape) +
           ",\"address\":" + address_of(network.outputs[next++].data()) + "}";
  };
  auto op = [&](const Op& o) {
    return "{\"kind\":" + quoted(kind_name(o)) + ",\"name\":" + quoted(o.name) + ",\"shape\":" + shape_of(o.shape) + "}";
  };
  const bool takes_pixels = network.engine->takes_pixels();
  return "{\"isa\":" + quoted(network.engine->isa()) + ",\"shape\":" + shape_of(graph.input) +
         ",\"input\":" + address_of(network.input.data()) + ",\"seconds\":" + address_of(network.seconds.data()) +
         ",\"pixels\":" + (takes_pixels ? address_of(network.pixels.data()) : std::string("null")) +
         ",\"memory\":" + std::to_string(network.needs.memory().value()) + ",\"outputs\":" + listed(graph.outputs, output) +
         ",\"ops\":" + listed(graph.ops, op) + "}";
}

void make_buffers(Network& network) {
  const Graph& graph = network.engine->graph();
  network.input.resize(static_cast<size_t>(graph.input.size()));
  if (network.engine->takes_pixels()) network.pixels.resize(network.input.size());
  for (size_t o = 0; o < graph.outputs.size(); o++)
    network.outputs.emplace_back(static_cast<size_t>(graph.output_shape(o).size()));
  network.seconds.resize(graph.ops.size());
  network.description = described(network);
}

int64_t limit_of(double given, int64_t otherwise) {
  return given > 0 ? static_cast<int64_t>(std::fmin(given, 0x1p62)) : otherwise;
}

}  // namespace
}  // namespace unflip

using unflip::Network;

extern "C" {

// Whether this machine can run the module's kernels: see src/kernels/wasm.cpp.
UNFLIP_EXPORT("usable") int unflip_usable() { return unflip::instruction_sets().empty() ? 0 : 1; }

// Memory for a file, which `load` reads.
UNFLIP_EXPORT("allocate") void* unflip_allocate(size_t size) {
  std::set_new_handler(unflip::fail_for_memory);
  void* memory = std::malloc(size);
  if (memory == nullptr) unflip::fail_for_memory();
  return memory;
}

// Frees the file. Limits: 0 for the defaults.
UNFLIP_EXPORT("load") Network* unflip_load(uint8_t* file, size_t size, double max_memory, double max_work, int check_hash) {
  auto* network = new Network;
  unflip::LoadOptions options;
  options.limits.memory = unflip::limit_of(max_memory, options.limits.memory);
  options.limits.work = unflip::limit_of(max_work, options.limits.work);
  options.check_hash = check_hash != 0;
  options.measure = [&](const unflip::Graph& graph, unflip::Size memory) {
    network->needs = unflip::Engine::needs(graph, "", 1);
    network->needs.load_memory += memory;
    unflip::check_limits(network->needs, options.limits);
  };
  unflip::Graph graph = unflip::load_graph(file, size, options);
  std::free(file);
  network->engine = unflip::Engine::create(std::move(graph), "", 1);
  network->workspace = network->engine->workspace();
  unflip::make_buffers(*network);
  return network;
}

UNFLIP_EXPORT("description") const char* unflip_description(const Network* network) { return network->description.c_str(); }

// pixels: reads them instead of floats, which must be finite. timed: adds the time of each op to its seconds. It does not fail.
UNFLIP_EXPORT("run") void unflip_run(Network* network, int pixels, int timed) {
  float* outputs[4096];  // the most that a file may have
  for (size_t o = 0; o < network->outputs.size(); o++) outputs[o] = network->outputs[o].data();
  double* seconds = timed ? network->seconds.data() : nullptr;
  if (pixels) return network->engine->run_pixels(network->pixels.data(), outputs, 1, *network->workspace, nullptr, seconds);
  network->engine->run(network->input.data(), outputs, 1, *network->workspace, nullptr, seconds);
}

}  // extern "C"
