// __builtin_cpu_supports needs a symbol that some toolchains (zig, clang for Windows) do not have, so cpuid is read here. This file
// has no flags of an instruction set: it runs on every CPU.
#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif

namespace unflip {

#if defined(__x86_64__)

namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Leaf leaf(unsigned number) {
  Leaf found;
  if (__get_cpuid_max(0, nullptr) >= number) __cpuid_count(number, 0, found.a, found.b, found.c, found.d);
  return found;
}

bool has(unsigned word, int bit) { return (word >> bit) & 1; }

// Whether the operating system saves these registers.
bool saves(uint32_t registers) {
  if (!has(leaf(1).c, 27)) return false;  // it does not say
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

constexpr uint32_t kAvxRegisters = 0x06, kAvx512Registers = 0xe6;

}  // namespace

bool cpu_has_avx2() {
  const Leaf one = leaf(1), seven = leaf(7);
  const bool fma = has(one.c, 12), popcnt = has(one.c, 23), avx = has(one.c, 28), avx2 = has(seven.b, 5), bmi2 = has(seven.b, 8);
  return avx && avx2 && fma && bmi2 && popcnt && saves(kAvxRegisters);
}

bool cpu_has_avx512() {
  const Leaf seven = leaf(7);
  const bool f = has(seven.b, 16), dq = has(seven.b, 17), bw = has(seven.b, 30), vl = has(seven.b, 31);
  const bool vnni = has(seven.c, 11), popcnt = has(seven.c, 14);
  return f && dq && bw && vl && vnni && popcnt && cpu_has_avx2() && saves(kAvx512Registers);
}

#else

bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }

#endif

}  // namespace unflip
