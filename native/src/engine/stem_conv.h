// Convolution of 7 x 7 with stride 2, of floats or whole numbers, see ../kernels/stem.h.
#pragma once

#include <memory>
#include <vector>

#include "epilogue.h"

namespace unflip {

// Whether a convolution is a stem: 7 x 7 with stride 2, up to four channels, one group, no dilation, and not so wide that
// the kept rows leave the cache. This depends only on shapes, so all instruction sets agree.
bool is_stem(const Op& op);

// weight: filters x channels x 7 x 7. pool and its epilogue may be null, as in float_conv.h.
std::unique_ptr<Task> make_stem_conv(const Op& op, const std::vector<float>& weight, int input,
                                     const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, const Op* pool,
                                     std::unique_ptr<Epilogue> pool_epilogue, int jobs);

// The same for whole numbers, if the kernels have it.
std::unique_ptr<Task> make_whole_stem_conv(const Op& op, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
                                           std::unique_ptr<Epilogue> epilogue, const Op* pool,
                                           std::unique_ptr<Epilogue> pool_epilogue, int jobs);

}  // namespace unflip
