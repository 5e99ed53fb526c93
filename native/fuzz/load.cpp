// Fuzzes the loader. If the loaded network is small enough, it is run with every instruction set, and all results must agree.
//
// The hash is not checked: no mutated file would pass, and an attacker can compute it. Mutations keep the container's frame (the
// header's length); otherwise few files would pass the first check.
//
//   with clang: libFuzzer.   fuzz_load CORPUS -max_total_time=600
//   with gcc:   the mutator below, with the same arguments. Not guided by coverage, but it reaches deep code too.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine.h"
#include "graph.h"

namespace {

using Bytes = std::vector<uint8_t>;

uint64_t loaded = 0, ran = 0;

int64_t work_of(const unflip::Graph& graph) {
  int64_t work = graph.input.size();
  for (const unflip::Op& op : graph.ops) {
    const unflip::Convolution& c = op.conv;
    const int64_t window = op.kind == unflip::OpKind::Conv ? int64_t{c.channels} * c.kernel.h * c.kernel.w * std::max(c.bases, 1)
                                                           : int64_t{op.pool.kernel.h} * op.pool.kernel.w;
    if (op.shape.size() > 1 << 16 || window > 1 << 16) return INT64_MAX;
    // Padding is also read, and it may be much larger than the output.
    work += graph.shape(op.inputs[0]).size() + op.shape.size() * window * std::max<int64_t>(1, op.quantizer.steps()) + c.top +
            c.left + c.bottom + c.right;
  }
  for (size_t o = 0; o < graph.outputs.size(); ++o) work += graph.output_shape(o).size();
  return work;
}

// The outputs, concatenated.
std::vector<float> outputs_of(const unflip::Graph& graph, const std::string& isa) {
  const int batch = 2;
  const auto engine = unflip::Engine::create(graph, isa, 1);
  const auto workspace = engine->workspace();
  std::vector<float> input(static_cast<size_t>(batch * graph.input.size()));
  for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(static_cast<int>(i * 37 % 41) - 20) / 8;
  std::vector<size_t> starts = {0};
  for (size_t o = 0; o < graph.outputs.size(); ++o)
    starts.push_back(starts[o] + static_cast<size_t>(batch * graph.output_shape(o).size()));
  std::vector<float> output(starts.back());
  std::vector<float*> places;
  for (size_t o = 0; o < graph.outputs.size(); ++o) places.push_back(output.data() + starts[o]);
  engine->run(input.data(), places.data(), batch, *workspace, nullptr, nullptr);
  return output;
}

void require_same(const std::vector<float>& a, const std::vector<float>& b, const std::string& isa) {
  for (size_t i = 0; i < a.size(); ++i) {
    const bool same = std::memcmp(&a[i], &b[i], sizeof(float)) == 0 || (std::isnan(a[i]) && std::isnan(b[i]));
    if (same) continue;
    std::fprintf(stderr, "output %zu is %.9g with portable code and %.9g with %s\n", i, static_cast<double>(a[i]),
                 static_cast<double>(b[i]), isa.c_str());
    std::abort();
  }
}

void run(const unflip::Graph& graph) {
  const std::vector<float> expected = outputs_of(graph, "portable");
  for (const std::string& isa : unflip::instruction_sets()) require_same(expected, outputs_of(graph, isa), isa);
}

// --- mutations that keep a file's frame: length, header, data

struct File {
  std::string header;
  Bytes data;
};

bool split(const uint8_t* bytes, size_t size, File& file) {
  if (size < 8) return false;
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  if (length > size - 8) return false;
  file.header.assign(reinterpret_cast<const char*>(bytes) + 8, static_cast<size_t>(length));
  file.data.assign(bytes + 8 + length, bytes + size);
  return true;
}

Bytes joined(const File& file) {
  Bytes bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<uint8_t>(static_cast<uint64_t>(file.header.size()) >> (8 * i)));
  bytes.insert(bytes.end(), file.header.begin(), file.header.end());
  bytes.insert(bytes.end(), file.data.begin(), file.data.end());
  return bytes;
}

using Random = std::minstd_rand;

size_t below(Random& random, size_t limit) { return limit == 0 ? 0 : random() % limit; }

const char* const kNumbers[] = {"0",     "1",    "2",          "3",          "4",          "5",
                                "7",     "8",    "9",          "16",         "63",         "64",
                                "65",    "100",  "255",        "256",        "65535",      "65536",
                                "65537", "-1",   "2147483647", "2147483648", "4294967296", "9223372036854775807",
                                "1e38",  "1e39", "1e400",      "-0.0",       "0.5",        "1e-45",
                                "null",  "true", "[]",         "{}"};

bool in_number(char c) { return (c >= '0' && c <= '9') || c == '-' || c == '.'; }

// Replaces a number by another.
void change_number(std::string& text, Random& random) {
  std::vector<size_t> starts;
  for (size_t i = 1; i < text.size(); ++i)
    if (in_number(text[i]) && (text[i - 1] == ':' || text[i - 1] == '[' || text[i - 1] == ',')) starts.push_back(i);
  if (starts.empty()) return;
  const size_t start = starts[below(random, starts.size())];
  size_t end = start;
  while (end < text.size() && in_number(text[end])) ++end;
  text.replace(start, end - start, kNumbers[below(random, std::size(kNumbers))]);
}

