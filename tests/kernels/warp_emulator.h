// Just enough of CUDA to run the kernels of src/unflip/kernels/*/*.cu in one thread of a CPU. On a device, they bring their
// instructions as inline PTX; without the compiler for GPUs they include this file, and what was an instruction is a
// function of the same name here. See `emulated` in conftest.py.
// This file has more than 400 lines, because a kernel includes one header in place of the device.
//
// Every thread of a block is a fiber. It runs until it meets the others: those of its warp in ldmatrix and mma, those
// of its block in __syncthreads. The last to arrive computes for all.
//
// Hardware leaves some orders open, and a kernel may be right by luck in one of them. So threads run forwards or
// backwards, and a copy (cp.async) lands at once or as late as it may: when its thread waits for it. Shared memory is
// full of NaN at first. What a device would punish, or should, is an error: lanes that meet in different instructions,
// copies and vectors (uint2, uint4, float2) that are not aligned, or outside of shared memory and of the kernel's
// arguments. Bank conflicts are counted.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp refuses to go to another stack
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define INLINE static inline
#define SHARED_MEMORY(type, name) static type* const name = (type*)emulator::shared
#define __global__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, gridDim;

namespace emulator {

constexpr int LANES = 32;
constexpr unsigned MOST_SHARED = 227 * 1024;
constexpr unsigned OUTSIDE = 1024;  // bytes before and after, that nobody may write to
constexpr int STACK = 64 * 1024;
constexpr int MOST_ARGUMENTS = 8;

alignas(1024) static unsigned char memory[OUTSIDE + MOST_SHARED + OUTSIDE];
static unsigned char* const shared = memory + OUTSIDE;

}  // namespace emulator

// ---------------------------------------------------------------------------------------------- fibers

namespace emulator {

enum Instruction { NONE, LDMATRIX, MMA, BARRIER };

struct Copy {
  unsigned to;
  const void* from;
  bool exists;
};

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  bool started, done;
  Instruction waits_in;  // NONE: can run
  unsigned in[6];        // operands of the instruction that it waits in, and what it gives
  float sum[4];
  unsigned address;
  std::vector<Copy> copies;  // on their way
  size_t copied;             // in all
};

struct Span {
  const char* begin;
  size_t bytes;
  bool writable;
};

struct Launch {  // and what is counted; as in conftest.py
  unsigned grid[3], threads, shared_bytes;
  int late_copies, backwards;
  uint64_t arguments[MOST_ARGUMENTS];  // pointers and numbers
  uint64_t bytes[MOST_ARGUMENTS];      // behind a pointer
  int64_t ldmatrix, mma;
  int64_t wavefronts;      // of ldmatrix: 4 each without bank conflicts
  int64_t copy_conflicts;  // of banks
};

static std::vector<std::unique_ptr<Fiber>> fibers;
static int count, current;  // threads of the block; the one that runs
static jmp_buf scheduler;
static Launch* launch;
static std::function<void()> kernel_call;
static std::vector<Span> spans;  // of global memory
static char problem[200];
static std::vector<std::vector<unsigned>> copy_banks;  // of eight threads, for each of their copies

inline void report(const char* what) {
  if (problem[0]) return;
  snprintf(problem, sizeof problem, "%s (block %u,%u thread %d)", what, blockIdx.x, blockIdx.y, current);
}

[[noreturn]] inline void fail(const char* what) {  // the fiber that runs
  report(what);
  _longjmp(scheduler, 1);
}

inline Fiber& self() { return *fibers[current]; }

inline void enter() {
  kernel_call();
  if (!self().copies.empty()) fail("a copy that nobody waited for");
  self().done = true;
  _longjmp(scheduler, 1);
}

inline void pause() {
  if (!_setjmp(self().at)) _longjmp(scheduler, 1);
}

