// Fuzzes loader, engine and C API: see check.h for the rules that every file must obey, and mutate.h for how files are made.
//
//   with clang: libFuzzer.   fuzz_load CORPUS -max_total_time=600 -max_len=1000000
//   with gcc:   the loop below, with the same arguments. Not guided by coverage, but it reaches deep code too.
//
// fuzz_load FILE checks one file, such as crash.unflip, which a failure leaves behind.
#include <algorithm>
#include <cstdint>

#include "check.h"
#include "mutate.h"

namespace {

fuzz::Counts counts;

unsigned hash_of(const uint8_t* data, size_t size) {  // FNV-1a
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 16777619u;
  return hash;
}

// Few files may be as large as the default limits allow, because most of the time goes to large ones.
unflip::Limits limits_of(unsigned seed) {
  unflip::Limits limits;
  const unsigned share = seed % 10'000;
  limits.work = share < 9'000 ? 500'000 : share < 9'950 ? 10'000'000 : share < 9'999 ? 200'000'000 : limits.work;
  if (share < 9'950) limits.memory = 1 << 28;
  return limits;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const unsigned hash = hash_of(data, size);
  fuzz::check(data, size, limits_of(hash), hash, counts);
  return 0;
}

#ifdef UNFLIP_LIBFUZZER

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  fuzz::Random random(seed);
  if (random.below(8) == 0) return LLVMFuzzerMutate(data, size, most);
  const fuzz::Bytes bytes = fuzz::mutated(fuzz::Bytes(data, data + size), limits_of(seed), random);
  if (bytes.size() > most) return size;
  std::copy(bytes.begin(), bytes.end(), data);
  return bytes.size();
}

#else

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_set_death_callback(void (*callback)(void));
#endif

namespace {

fuzz::Bytes current;  // so that an input that crashes can be inspected

void keep_current() {
  std::ofstream("crash.unflip", std::ios::binary)
      .write(reinterpret_cast<const char*>(current.data()), static_cast<std::streamsize>(current.size()));
  std::fprintf(stderr, "the input is in crash.unflip\n");
}

fuzz::Bytes read(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return fuzz::Bytes(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
}

void check_current() { LLVMFuzzerTestOneInput(current.data(), current.size()); }

void print_counts() {
  std::printf("%llu files, of which %llu were loaded and %llu run\n", static_cast<unsigned long long>(counts.files),
              static_cast<unsigned long long>(counts.loaded), static_cast<unsigned long long>(counts.ran));
  std::fflush(stdout);
}

// Mutates files until the time is over. Files that load become seeds, so that mutations accumulate.
void fuzz_for(double seconds, unsigned seed, const std::vector<fuzz::Bytes>& files) {
  using Clock = std::chrono::steady_clock;
  fuzz::Random random(seed);
  std::vector<fuzz::Bytes> valid = files;
  const auto start = Clock::now(),
             end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  auto report = start + std::chrono::minutes(1);
  while (Clock::now() < end) {
    const fuzz::Bytes& from = random.chance(30) ? random.of(files) : random.of(valid);
    current = fuzz::mutated(from, limits_of(static_cast<unsigned>(random.below(10'000))), random);
    const uint64_t before = counts.loaded;
    check_current();
    if (Clock::now() > report) {
      print_counts();
      report += std::chrono::minutes(1);
    }
    if (counts.loaded == before || current.size() > 100'000) continue;
    if (valid.size() < 1000) {
      valid.push_back(current);
    } else {
      valid[random.below(valid.size())] = current;
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  double seconds = 10;
  unsigned seed = 1;
  std::vector<fuzz::Bytes> files;
  std::string single;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument.rfind("-max_total_time=", 0) == 0) {
      seconds = std::atof(argument.c_str() + 16);
    } else if (argument.rfind("-seed=", 0) == 0) {
      seed = static_cast<unsigned>(std::atoi(argument.c_str() + 6));
    } else if (std::filesystem::is_directory(argument)) {
      for (const auto& entry : std::filesystem::directory_iterator(argument)) files.push_back(read(entry.path()));
    } else {
      single = argument;
    }
  }
  if (files.empty() == single.empty()) {
    std::fprintf(stderr, "usage: fuzz_load CORPUS [-max_total_time=SECONDS] [-seed=NUMBER], or fuzz_load FILE\n");
    return 2;
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(keep_current);
#endif
  std::signal(SIGABRT, [](int) { keep_current(); });
  if (!single.empty()) {
    current = read(single);
    check_current();
    print_counts();
    return 0;
  }
  for (const fuzz::Bytes& file : files) {
    current = file;
    fuzz::check(current.data(), current.size(), unflip::Limits(), 0, counts);
  }
  if (counts.loaded != files.size()) {
    std::fprintf(stderr, "%llu of %zu seeds can be loaded\n", static_cast<unsigned long long>(counts.loaded), files.size());
    return 1;
  }
  fuzz_for(seconds, seed, files);
  print_counts();
  return 0;
}

#endif
