// Everything that is no convolution. None of it is worth an instruction set of its own.
#pragma once

#include <memory>
#include <vector>

#include "finisher.h"

namespace unflip {

// A map, or a quantize on its own: the finisher on a value that is there already.
std::unique_ptr<Task> make_map(int input, const std::vector<ValueInfo>& values, std::unique_ptr<Finisher> finisher,
                               int threads);

std::unique_ptr<Task> make_pool(const Op& op, int input, const std::vector<ValueInfo>& values,
                                std::unique_ptr<Finisher> finisher);

// Everything else. output: the value the op makes.
std::unique_ptr<Task> make_simple(const Op& op, int output, const std::vector<ValueInfo>& values);

}  // namespace unflip
