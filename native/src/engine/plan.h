// The order of execution and the place of every value in memory, planned once per graph.
#pragma once

#include <memory>
#include <vector>

#include "epilogue.h"

namespace unflip {

// An op that is executed, and the ops fused into it.
struct PlannedOp {
  int op = 0;               // its time is reported for this op
  std::vector<Step> steps;  // its own steps, and those of the maps after it
  int pool = -1;            // the op of the pool after them, or -1
  Emits emits;
};

struct Plan {
  std::vector<PlannedOp> ops;
  std::vector<ValueInfo> values;
  std::vector<int64_t> offset;  // of each value in the arena, or -1
  std::vector<int64_t> size;    // of each value that has an offset, in bytes
  int64_t bytes = 0;            // of the arena
};

Plan make_plan(const Graph& graph, const Kernels& kernels);

}  // namespace unflip
