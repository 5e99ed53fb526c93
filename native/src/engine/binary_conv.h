// Convolution of a code (bit planes) with binary weights.
#pragma once

#include <memory>
#include <vector>

#include "finisher.h"

namespace unflip {

// Whether a convolution goes one of the first two ways below (the second, if the kernels have it), which need the code's border
// written out.
bool looks_up(const Op& op, const Quantizer& quantizer, const Shape& in, const Kernels& kernels);

// Whether popcount would copy windows of a few bytes, where look-up copies none and is up to twice as fast.
bool small_groups(const Op& op, const Shape& in);

// By look-up, see ../kernels/look_up.h: all but strange shapes; groups of whole bytes where the kernel is three wide.
std::unique_ptr<Task> make_look_up_conv(const Op& op, const Quantizer& quantizer, int input,
                                        const std::vector<ValueInfo>& values, std::unique_ptr<Finisher> finisher,
                                        const Kernels& kernels, int threads);

// By vectors of popcounts, see ../kernels/popcount.h: the same shapes, and groups of whole bytes.
std::unique_ptr<Task> make_popcount_conv(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Finisher> finisher,
                                         const Kernels& kernels, int threads);

// By counting differing bits of 64 channels at a time: a filter for every channel, of 1, 2 or 4 channels, without an offset.
bool counts_channels(const Op& op);
std::unique_ptr<Task> make_channel_count(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Finisher> finisher,
                                         int threads);

// By counting differing bits, window by window: every shape, groups, channels of any number.
std::unique_ptr<Task> make_counting_conv(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Finisher> finisher,
                                         int threads);

}  // namespace unflip