// Moves, deletes or duplicates the text between two commas.
void move_piece(std::string& text, Random& random) {
  std::vector<size_t> commas;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == ',') commas.push_back(i);
  if (commas.size() < 3) return;
  const size_t a = below(random, commas.size() - 1), b = below(random, commas.size() - 1);
  const std::string piece = text.substr(commas[a], commas[a + 1] - commas[a]);
  if (below(random, 3) == 0) {
    text.erase(commas[a], piece.size());
  } else if (below(random, 2) == 0) {
    text.insert(commas[b], piece);
  } else {
    text.replace(commas[b], commas[b + 1] - commas[b], piece);
  }
}

void change_word(std::string& text, Random& random) {
  static const std::vector<std::string> words = [] {
    std::vector<std::string> all = {"affine", "prelu",    "clamp", "add", "mul",    "planes", "levels",
                                    "sample", "channels", "gelu",  "elu", "true",   "false",  "t0",
                                    "t1",     "t2",       "F32",   "U8",  "output", "tuple",  "dict"};
    all.insert(all.end(), std::begin(unflip::kOpNames), std::end(unflip::kOpNames));
    return all;
  }();
  const std::string from = words[below(random, words.size())];
  std::vector<size_t> places;
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + 1)) places.push_back(at);
  if (!places.empty()) text.replace(places[below(random, places.size())], from.size(), words[below(random, words.size())]);
}

void change_bytes(uint8_t* bytes, size_t size, Random& random) {
  if (size == 0) return;
  static const uint8_t kBytes[] = {0, 1, 0x7F, 0x80, 0xFF};
  uint8_t& byte = bytes[below(random, size)];
  byte = below(random, 2) == 0 ? static_cast<uint8_t>(byte ^ (1u << below(random, 8))) : kBytes[below(random, std::size(kBytes))];
}

void mutate(File& file, Random& random) {
  switch (below(random, 8)) {
    case 0:
    case 1:
    case 2: return change_number(file.header, random);
    case 3: return move_piece(file.header, random);
    case 4: return change_word(file.header, random);
    case 5: return change_bytes(reinterpret_cast<uint8_t*>(file.header.data()), file.header.size(), random);
    case 6: return change_bytes(file.data.data(), file.data.size(), random);
    default: return file.data.resize(below(random, 4) == 0 ? below(random, file.data.size() + 1) : file.data.size());
  }
}

Bytes mutated(const uint8_t* bytes, size_t size, Random& random) {
  File file;
  if (!split(bytes, size, file)) return Bytes(bytes, bytes + size);
  for (size_t left = 1 + below(random, 3); left > 0; --left) mutate(file, random);
  return joined(file);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    unflip::LoadOptions options;
    options.check_hash = false;
    const unflip::Graph graph = unflip::load_graph(data, size, options);
    ++loaded;
    if (work_of(graph) > 1 << 22) return 0;
    run(graph);
    ++ran;
  } catch (const std::runtime_error&) {  // the only way to refuse a file
  }
  return 0;
}

#ifdef UNFLIP_LIBFUZZER

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  Random random(seed);
  if (below(random, 4) == 0) return LLVMFuzzerMutate(data, size, most);
  const Bytes bytes = mutated(data, size, random);
  if (bytes.size() > most) return size;
  std::copy(bytes.begin(), bytes.end(), data);
  return bytes.size();
}

#else

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_set_death_callback(void (*callback)(void));
#endif

namespace {

Bytes current;  // so that an input that crashes can be inspected

void keep_current() {
  std::ofstream("crash.unflip", std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()), static_cast<std::streamsize>(current.size()));
  std::fprintf(stderr, "the input is in crash.unflip\n");
}

std::vector<Bytes> read_corpus(const char* folder) {
  std::vector<Bytes> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream stream(entry.path(), std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  return files;
}

}  // namespace

int main(int count, char** arguments) {
  double seconds = 10;
  unsigned seed = 1;
  std::vector<Bytes> files;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument.rfind("-max_total_time=", 0) == 0) {
      seconds = std::atof(argument.c_str() + 16);
    } else if (argument.rfind("-seed=", 0) == 0) {
      seed = static_cast<unsigned>(std::atoi(argument.c_str() + 6));
    } else if (std::filesystem::is_directory(argument)) {
      files = read_corpus(arguments[i]);
    }
  }
  if (files.empty()) {
    std::fprintf(stderr, "usage: fuzz_load CORPUS [-max_total_time=SECONDS] [-seed=NUMBER]\n");
    return 2;
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(keep_current);
#endif
  for (const Bytes& file : files) LLVMFuzzerTestOneInput(file.data(), file.size());
  if (loaded != files.size()) {
    std::fprintf(stderr, "%llu of %zu seeds can be loaded\n", static_cast<unsigned long long>(loaded), files.size());
    return 1;
  }
  Random random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t runs = 0;
  std::vector<Bytes> valid = files;  // files that load become seeds, so that mutations accumulate
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    const Bytes& from = below(random, 2) == 0 ? files[below(random, files.size())] : valid[below(random, valid.size())];
    current = mutated(from.data(), from.size(), random);
    const uint64_t before = loaded;
    LLVMFuzzerTestOneInput(current.data(), current.size());
    if (loaded == before) continue;
    if (valid.size() < 1000) {
      valid.push_back(current);
    } else {
      valid[below(random, valid.size())] = current;
    }
  }
  std::printf("%llu files, of which %llu were loaded and %llu run\n", static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(loaded), static_cast<unsigned long long>(ran));
  return 0;
}

#endif
