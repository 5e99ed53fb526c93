// Converts between C x H x W and H x W x C.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace unflip {

constexpr int kTransposeBlock = 16;  // floats of a cache line

// Vectors of four floats, which every supported CPU has.
typedef float Lane4 __attribute__((vector_size(16)));
typedef int32_t Index4 __attribute__((vector_size(16)));

#if defined(__clang__)
#define UNFLIP_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define UNFLIP_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Index4{i, j, k, l})
#endif

inline void transpose4(const float* from, int64_t from_step, float* to, int64_t to_step) {
  Lane4 a, b, c, d;
  std::memcpy(&a, from, sizeof a);
  std::memcpy(&b, from + from_step, sizeof b);
  std::memcpy(&c, from + 2 * from_step, sizeof c);
  std::memcpy(&d, from + 3 * from_step, sizeof d);
  const Lane4 ab = UNFLIP_SHUFFLE(a, b, 0, 4, 1, 5), cd = UNFLIP_SHUFFLE(c, d, 0, 4, 1, 5);
  const Lane4 ab2 = UNFLIP_SHUFFLE(a, b, 2, 6, 3, 7), cd2 = UNFLIP_SHUFFLE(c, d, 2, 6, 3, 7);
  const Lane4 rows[4] = {UNFLIP_SHUFFLE(ab, cd, 0, 1, 4, 5), UNFLIP_SHUFFLE(ab, cd, 2, 3, 6, 7),
                         UNFLIP_SHUFFLE(ab2, cd2, 0, 1, 4, 5), UNFLIP_SHUFFLE(ab2, cd2, 2, 3, 6, 7)};
  for (int i = 0; i < 4; i++) std::memcpy(to + i * to_step, &rows[i], sizeof rows[i]);
}

#undef UNFLIP_SHUFFLE

inline void transpose_block(const float* from, int64_t from_step, int rows, int columns, float* to, int64_t to_step) {
  const int even_rows = rows / 4 * 4, even_columns = columns / 4 * 4;
  for (int c = 0; c < even_columns; c += 4)
    for (int r = 0; r < even_rows; r += 4) transpose4(from + r * from_step + c, from_step, to + c * to_step + r, to_step);
  for (int c = 0; c < columns; c++)
    for (int r = c < even_columns ? even_rows : 0; r < rows; r++) to[c * to_step + r] = from[r * from_step + c];
}

// to[c * to_step + r] = from[r * from_step + c]. Works in blocks, so that cache lines are reused before they are evicted.
inline void transpose(const float* from, int64_t from_step, int64_t rows, int64_t columns, float* to, int64_t to_step) {
  for (int64_t c = 0; c < columns; c += kTransposeBlock)
    for (int64_t r = 0; r < rows; r += kTransposeBlock)
      transpose_block(from + r * from_step + c, from_step, static_cast<int>(std::min<int64_t>(kTransposeBlock, rows - r)),
                      static_cast<int>(std::min<int64_t>(kTransposeBlock, columns - c)), to + c * to_step + r, to_step);
}

}  // namespace unflip
