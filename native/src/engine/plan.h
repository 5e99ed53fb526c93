// What is done in which order and where values are kept: decided once for a graph.
#pragma once

#include <memory>
#include <vector>

#include "finisher.h"

namespace unflip {

// An op that is executed, with what was fused into it.
struct PlannedOp {
  int op = 0;                // its time is booked here
  std::vector<Step> steps;   // its own, and those of maps after it
  int pool = -1;             // the op of a pool after them
  Emits emits;
};

struct Plan {
  std::vector<PlannedOp> ops;
  std::vector<ValueInfo> values;
  std::vector<int64_t> offset;  // of each value in the arena, or -1
  int64_t bytes = 0;
};

Plan make_plan(const Graph& graph, const Kernels& kernels);

}  // namespace unflip