inline void run(int thread) {
  current = thread;
  threadIdx.x = thread;
  Fiber& fiber = *fibers[thread];
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// Waits until all of [first, first + size) are in the same instruction; the last one does the work for all.
template <typename Work>
inline void together(Instruction instruction, int first, int size, Work work) {
  self().waits_in = instruction;
  for (int i = first; i < first + size; ++i) {
    if (fibers[i]->done) fail("a thread has ended that others wait for");
    if (fibers[i]->waits_in != instruction) return pause();
  }
  work(first);
  for (int i = first; i < first + size; ++i) fibers[i]->waits_in = NONE;
}

// ---------------------------------------------------------------------------------------------- memory

inline bool inside(const void* at, const void* begin, size_t bytes) {
  return (uintptr_t)at - (uintptr_t)begin < bytes;  // before it, the difference is huge
}

inline unsigned char* shared_at(unsigned address, unsigned bytes) {
  if (address % bytes) fail("an address in shared memory is not aligned");
  if (address < OUTSIDE || address - OUTSIDE + bytes > launch->shared_bytes) fail("an address outside shared memory");
  return memory + address;
}

inline void check_global(const void* at, unsigned bytes, bool writes) {
  for (const Span& span : spans)
    if (inside(at, span.begin, span.bytes)) {
      if ((uintptr_t)at % bytes) fail("an address in global memory is not aligned");
      if ((const char*)at + bytes > span.begin + span.bytes) break;
      if (writes && !span.writable) fail("a const argument is written to");
      return;
    }
  fail("an address outside the arguments");
}

// Of vectors as a whole, wherever they are. Those in registers are on the fiber's stack.
inline void check(const void* at, unsigned bytes, bool writes) {
  if (inside(at, self().stack.get(), STACK)) return;
  if (inside(at, memory, sizeof memory))
    shared_at((unsigned)((const unsigned char*)at - memory), bytes);
  else
    check_global(at, bytes, writes);
}

template <unsigned BYTES>
struct Checked {
  Checked() = default;
  Checked(const Checked& from) { check(&from, BYTES, false); }
  Checked& operator=(const Checked& from) {
    check(&from, BYTES, false);
    check(this, BYTES, true);
    return *this;
  }
};

}  // namespace emulator

struct uint2 : emulator::Checked<8> {
  unsigned x, y;
  uint2() = default;
  uint2(unsigned x, unsigned y) : x(x), y(y) {}
};

struct uint4 : emulator::Checked<16> {
  unsigned x, y, z, w;
  uint4() = default;
  uint4(unsigned x, unsigned y, unsigned z, unsigned w) : x(x), y(y), z(z), w(w) {}
};

struct float2 : emulator::Checked<8> {
  float x, y;
  float2() = default;
  float2(float x, float y) : x(x), y(y) {}
};

// As on devices, not 0 for the first byte.
INLINE unsigned shared_address(const void* at) { return (unsigned)((const unsigned char*)at - emulator::memory); }

// -------------------------------------------------------------------------- instructions of one thread

namespace emulator {

inline float value(unsigned half) {  // the float16 in the low 16 bits
  const unsigned exponent = half >> 10 & 31, mantissa = half & 1023;
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp((float)mantissa, -24);
  return sign * std::ldexp((float)(mantissa + 1024), (int)exponent - 25);
}

inline float value(unsigned word, int which) { return value(word >> 16 * which & 0xFFFF); }

inline unsigned half_of(double value) {  // to the nearest, ties to even
  const unsigned sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (std::isnan(value)) return 0x7FFF;
  if (size >= 65520) return sign | 0x7C00;
  const int exponent = size >= std::ldexp(1.0, -14) ? std::ilogb(size) : -14;
  const unsigned fraction = (unsigned)std::nearbyint(std::ldexp(size, 10 - exponent));
  return sign | (fraction + (exponent + 14) * 1024);  // a fraction of 1024 or more carries into the exponent
}

template <typename Function, typename... Words>
inline unsigned of_each_half(Function function, Words... words) {
  return function(value(words, 0)...) | function(value(words, 1)...) << 16;
}

}  // namespace emulator

INLINE unsigned two_halves(float low, float high) { return emulator::half_of(low) | emulator::half_of(high) << 16; }

