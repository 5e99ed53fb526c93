// Binary convolution by table look-up: the numbers, the table, and a plain version of the tile.
//
// A window is a row of bits. Four bits are a nibble. For one nibble a of the window and one nibble w of a filter, the number of
// differing bits, popcount(a ^ w), is 0 .. 4. A byte shuffle looks up 16 (or 32) filters at once: the filters' nibbles are the
// indices into a table of 16 bytes, which depends on a. One byte of the table holds the result for two pixels:
//
//     pixel 0's nibble a0 = 0101      number = a1 a0 = 0011 0101, times 16: the start of its table
//     pixel 1's nibble a1 = 0011      table[w] = popcount(a1 ^ w) : popcount(a0 ^ w)     <- two sums of 4 bits each
//
//     filters' nibbles    0110 0101 1111 ...  (one byte each)
//     looked up            2:2  2:0  2:2 ...
//
// Three look-ups can be added before a sum of 4 bits overflows (3 * 4 = 12 < 16): a *group*. Then the two halves are added to one
// byte each. After 21 groups (21 * 12 = 252) these bytes are added to 16-bit counts.
//
// The window's numbers are stored as uint16. The numbers of one group are `tap` apart. For a 3 x 3 kernel a group is the same
// nibble of three adjacent pixels in a row, and no window has to be copied:
//
//     row of pairs:  | x: 16 numbers | x+1: 16 numbers | x+2: 16 numbers | ...      (64 channels; tap = 16, 16 groups,
//                      ^ i             ^ i + tap         ^ i + 2 tap                 3 segments for the 3 kernel rows)
//
// Other windows are copied to one row of numbers, divided by three (tap = a third of it, 1 segment).
//
// Weights: for each block of filters, segment, group and tap, the nibbles of the block's filters, one byte each. Blocks of 64 are
// two vectors of 32. A block of 16 is stored twice in a row of 32, for two pairs at once. The order of the filters in a vector of
// 32 is such that unpacking bytes to words per lane restores it: see look_up_position.
#pragma once

#include "kernels.h"

namespace unflip {
namespace {

constexpr int kGroupsPerFlush = 21;

// table[number][w]: the differences between w and the low nibble of number, plus 16 times those between w and the high nibble.
struct LookUpTable {
  alignas(64) uint8_t at[256][16];
};

constexpr int count_bits(int n) { return n ? (n & 1) + count_bits(n >> 1) : 0; }

constexpr LookUpTable make_look_up_table() {
  LookUpTable table{};
  for (int a = 0; a < 256; a++)
    for (int w = 0; w < 16; w++) table.at[a][w] = static_cast<uint8_t>(count_bits((a & 15) ^ w) + 16 * count_bits((a >> 4) ^ w));
  return table;
}

alignas(64) constexpr LookUpTable kLookUpTable = make_look_up_table();

// Bytes of weights for one tap of one group.
constexpr int look_up_row(int filters) { return filters < 32 ? 32 : filters; }

// The position of filter f of a block in such a row (the first of two positions for 16 filters).
constexpr int look_up_position(int filters, int f) {
  if (filters < 32) return f;
  int half = f % 32 / 16, i = f % 16;
  return f / 32 * 32 + i / 8 * 16 + half * 8 + i % 8;
}

constexpr int look_up_pairs(int filters) { return 128 / filters; }

inline const uint16_t* look_up_stream(const LookUpTile& t, int pair) {
  return t.adjacent ? t.pairs[0] + t.tap * pair : t.pairs[pair];
}

// The plain version of the tile. Every other version must give the same result.
inline void look_up_tile_plain(const LookUpTile& t) {
  for (int pair = 0; pair < look_up_pairs(t.filters); pair++)
    for (int f = 0; f < t.filters; f++) {
      const uint16_t* numbers = look_up_stream(t, pair);
      const uint8_t* w = t.weights + look_up_position(t.filters, f);
      int low = 0, high = 0;
      for (int s = 0; s < t.segments; s++, numbers += t.segment_step)
        for (int g = 0; g < t.groups; g++)
          for (int k = 0; k < 3; k++, w += look_up_row(t.filters)) {
            int two = kLookUpTable.at[numbers[g + k * t.tap] / 16][*w];
            low += two & 15;
            high += two >> 4;
          }
      t.counts[2 * pair * t.filters + f] = static_cast<uint16_t>(low);
      t.counts[(2 * pair + 1) * t.filters + f] = static_cast<uint16_t>(high);
    }
}

inline void pair_numbers_plain(const uint8_t* first, const uint8_t* second, int64_t bytes, uint16_t* out) {
  for (int64_t i = 0; i < bytes; i++) {
    int a = first[i], b = second[i];
    out[2 * i] = static_cast<uint16_t>(((a & 15) | (b & 15) << 4) * 16);
    out[2 * i + 1] = static_cast<uint16_t>((a >> 4 | (b & 0xF0)) * 16);
  }
}

}  // namespace
}  // namespace unflip
