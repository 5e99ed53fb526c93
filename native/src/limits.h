// Limits on what a file may ask for, and what it asks for. Both are known before a tensor is copied or packed.
#pragma once

#include <cstdint>

#include "sizes.h"

namespace unflip {

struct Limits {
  int64_t memory = int64_t{1} << 30;  // bytes
  int64_t work = 10'000'000'000;      // units of at most about a nanosecond, see engine/needs.cpp
};

// Upper bounds.
struct Needs {
  Size load_memory;  // the peak of loading: the file, its JSON, the graph and packed weights
  Size run_memory;   // the buffers of one run, and one sample of input and outputs
  Size load_work;    // packing the weights
  Size run_work;     // one sample

  Size memory() const { return load_memory + run_memory; }
};

// Throw std::runtime_error with the need, the limit, and the name of the option that raises it.
void check_memory(Size needed, const Limits& limits);
void check_limits(const Needs& needs, const Limits& limits);

}  // namespace unflip
