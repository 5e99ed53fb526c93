// Between the AVX-512 files.
#pragma once

#include "kernels.h"

namespace unflip {

void avx512_pair_words(uint32_t* words, int64_t count);
void avx512_popcount_tile(const PopcountTile& tile);

}  // namespace unflip
