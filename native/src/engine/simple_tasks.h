// All ops other than convolutions. They take little time, so few of them have kernels.
#pragma once

#include <memory>
#include <vector>

#include "epilogue.h"

namespace unflip {

// A map, or a quantize that is not fused: the epilogue of an existing value.
std::unique_ptr<Task> make_map(int input, const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, int jobs);

std::unique_ptr<Task> make_pool(const Op& op, int input, const std::vector<ValueInfo>& values,
                                std::unique_ptr<Epilogue> epilogue);

// All other ops. output: the number of the op's value.
std::unique_ptr<Task> make_simple(const Op& op, int output, const std::vector<ValueInfo>& values);

}  // namespace unflip
