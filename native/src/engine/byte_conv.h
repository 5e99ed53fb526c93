// Convolution of whole numbers with 8-bit weights, and the conversion of floats or pixels to whole numbers.
#pragma once

#include <memory>
#include <vector>

#include "epilogue.h"

namespace unflip {

// Whether pixels 0 .. 255 may be given instead of normalized floats: only to_bytes reads the input, and it turns each normalized
// pixel into that pixel again.
bool takes_pixels(const Graph& graph);

std::unique_ptr<Task> make_to_bytes(const Op& op, int input, int output, const std::vector<ValueInfo>& values, int jobs);

// pool and its epilogue may be null, as in float_conv.h. range: of the op that made the input.
std::unique_ptr<Task> make_byte_conv(const Op& op, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
                                     std::unique_ptr<Epilogue> epilogue, const Op* pool, std::unique_ptr<Epilogue> pool_epilogue,
                                     const Kernels& kernels, int jobs);

}  // namespace unflip
