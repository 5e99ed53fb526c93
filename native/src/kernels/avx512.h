// Declarations shared by the AVX-512 files.
#pragma once

#include "kernels.h"

namespace unflip {

void avx512_copy_windows(const WindowCopy& copy);
void avx512_popcount_tile(const PopcountTile& tile);

}  // namespace unflip