INLINE unsigned add_halves(unsigned a, unsigned b) {
  return emulator::of_each_half([](double a, double b) { return emulator::half_of(a + b); }, a, b);
}

INLINE unsigned multiply_add_saturated(unsigned a, unsigned b, unsigned c) {
  const auto saturated = [](double a, double b, double c) {
    const double sum = a * b + c;
    return sum > 0 ? emulator::half_of(sum < 1 ? sum : 1) : 0u;  // 0 for NaN
  };
  return emulator::of_each_half(saturated, a, b, c);
}

INLINE unsigned ones_above(unsigned a, unsigned b) {
  return emulator::of_each_half([](double a, double b) { return a > b ? 0x3C00u : 0u; }, a, b);
}

INLINE unsigned mask_at_most(unsigned a, unsigned b) {
  return emulator::of_each_half([](double a, double b) { return a <= b ? 0xFFFFu : 0u; }, a, b);
}

template <typename T>
INLINE void settle(T&) {}

// ------------------------------------------------------------- instructions of a warp, copies, barriers

namespace emulator {

// Eight rows of 16 bytes in one go, if no two of them share banks.
inline void count_wavefronts(int first) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    int most = 0, hits[8] = {};
    for (int row = 0; row < 8; ++row) {
      int& banks = hits[fibers[first + matrix * 8 + row]->address / 16 % 8];
      if (++banks > most) most = banks;
    }
    launch->wavefronts += most;
  }
}

// Lane l receives, of every matrix, column l / 4 of rows 2 (l % 4) and the next (.trans).
inline void ldmatrix(int first) {
  ++launch->ldmatrix;
  count_wavefronts(first);
  unsigned short rows[4][8][8];
  for (int i = 0; i < LANES; ++i) memcpy(rows[i / 8][i % 8], shared_at(fibers[first + i]->address, 16), 16);
  for (int i = 0; i < LANES; ++i)
    for (int matrix = 0; matrix < 4; ++matrix) {
      const int row = i % 4 * 2, column = i / 4;
      fibers[first + i]->in[matrix] = rows[matrix][row][column] | (unsigned)rows[matrix][row + 1][column] << 16;
    }
}

// m16n8k16: the fragments of the PTX manual.
inline void multiply(int first) {
  ++launch->mma;
  float a[16][16], b[16][8];
  for (int i = 0; i < LANES; ++i) {
    const unsigned* in = fibers[first + i]->in;
    const int group = i / 4, pair = i % 4 * 2;
    for (int j = 0; j < 4; ++j)
      for (int k = 0; k < 2; ++k) a[group + j % 2 * 8][pair + k + j / 2 * 8] = value(in[j], k);
    for (int j = 0; j < 2; ++j)
      for (int k = 0; k < 2; ++k) b[pair + k + j * 8][group] = value(in[4 + j], k);
  }
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < 4; ++j) {
      const int row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
      float& sum = fibers[first + i]->sum[j];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
    }
}

// Eight threads write 128 bytes in one go, if no two of them share banks.
inline void count_copy_conflicts(unsigned to) {
  std::vector<unsigned>& banks = copy_banks[current / 8];
  const size_t number = self().copied++;
  if (banks.size() <= number) banks.resize(number + 1);
  const unsigned bit = 1u << to / 16 % 8;
  if (banks[number] & bit) ++launch->copy_conflicts;
  banks[number] |= bit;
}

inline void land(const Copy& copy) {
  unsigned char* to = shared_at(copy.to, 16);
  memset(to, 0, 16);
  if (!copy.exists) return;
  check_global(copy.from, 16, false);
  memcpy(to, copy.from, 16);
}

}  // namespace emulator

INLINE void ldmatrix_x4_trans(unsigned (&words)[4], unsigned at) {
  using namespace emulator;
  self().address = at;
  together(LDMATRIX, current / LANES * LANES, LANES, ldmatrix);
  memcpy(words, self().in, sizeof words);
}

