// Which instruction sets this CPU and its operating system support. Always false for other CPUs than x86-64.
#pragma once

namespace unflip {

bool cpu_has_avx2();    // with FMA, BMI2 and POPCNT
bool cpu_has_avx512();  // F, BW, VL, DQ, VPOPCNTDQ and VNNI, and all of the above

}  // namespace unflip
