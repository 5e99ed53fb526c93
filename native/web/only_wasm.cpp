// The modules with vectors have no other kernels than those of ../src/kernels/wasm.cpp.
#include "kernels/kernels.h"

namespace unflip {

const Kernels* portable_kernels() { return nullptr; }
const Kernels* portable_look_up_kernels() { return nullptr; }
const Kernels* portable_popcount_kernels() { return nullptr; }
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* avx2_intrinsics_kernels() { return nullptr; }
const Kernels* neon_kernels() { return nullptr; }
const Kernels* neon_base_kernels() { return nullptr; }

}  // namespace unflip
