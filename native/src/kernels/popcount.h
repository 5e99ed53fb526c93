// Binary convolution by popcount: words, pairs, the layout of weights, and a plain version of the tile.
//
// A window is a row of bits, divided into words of 32. A vector holds one word of 16 filters. Xor with the window's word in all
// lanes and a popcount per lane give the differences of 16 filters in 32 places: three instructions with the addition to a sum.
//
// Adding bits before counting them saves instructions. Let x = a ^ w be the differences in a word. A full adder takes two of
// these and the word `ones` of the words before. It gives new ones and a word of carries, worth two each:
//
//     ones   0 1 1 0
//     x0     0 0 1 1       ones' = ones ^ x0 ^ x1                     0 1 0 0      one popcount at the end, for all words
//     x1     0 0 0 1       carry = at least two of ones, x0, x1       0 0 1 1      one popcount per two words, doubled
//
// Since x0 ^ x1 = (a0 ^ a1) ^ (w0 ^ w1), the inner xors need not be computed per filter and pixel. A *pair* of words is stored
// as a0 and a0 ^ a1, for windows and weights, and
//
//     x0    = a0 ^ w0
//     ones' = ones ^ (a0 ^ a1) ^ (w0 ^ w1)            one instruction (ternary logic)
//     carry = ones' == ones ? x0 : ones               equal if x0 == x1, then x0 is the majority; else ones is
//
// With the popcount and the addition these are five instructions for two words instead of six.
//
// Windows: if the number of words is odd, one single word comes before all pairs, and a zero before that. So pairs begin at even
// words, and pairing (every second word ^= the one before) does not change the single word:
//
//     | 0 | a | b0 | b0 ^ b1 | c0 | c0 ^ c1 | ...
//
// If a pixel of the code has a whole number of pairs, windows need not be copied: all windows of a strip share its rows, paired.
//
// Weights: for each block of 16 or 32 filters and each word, as above but without the zero, the words of its filters.
#pragma once

#include "kernels.h"

namespace unflip {
namespace {

// The number of bits that are 1, in plain arithmetic that every CPU can run.
inline int popcount_plain(uint64_t x) {
  x -= x >> 1 & 0x5555555555555555;
  x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
  x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F;
  return static_cast<int>(x * 0x0101010101010101 >> 56);
}

// Words from one window to the next.
constexpr int popcount_window(int words) { return (words + 1) / 2 * 2; }

inline void pair_words(uint32_t* words, int64_t count) {
  for (int64_t i = 1; i < count; i += 2) words[i] ^= words[i - 1];
}

constexpr int popcount_words(const WindowCopy& c) { return (c.rows * c.runs * c.run + 3) / 4; }

inline void copy_windows_plain(const WindowCopy& c) {
  const int words = popcount_words(c), step = popcount_window(words);
  for (int p = 0; p < c.pixels; p++) {
    uint32_t* window = c.to + int64_t{p} * step;
    for (int i = 0; i < step; i++) window[i] = 0;
    char* to = reinterpret_cast<char*>(window + words % 2);
    for (int r = 0; r < c.rows; r++)
      for (int i = 0; i < c.runs; i++, to += c.run)
        __builtin_memcpy(to, c.from + p * c.pixel_step + r * c.row_step + i * c.run_step, c.run);
    pair_words(window, step);
  }
}

// The plain version of the tile. Every other version must give the same result.
inline void popcount_tile_plain(const PopcountTile& t) {
  const int odd = t.words % 2;
  for (int p = 0; p < t.pixels; p++)
    for (int f = 0; f < t.filters; f++) {
      const uint32_t* w = t.weights + f;
      int count = odd ? __builtin_popcount(t.windows[p][1] ^ w[0]) : 0;
      w += odd * t.filters;
      for (int k = 0; k < t.words / 2; k++, w += 2 * t.filters) {
        const uint32_t* a = t.windows[p] + t.pairs[k];
        const uint32_t first = a[0] ^ w[0], second = a[1] ^ w[t.filters] ^ first;
        count += __builtin_popcount(first) + __builtin_popcount(second);
      }
      t.counts[p * t.filters + f] = static_cast<uint16_t>(count);
    }
}

}  // namespace
}  // namespace unflip
