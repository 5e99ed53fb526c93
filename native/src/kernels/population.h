// How many bits of a word are 1, in plain arithmetic: for code that every CPU runs.
#pragma once

#include <cstdint>

namespace unflip {
namespace {

inline int population(uint64_t x) {
  x -= x >> 1 & 0x5555555555555555;
  x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
  x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F;
  return static_cast<int>(x * 0x0101010101010101 >> 56);
}

}  // namespace
}  // namespace unflip
