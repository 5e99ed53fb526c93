// The C API (unflip.h): files, errors as text, and workspaces for many threads that run one model at the same time. More than 400
// lines, because every function of the header is here, with its checks.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine.h"
#include "graph.h"
#include "printable.h"
#include "thread_pool.h"
#include "unflip.h"

#ifndef UNFLIP_VERSION
#define UNFLIP_VERSION "unknown"
#endif

namespace fs = std::filesystem;
using unflip::Engine;
using unflip::ThreadPool;
using unflip::Workspace;

struct unflip_model {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<ThreadPool> pool;  // null if there is only one thread
  int threads = 1;
  unflip::Needs needs;
  std::vector<std::string> names;
  std::mutex mutex;
  std::vector<std::unique_ptr<Workspace>> idle;
};

namespace {

constexpr int kMaxThreads = 1024;
constexpr uintmax_t kMaxFile = uintmax_t{1} << 31;

thread_local char error_text[8192];  // not a string: keeping an error must not need memory

// Text that does not fit is cut, but not within a character.
void keep_error(std::string_view text) {
  size_t size = std::min(text.size(), sizeof error_text - 1);
  if (size < text.size())
    while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  text.copy(error_text, size);
  error_text[size] = '\0';
}

// Calls an action that may throw and keeps its error as text.
template <typename Result, typename Action>
Result guarded(Result on_error, Action action) noexcept {
  try {
    try {
      return action();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      keep_error(unflip::printable(error.what()));  // it may quote the file
    }
  } catch (const std::bad_alloc&) {
    keep_error("not enough memory");
  } catch (...) {
    keep_error("unknown error");
  }
  return on_error;
}

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

#if defined(_WIN32)  // paths are UTF-8 here, and UTF-16 there
fs::path path_of(const char* text) { return fs::u8path(text); }
File opened(const fs::path& path) { return File(_wfopen(path.c_str(), L"rb"), &std::fclose); }
#else
fs::path path_of(const char* text) { return text; }
File opened(const fs::path& path) { return File(std::fopen(path.c_str(), "rb"), &std::fclose); }
#endif

std::vector<uint8_t> read_file(const fs::path& path, const unflip::Limits& limits) {
  const fs::file_status status = fs::status(path);
  if (!fs::exists(status)) fail("the file does not exist");
  if (fs::is_directory(status)) fail("this is a folder, not a file");
  if (!fs::is_regular_file(status)) fail("this is not a regular file");
  const uintmax_t size = fs::file_size(path);
  if (size > kMaxFile) fail("larger than 2^31 bytes");
  unflip::check_memory(static_cast<int64_t>(size), limits);
  const File file = opened(path);
  if (!file) fail("it cannot be opened");
  std::vector<uint8_t> data(static_cast<size_t>(size));
  if (std::fread(data.data(), 1, data.size(), file.get()) != data.size()) fail("it could not be read completely");
  return data;
}

int checked_threads(int threads) {
  if (threads < 0 || threads > kMaxThreads)
    fail("threads must be 1 .. 1024, or 0 for one per core, not " + std::to_string(threads));
  if (threads > 0) return threads;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return cores < 1 ? 1 : cores > kMaxThreads ? kMaxThreads : cores;
}

// UNFLIP_ISA, or empty for the best set.
std::string chosen_isa() {
  const char* wanted = std::getenv("UNFLIP_ISA");
  if (wanted == nullptr || *wanted == '\0') return "";
  std::string all;
  for (const std::string& isa : unflip::instruction_sets()) {
    if (isa == wanted) return isa;
    all += (all.empty() ? "" : ", ") + isa;
  }
  fail(std::string("UNFLIP_ISA is '") + wanted + "', but this CPU and build support only " + all);
}

int64_t checked_limit(uint64_t wanted, int64_t otherwise) {
  if (wanted == 0) return otherwise;
  return static_cast<int64_t>(std::min<uint64_t>(wanted, std::numeric_limits<int64_t>::max() - 1));
}

unflip::Limits limits_of(const unflip_limits* given) {
  unflip::Limits limits;
  if (given == nullptr) return limits;
  limits.memory = checked_limit(given->max_memory, limits.memory);
  limits.work = checked_limit(given->max_work, limits.work);
  return limits;
}

unflip_model* make_model(const uint8_t* data, size_t size, int threads, const unflip::Limits& limits) {
  auto model = std::make_unique<unflip_model>();
  model->threads = checked_threads(threads);
  const std::string isa = chosen_isa();
  unflip::LoadOptions options;
  options.limits = limits;
  options.measure = [&](const unflip::Graph& graph, unflip::Size memory) {
    model->needs = Engine::needs(graph, isa, model->threads);
    model->needs.load_memory += memory;
    unflip::check_limits(model->needs, limits);
  };
  model->engine = Engine::create(unflip::load_graph(data, size, options), isa, model->threads);
  if (model->threads > 1) model->pool = std::make_unique<ThreadPool>(model->threads);
  for (const unflip::Op& op : model->engine->graph().ops) model->names.push_back(unflip::kind_name(op) + (" " + op.name));
  return model.release();
}

// A workspace for the duration of a run. Returned workspaces are kept, so there are as many as there were runs at the same time.
//
// In a child of fork(), the lock stays taken forever if another thread of the parent had it. So nobody waits long for it: a run
// without the lock makes a workspace of its own and frees it.
class Lease {
 public:
  explicit Lease(unflip_model& model) : model_(model) {
    if (const auto lock = lock_soon(); lock && !model.idle.empty()) {
      workspace_ = std::move(model.idle.back());
      model.idle.pop_back();
    }
    if (!workspace_) workspace_ = model.engine->workspace();
  }
  ~Lease() {
    try {
      if (const auto lock = lock_soon()) model_.idle.push_back(std::move(workspace_));
    } catch (...) {  // no memory for the list: free the workspace
    }
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Workspace& workspace() { return *workspace_; }

 private:
  std::unique_lock<std::mutex> lock_soon() {
    std::unique_lock<std::mutex> lock(model_.mutex, std::try_to_lock);
    for (int i = 0; i < 1000 && !lock; ++i) {
      std::this_thread::yield();
      (void)lock.try_lock();
    }
    return lock;
  }

  unflip_model& model_;
  std::unique_ptr<Workspace> workspace_;
};

// Comparisons with NaN are false, so NaN would silently become a bit: -1 in one network, 0 in another. An infinity becomes NaN in
// the first sum of two of them.
void refuse_not_finite(const float* input, int batch, const unflip::Shape& shape) {
  const int64_t size = shape.size();
  for (int64_t sample = 0; sample < batch; ++sample) {
    const float* values = input + sample * size;
    bool found = false;  // no branch in the loop, so that it runs at the speed of memory
    for (int64_t i = 0; i < size; ++i) found |= values[i] - values[i] != 0;  // NaN for both, which differs from 0
    if (!found) continue;
    int64_t at = 0;
    while (std::isfinite(values[at])) ++at;
    const int64_t column = at % shape.width, row = at / shape.width % shape.height, channel = at / shape.width / shape.height;
    fail(std::string("the input has ") + (std::isnan(values[at]) ? "a NaN" : "an infinity") + ": sample " +
         std::to_string(sample) + ", channel " + std::to_string(channel) + ", row " + std::to_string(row) + ", column " +
         std::to_string(column));
  }
}

// Functions for one output cannot return several.
void refuse_several(const unflip_model* model, const char* instead) {
  const size_t count = model->engine->graph().outputs.size();
  if (count != 1) fail("this network has " + std::to_string(count) + " outputs: call " + instead);
}

void check_arguments(const unflip_model* model, const void* input, int batch, float* const* outputs) {
  if (model == nullptr || input == nullptr || outputs == nullptr) fail("model, input and outputs must not be NULL");
  for (int i = 0; i < unflip_outputs(model); ++i)
    if (outputs[i] == nullptr) fail("outputs[" + std::to_string(i) + "] must not be NULL");
  if (batch < 1) fail("the batch must be 1 or more, not " + std::to_string(batch));
}

// seconds: null to measure no times.
int run_outputs(unflip_model* model, const float* input, int batch, float* const* outputs, double* seconds) {
  return guarded(1, [&] {
    check_arguments(model, input, batch, outputs);
    refuse_not_finite(input, batch, model->engine->graph().input);
    Lease lease(*model);
    model->engine->run(input, outputs, batch, lease.workspace(), model->pool.get(), seconds);
    return 0;
  });
}

int run(unflip_model* model, const float* input, int batch, float* output, double* seconds, const char* instead) {
  const int wrong = guarded(1, [&] {
    if (model == nullptr || input == nullptr || output == nullptr) fail("model, input and output must not be NULL");
    refuse_several(model, instead);
    return 0;
  });
  return wrong ? wrong : run_outputs(model, input, batch, &output, seconds);
}

int refuse_null_seconds() {
  return guarded(1, []() -> int { fail("seconds must not be NULL"); });
}

void copy_shape(const unflip::Shape& from, int shape[3]) {
  if (shape == nullptr) fail("shape must not be NULL");
  shape[0] = from.channels, shape[1] = from.height, shape[2] = from.width;
}

// Element number `index`. what: "op", for messages.
template <typename Elements>
const auto& checked(const Elements& elements, int index, const std::string& what) {
  if (index < 0 || static_cast<size_t>(index) >= elements.size())
    fail(what + " " + std::to_string(index) + " does not exist: there are " + std::to_string(elements.size()) +
         ", numbered from 0");
  return elements[static_cast<size_t>(index)];
}

// A property of a model, or `on_error` if the model is NULL.
template <typename Result, typename Get>
Result property(const unflip_model* model, Result on_error, Get get) noexcept {
  return guarded(on_error, [&] {
    if (model == nullptr) fail("model must not be NULL");
    return static_cast<Result>(get(*model));
  });
}

}  // namespace

extern "C" {

const char* unflip_error(void) { return error_text; }
const char* unflip_version(void) { return UNFLIP_VERSION; }

unflip_model* unflip_load(const char* path, int threads, const unflip_limits* limits) {
  return guarded(static_cast<unflip_model*>(nullptr), [&] {
    if (path == nullptr) fail("the path must not be NULL");
    try {
      const unflip::Limits checked = limits_of(limits);
      const std::vector<uint8_t> data = read_file(path_of(path), checked);
      return make_model(data.data(), data.size(), threads, checked);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(std::string(path) + ": " + error.what());
    }
  });
}

unflip_model* unflip_load_memory(const void* data, size_t size, int threads, const unflip_limits* limits) {
  return guarded(static_cast<unflip_model*>(nullptr), [&] {
    if (data == nullptr && size > 0) fail("the data must not be NULL");
    return make_model(static_cast<const uint8_t*>(data), size, threads, limits_of(limits));
  });
}

void unflip_free(unflip_model* model) { delete model; }

uint64_t unflip_memory_needed(const unflip_model* model) {
  return property<uint64_t>(model, 0, [](const unflip_model& m) { return m.needs.memory().value(); });
}

uint64_t unflip_work_needed(const unflip_model* model) {
  return property<uint64_t>(model, 0, [](const unflip_model& m) { return m.needs.run_work.value(); });
}

size_t unflip_printable(const char* text, char* to, size_t size) {
  return guarded(static_cast<size_t>(-1), [&] {
    if (text == nullptr || (to == nullptr && size > 0)) fail("text and its copy must not be NULL");
    const std::string safe = unflip::printable(text);
    if (size == 0) return safe.size();
    const size_t count = std::min(safe.size(), size - 1);
    std::copy(safe.begin(), safe.begin() + static_cast<std::ptrdiff_t>(count), to);
    to[count] = '\0';
    return safe.size();
  });
}

int unflip_input_shape(const unflip_model* model, int shape[3]) {
  if (shape != nullptr) copy_shape({}, shape);
  return property(model, 1, [&](const unflip_model& m) {
    copy_shape(m.engine->graph().input, shape);
    return 0;
  });
}

int unflip_output_shape(const unflip_model* model, int shape[3]) {
  if (shape != nullptr) copy_shape({}, shape);
  return property(model, 1, [&](const unflip_model& m) {
    if (shape == nullptr) fail("shape must not be NULL");
    refuse_several(&m, "unflip_shape_of_output");
    return unflip_shape_of_output(&m, 0, shape);
  });
}

int unflip_outputs(const unflip_model* model) {
  return property(model, 0, [](const unflip_model& m) { return m.engine->graph().outputs.size(); });
}

const char* unflip_output_name(const unflip_model* model, int output) {
  return property(model, "",
                  [&](const unflip_model& m) { return checked(m.engine->graph().outputs, output, "output").name.c_str(); });
}

int unflip_shape_of_output(const unflip_model* model, int output, int shape[3]) {
  if (shape != nullptr) copy_shape({}, shape);
  return property(model, 1, [&](const unflip_model& m) {
    const unflip::Graph& graph = m.engine->graph();
    copy_shape(graph.shape(checked(graph.outputs, output, "output").value), shape);
    return 0;
  });
}

int unflip_output_dims(const unflip_model* model, int output) {
  return property(model, 0, [&](const unflip_model& m) {
    const unflip::Output& found = checked(m.engine->graph().outputs, output, "output");
    const unflip::Shape& shape = m.engine->graph().shape(found.value);
    return shape.height == 1 && shape.width == 1 && !found.pixels ? 1 : 3;
  });
}

const char* unflip_structure(const unflip_model* model) {
  return property(model, "", [](const unflip_model& m) {
    switch (m.engine->graph().structure) {
      case unflip::Structure::Tuple: return "tuple";
      case unflip::Structure::Dict: return "dict";
      default: return "tensor";
    }
  });
}

int unflip_run(unflip_model* model, const float* input, int batch, float* output) {
  return run(model, input, batch, output, nullptr, "unflip_run_outputs");
}

int unflip_profile(unflip_model* model, const float* input, int batch, float* output, double* seconds) {
  if (seconds == nullptr) return refuse_null_seconds();
  return run(model, input, batch, output, seconds, "unflip_profile_outputs");
}

int unflip_run_outputs(unflip_model* model, const float* input, int batch, float* const* outputs) {
  return run_outputs(model, input, batch, outputs, nullptr);
}

int unflip_profile_outputs(unflip_model* model, const float* input, int batch, float* const* outputs, double* seconds) {
  if (seconds == nullptr) return refuse_null_seconds();
  return run_outputs(model, input, batch, outputs, seconds);
}

int unflip_takes_pixels(const unflip_model* model) {
  return property(model, 0, [](const unflip_model& m) { return m.engine->takes_pixels() ? 1 : 0; });
}

int unflip_run_pixels(unflip_model* model, const uint8_t* input, int batch, float* const* outputs, double* seconds) {
  return guarded(1, [&] {
    check_arguments(model, input, batch, outputs);
    if (!model->engine->takes_pixels())
      fail("this network takes floats, not pixels: it has no 8-bit first convolution, or no normalization of images");
    Lease lease(*model);
    model->engine->run_pixels(input, outputs, batch, lease.workspace(), model->pool.get(), seconds);
    return 0;
  });
}

int unflip_ops(const unflip_model* model) {
  return property(model, 0, [](const unflip_model& m) { return m.names.size(); });
}

const char* unflip_op_name(const unflip_model* model, int op) {
  return property(model, "", [&](const unflip_model& m) { return checked(m.names, op, "op").c_str(); });
}

int unflip_labels(const unflip_model* model) {
  return property(model, 0, [](const unflip_model& m) { return m.engine->graph().labels.size(); });
}

const char* unflip_label(const unflip_model* model, int label) {
  return property(model, "", [&](const unflip_model& m) { return checked(m.engine->graph().labels, label, "label").c_str(); });
}

int unflip_has_preprocess(const unflip_model* model) {
  return property(model, 0, [](const unflip_model& m) { return !m.engine->graph().mean.empty(); });
}

int unflip_preprocess(const unflip_model* model, double* mean, double* deviation) {
  return property(model, 1, [&](const unflip_model& m) {
    if (mean == nullptr || deviation == nullptr) fail("mean and deviation must not be NULL");
    const unflip::Graph& graph = m.engine->graph();
    std::fill(mean, mean + graph.input.channels, 0.0);
    std::fill(deviation, deviation + graph.input.channels, 1.0);
    std::copy(graph.mean.begin(), graph.mean.end(), mean);
    std::copy(graph.deviation.begin(), graph.deviation.end(), deviation);
    return 0;
  });
}

const char* unflip_isa(const unflip_model* model) {
  return property(model, "", [](const unflip_model& m) { return m.engine->isa().c_str(); });
}

int unflip_threads(const unflip_model* model) {
  return property(model, 0, [](const unflip_model& m) { return m.threads; });
}

}  // extern "C"
