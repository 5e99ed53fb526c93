// Convolution of floats with float weights (or with binary weights written out as floats). Some go the ways of stem_conv.h
// and depthwise_conv.h.
#pragma once

#include <memory>
#include <vector>

#include "finisher.h"

namespace unflip {

// Whether a convolution can go with the pool after it, some rows at a time, without being stored.
bool pools_rows(const Op& op, const std::vector<Step>& steps, const Op& pool);

// pool and its finisher may be null; with them, the convolution's own finisher emits nothing.
std::unique_ptr<Task> make_float_conv(const Op& op, int input, const std::vector<ValueInfo>& values,
                                      std::unique_ptr<Finisher> finisher, const Op* pool,
                                      std::unique_ptr<Finisher> pool_finisher, int threads);

}  // namespace unflip
