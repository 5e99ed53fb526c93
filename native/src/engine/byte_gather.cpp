// The gathered steps of byte_weights.h.
#include <algorithm>

#include "byte_weights.h"

namespace unflip {

// Gathering takes about as long as this many steps of a block.
int gathered_steps(const Convolution& conv, const Kernels& kernels) {
  constexpr int kGatherSteps = 8;
  if (!kernels.gather_bytes || !joins_taps(conv) || conv.stride.w * int64_t{conv.channels} > kGatherStep) return 0;
  const int rest = static_cast<int>(int64_t{conv.kernel.w} * conv.channels % kByteGroup);
  const int steps = (conv.kernel.h * rest + kByteGroup - 1) / kByteGroup;
  const bool pays = int64_t{conv.kernel.h - steps} * ((conv.filters + kFloatBlock - 1) / kFloatBlock) >= kGatherSteps;
  return rest && pays ? steps : 0;
}

void ByteWeights::gather(const Kernels& kernels, const uint8_t* window, int pixels, uint8_t* to, int64_t rest_stride) const {
  ByteGather g;
  g.step = static_cast<int>(right());
  g.pixels = pixels;
  g.to = to;
  for (size_t i = 0; i < rest_.size(); i += g.count, g.to += rest_stride) {
    g.count = static_cast<int>(std::min<size_t>(kByteGroup, rest_.size() - i));
    for (int k = 0; k < g.count; k++) g.from[k] = window + rest_[i + k];
    kernels.gather_bytes(g);
  }
}

}  // namespace unflip
