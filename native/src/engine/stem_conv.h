// Float convolution of 7 x 7 with stride 2, see ../kernels/stem.h.
#pragma once

#include <memory>
#include <vector>

#include "finisher.h"

namespace unflip {

// Whether a float convolution goes this way. That depends on nothing but shapes, so that all instruction sets agree: 7 x 7 with
// stride 2 of up to four channels, in one group, without dilation, and not so wide that what is kept of a row leaves the cache.
bool is_stem(const Op& op);

// weight: filters x channels x 7 x 7. pool and its finisher may be null, as in float_conv.h.
std::unique_ptr<Task> make_stem_conv(const Op& op, const std::vector<float>& weight, int input,
                                     const std::vector<ValueInfo>& values, std::unique_ptr<Finisher> finisher, const Op* pool,
                                     std::unique_ptr<Finisher> pool_finisher, int threads);

}  // namespace unflip
