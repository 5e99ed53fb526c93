// Declarations shared by the AVX2 files.
#pragma once

#include "kernels.h"

namespace unflip {

void avx2_pair_numbers(const uint8_t* first, const uint8_t* second, int64_t bytes, uint16_t* out);
void avx2_look_up_tile(const LookUpTile& tile);             // inner loops in assembly
void avx2_look_up_tile_intrinsics(const LookUpTile& tile);  // the same with intrinsics

}  // namespace unflip
