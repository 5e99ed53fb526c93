// Declarations shared by the AVX-512 files.
#pragma once

#include "kernels.h"

namespace unflip {

void avx512_byte_tile(const ByteTile& tile);
void avx512_gather_bytes(const ByteGather& gather);
void avx512_byte_pool_row(const BytePoolRow& row);

void avx512_copy_windows(const WindowCopy& copy);
void avx512_popcount_tile(const PopcountTile& tile);
void avx512_popcount_epilogue(const EpilogueParams& params, const EpilogueTarget& target, const Counts& counts,
                              const PopcountTile& tile, int first, int last, int channel);

}  // namespace unflip
