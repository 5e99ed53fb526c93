// Convolution of floats with float weights (or binary weights expanded to floats). Some shapes use stem_conv.h or
// depthwise_conv.h.
#pragma once

#include <memory>
#include <vector>

#include "epilogue.h"

namespace unflip {

// Whether a convolution can be fused with the pool after it: some rows at a time, without storing its value.
bool pools_rows(const Op& op, const std::vector<Step>& steps, const Op& pool);

// pool and its epilogue may be null. With a pool, the convolution's own epilogue emits nothing.
std::unique_ptr<Task> make_float_conv(const Op& op, int input, const std::vector<ValueInfo>& values,
                                      std::unique_ptr<Epilogue> epilogue, const Op* pool, std::unique_ptr<Epilogue> pool_epilogue,
                                      int jobs);

}  // namespace unflip