INLINE void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  using namespace emulator;
  Fiber& lane = self();
  memcpy(lane.in, a, sizeof a);
  lane.in[4] = b0;
  lane.in[5] = b1;
  memcpy(lane.sum, sum, sizeof sum);
  together(MMA, current / LANES * LANES, LANES, multiply);
  memcpy(sum, lane.sum, sizeof sum);
}

INLINE void __syncthreads() {
  emulator::together(emulator::BARRIER, 0, emulator::count, [](int) {});
}

INLINE void copy_async(unsigned to, const void* from, bool exists) {
  const emulator::Copy copy = {to, from, exists};
  emulator::count_copy_conflicts(to);
  emulator::self().copies.push_back(copy);
  if (!emulator::launch->late_copies) emulator::land(copy);
}

INLINE void wait_for_copies() {
  if (emulator::launch->late_copies)
    for (const emulator::Copy& copy : emulator::self().copies) emulator::land(copy);
  emulator::self().copies.clear();
}

// ---------------------------------------------------------------------------------------------- launch

namespace emulator {

constexpr unsigned char UNTOUCHED = 0xFF;  // a NaN of float16 and of float32

inline void begin_block() {
  count = (int)launch->threads;
  copy_banks.assign(count / 8, {});
  memset(memory, UNTOUCHED, sizeof memory);
  while ((int)fibers.size() < count) {
    fibers.emplace_back(new Fiber());
    fibers.back()->stack.reset(new char[STACK]);
  }
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = *fibers[i];
    fiber.started = fiber.done = false;
    fiber.waits_in = NONE;
    fiber.copies.clear();
    fiber.copied = 0;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, enter, 0);
  }
}

inline bool untouched(const unsigned char* begin, const unsigned char* end) {
  return std::all_of(begin, end, [](unsigned char byte) { return byte == UNTOUCHED; });
}

inline void run_block() {
  for (bool moved = true; moved;) {
    moved = false;
    for (int i = 0; i < count; ++i) {
      const int thread = launch->backwards ? count - 1 - i : i;
      if (fibers[thread]->done || fibers[thread]->waits_in != NONE) continue;
      run(thread);
      if (problem[0]) return;
      moved = true;
    }
  }
  for (int i = 0; i < count; ++i)
    if (!fibers[i]->done) report("threads wait for each other in different instructions");
  const unsigned char* end = shared + launch->shared_bytes;
  if (!untouched(memory, shared) || !untouched(end, end + OUTSIDE)) report("a write outside shared memory");
}

template <typename T>
inline T argument(int number) {
  if constexpr (std::is_pointer_v<T>) {
    const T pointer = reinterpret_cast<T>(launch->arguments[number]);
    spans.push_back({(const char*)pointer, launch->bytes[number], !std::is_const_v<std::remove_pointer_t<T>>});
    return pointer;
  } else {
    return (T)launch->arguments[number];
  }
}

template <typename... Parameters, size_t... numbers>
inline std::function<void()> call_of(void (*kernel)(Parameters...), std::index_sequence<numbers...>) {
  return std::bind(kernel, argument<Parameters>(numbers)...);
}

// Runs the grid. Returns the first problem, or an empty string.
template <typename... Parameters>
inline const char* emulate(void (*kernel)(Parameters...), unsigned threads, Launch& how) {
  static_assert(sizeof...(Parameters) <= MOST_ARGUMENTS, "MOST_ARGUMENTS");
  if (how.shared_bytes > MOST_SHARED) return "more shared memory than a block can have";
  if (how.threads != threads) return "a block of another size than the kernel's";
  launch = &how;
  problem[0] = 0;
  spans.clear();
  kernel_call = call_of(kernel, std::index_sequence_for<Parameters...>());
  const unsigned columns = how.grid[0], rows = how.grid[1];
  gridDim = {columns, rows, how.grid[2]};
  for (unsigned block = 0; block < columns * rows * how.grid[2] && !problem[0]; ++block) {
    blockIdx = {block % columns, block / columns % rows, block / columns / rows};
    begin_block();
    run_block();
  }
  return problem;
}

}  // namespace emulator
