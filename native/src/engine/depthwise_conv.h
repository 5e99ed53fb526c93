// Float convolution of every channel by itself, see ../kernels/depthwise.h.
#pragma once

#include <memory>
#include <vector>

#include "finisher.h"

namespace unflip {

// Whether a float convolution goes this way, which depends on nothing but shapes: groups of one channel and one filter.
// (Of a code, see counts_channels in binary_conv.h.)
bool is_depthwise(const Op& op);

// weight: channels x kernel. pool and its finisher may be null, as in float_conv.h.
std::unique_ptr<Task> make_depthwise_conv(const Op& op, const std::vector<float>& weight, int input,
                                          const std::vector<ValueInfo>& values, std::unique_ptr<Finisher> finisher,
                                          const Op* pool, std::unique_ptr<Finisher> pool_finisher, int threads);

}  // namespace unflip
