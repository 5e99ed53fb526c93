// Memory and work of a graph, computed from its shapes before its weights are packed.
#pragma once

#include "../limits.h"
#include "plan.h"

namespace unflip {

// The graph's tensors may be missing (see graph.h). The bytes of the file and the graph itself are not included.
Needs engine_needs(const Graph& graph, const Kernels& kernels, int threads);

// Units of work of a planned op, with those fused into it.
Size planned_work(const Graph& graph, const PlannedOp& planned);

}  // namespace unflip
