// The rules that every file must obey.
#pragma once

#include <cstddef>
#include <cstdint>

#include "limits.h"

namespace fuzz {

struct Counts {
  uint64_t files = 0, loaded = 0, ran = 0;
};

// Loads the file and runs the network. Ends the program with a message unless
//   - a file is refused by the exception that refuses files, by the C API too;
//   - loading and running need no more memory than the bounds that were computed before, and not much more time;
//   - all instruction sets, one thread and three, and both layouts of memory give the same bits.
// limits: what needs more is refused. seed: of the input, threads and batch.
void check(const uint8_t* data, size_t size, const unflip::Limits& limits, unsigned seed, Counts& counts);

}  // namespace fuzz
