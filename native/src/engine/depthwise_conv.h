// Depthwise float convolution, see ../kernels/depthwise.h.
#pragma once

#include <memory>
#include <vector>

#include "epilogue.h"

namespace unflip {

// Whether a float convolution is depthwise: groups of one channel and one filter. This depends only on shapes.
// (For codes see counts_channels in binary_conv.h.)
bool is_depthwise(const Op& op);

// weight: channels x kernel. pool and its epilogue may be null, as in float_conv.h.
std::unique_ptr<Task> make_depthwise_conv(const Op& op, const std::vector<float>& weight, int input,
                                          const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue,
                                          const Op* pool, std::unique_ptr<Epilogue> pool_epilogue, int jobs);

}  // namespace unflip
