#include "check.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../tests/allocations.h"
#include "engine.h"
#include "graph.h"
#include "random.h"
#include "thread_pool.h"
#include "unflip.h"

namespace fuzz {
namespace {

constexpr int kThreads = 3;
constexpr double kSecondsPerUnit = 2e-7;  // a sanitizer, and other programs on the machine, may slow down by a factor of 100
constexpr double kSecondsFree = 5;

using Clock = std::chrono::steady_clock;

[[noreturn]] void wrong(const std::string& what) {
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::abort();
}

void require(bool right, const std::string& what) {
  if (!right) wrong(what);
}

// Ends the program if the action takes much longer than its bound.
template <class Action>
void timed(unflip::Size work, const std::string& what, Action action) {
  const auto start = Clock::now();
  action();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const double most = kSecondsFree + kSecondsPerUnit * static_cast<double>(work.value());
  require(seconds < most,
          what + " took " + std::to_string(seconds) + " s for " + std::to_string(work.value()) + " units of work");
}

// The instruction sets that users have, and one of those for tests.
std::vector<std::string> some_sets(Random& random) {
  std::vector<std::string> sets = unflip::instruction_sets(), others = {"portable-look-up", "portable-popcount"};
  if (std::find(sets.begin(), sets.end(), "avx2") != sets.end()) others.push_back("avx2-intrinsics");
  sets.push_back(random.of(others));
  return sets;
}

struct Loaded {
  unflip::Needs needs;
  std::unique_ptr<unflip::Engine> engine;  // null if the file was refused
};

// The whole way from bytes to an engine, as in the C API, with its memory measured.
Loaded load(const uint8_t* data, size_t size, const unflip::Limits& limits, const std::string& isa, int threads) {
  Loaded loaded;
  unflip::LoadOptions options;
  options.limits = limits;
  options.measure = [&](const unflip::Graph& graph, unflip::Size memory) {
    loaded.needs = unflip::Engine::needs(graph, isa, threads);
    loaded.needs.load_memory += memory;
    unflip::check_limits(loaded.needs, limits);
  };
  const int64_t peak = allocations::peak_of([&] {
    try {
      unflip::Graph graph = unflip::load_graph(data, size, options);
      timed(loaded.needs.load_work, "loading with " + isa,
            [&] { loaded.engine = unflip::Engine::create(std::move(graph), isa, threads); });
    } catch (const std::runtime_error&) {  // the only way to refuse a file
    }
  });
  const int64_t most = loaded.engine ? loaded.needs.load_memory.value() : limits.memory;
  require(peak <= most,
          "loading with " + isa + " took " + std::to_string(peak) + " bytes; the bound was " + std::to_string(most));
  if (loaded.engine) {
    const int64_t running = static_cast<int64_t>(loaded.engine->workspace_bytes()), bound = loaded.needs.run_memory.value();
    require(running <= bound,
            "running with " + isa + " takes " + std::to_string(running) + " bytes; the bound was " + std::to_string(bound));
  }
  return loaded;
}

std::vector<float> input_of(const unflip::Graph& graph, int batch, Random& random) {
  std::vector<float> input(static_cast<size_t>(batch * graph.input.size()));
  const bool odd = random.chance(20);  // zeros, tiny and huge numbers
  for (size_t i = 0; i < input.size(); ++i) {
    if (i < 4000) input[i] = odd ? random.value() : static_cast<float>(static_cast<int>(i * 37 % 41) - 20) / 8;
    if (i >= 4000) input[i] = input[i % 3989];
  }
  return input;
}

// All outputs, one after the other, and where each begins.
struct Results {
  explicit Results(const unflip::Graph& graph, int batch) {
    std::vector<size_t> starts;
    size_t total = 0;
    for (size_t o = 0; o < graph.outputs.size(); ++o) {
      starts.push_back(total);
      total += static_cast<size_t>(batch * graph.output_shape(o).size());
    }
    numbers.assign(total, -77.f);
    for (size_t start : starts) places.push_back(numbers.data() + start);
  }
  Results(Results&&) = default;

