// An 8-bit convolution and the max pool of a ResNet's stem, with the pool applied to whole sums.
#pragma once

#include <memory>
#include <vector>

#include "epilogue.h"

namespace unflip {

// Whether make_byte_pool_conv() computes this. epilogue: the convolution's; its steps must have been moved after the pool.
bool pools_sums(const Op& conv, const Epilogue& epilogue, const Op& pool, const Kernels& kernels);

// epilogue: the pool's.
std::unique_ptr<Task> make_byte_pool_conv(const Op& conv, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
                                          std::unique_ptr<Epilogue> epilogue, const Kernels& kernels, int jobs);

}  // namespace unflip