  std::vector<float> numbers;
  std::vector<float*> places;
};

void require_same(const std::vector<float>& a, const std::vector<float>& b, const std::string& how) {
  for (size_t i = 0; i < a.size(); ++i) {
    const bool same = std::memcmp(&a[i], &b[i], sizeof(float)) == 0 || (std::isnan(a[i]) && std::isnan(b[i]));
    if (same) continue;
    char text[200];
    std::snprintf(text, sizeof text, "output %zu is %.9g with portable code and %.9g with ", i, static_cast<double>(a[i]),
                  static_cast<double>(b[i]));
    wrong(text + how);
  }
}

// Pixels must give the bits of the normalized floats. found and places: space for the outputs.
void check_pixels(unflip_model* model, size_t size, int batch, const std::vector<double>& mean,
                  const std::vector<double>& deviation, std::vector<float>& found, const std::vector<float*>& places) {
  std::vector<uint8_t> pixels(size);
  std::vector<float> floats(size);
  const size_t plane = size / static_cast<size_t>(batch) / mean.size();
  for (size_t i = 0; i < size; ++i) {
    const size_t channel = i / plane % mean.size();
    pixels[i] = static_cast<uint8_t>(i * 73 % 256);
    floats[i] =
        (static_cast<float>(pixels[i]) / 255.f - static_cast<float>(mean[channel])) / static_cast<float>(deviation[channel]);
  }
  require(unflip_run_outputs(model, floats.data(), batch, places.data()) == 0, "normalized floats are refused");
  const std::vector<float> expected = found;
  require(unflip_run_pixels(model, pixels.data(), batch, places.data(), nullptr) == 0, "pixels are refused");
  require_same(expected, found, "pixels instead of floats");
}

// The same file through the C API, with all it says about the network.
void check_c_api(const uint8_t* data, size_t size, const unflip::Limits& limits, const std::vector<float>& input, int batch,
                 const std::vector<float>& expected) {
  const unflip_limits given = {static_cast<uint64_t>(limits.memory), static_cast<uint64_t>(limits.work)};
  unflip_model* model = unflip_load_memory(data, size, 1, &given);
  if (model == nullptr) {  // another instruction set may need more
    require(std::strstr(unflip_error(), "the limit is") != nullptr,
            std::string("the C API refuses what the loader loads: ") + unflip_error());
    return;
  }
  char text[100];
  for (int i = 0; i < unflip_labels(model); ++i) unflip_printable(unflip_label(model, i), text, sizeof text);
  for (int i = 0; i < unflip_ops(model); ++i) unflip_printable(unflip_op_name(model, i), text, sizeof text);
  int sample[3];
  require(unflip_input_shape(model, sample) == 0, "the input has no shape");
  std::vector<double> mean(static_cast<size_t>(sample[0])), deviation(mean.size());
  unflip_preprocess(model, mean.data(), deviation.data());
  std::vector<float> found(expected.size());
  std::vector<float*> places;
  size_t at = 0;
  for (int o = 0, shape[3]; o < unflip_outputs(model); ++o) {
    places.push_back(found.data() + at);
    require(unflip_shape_of_output(model, o, shape) == 0, "an output has no shape");
    at += static_cast<size_t>(batch) * static_cast<size_t>(shape[0]) * static_cast<size_t>(shape[1]) *
          static_cast<size_t>(shape[2]);
  }
  require(at == found.size(), "the outputs have other sizes in the C API");
  require(unflip_run_outputs(model, input.data(), batch, places.data()) == 0,
          std::string("the C API does not run: ") + unflip_error());
  require_same(expected, found, "the C API");
  if (unflip_takes_pixels(model)) check_pixels(model, input.size(), batch, mean, deviation, found, places);
  unflip_free(model);
}

}  // namespace

void check(const uint8_t* data, size_t size, const unflip::Limits& limits, unsigned seed, Counts& counts) {
  static unflip::ThreadPool pool(kThreads);
  ++counts.files;
  Random random(seed);
  Loaded loaded = load(data, size, limits, "portable", 1);
  if (!loaded.engine) {
    const unflip_limits given = {static_cast<uint64_t>(limits.memory), static_cast<uint64_t>(limits.work)};
    unflip_model* model = unflip_load_memory(data, size, 1, &given);  // another instruction set may need less
    require(model != nullptr || *unflip_error() != '\0', "a refusal without a reason");
    unflip_free(model);
    return;
  }
  ++counts.loaded;
  const unflip::Graph& graph = loaded.engine->graph();
  const int batch = random.pick({1, 1, 2, 4});
  const std::vector<float> input = input_of(graph, batch, random);
  Results expected(graph, batch);
  timed(4 * loaded.needs.run_work, "running",
        [&] { loaded.engine->run(input.data(), expected.places.data(), batch, *loaded.engine->workspace(), nullptr, nullptr); });
  for (const std::string& isa : some_sets(random)) {
    const int threads = random.chance(60) ? kThreads : 1;
    const bool separate = random.chance(70);
    const Loaded other = load(data, size, limits, isa, threads);
    if (!other.engine) continue;  // it needs more memory
    Results results(graph, batch);
    const auto workspace = other.engine->workspace(separate ? unflip::Layout::Separate : unflip::Layout::Shared);
    timed(4 * other.needs.run_work, "running with " + isa, [&] {
      other.engine->run(input.data(), results.places.data(), batch, *workspace, threads > 1 ? &pool : nullptr, nullptr);
    });
    require_same(expected.numbers, results.numbers,
                 isa + (threads > 1 ? ", three threads" : "") + (separate ? ", separate values" : ""));
  }
  check_c_api(data, size, limits, input, batch, expected.numbers);
  ++counts.ran;
}

}  // namespace fuzz
