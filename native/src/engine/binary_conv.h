// Convolution of a code (bit planes) with binary weights.
#pragma once

#include <memory>
#include <vector>

#include "epilogue.h"
#include "window.h"

namespace unflip {

// Whether a convolution uses one of the first two implementations below (the second, if the kernels have it). Both need the
// border of the code in memory.
bool looks_up(const Op& op, const Quantizer& quantizer, const Shape& in, const Kernels& kernels);

// Whether look-up pairs rows of the code. Otherwise it pairs copies of windows.
bool pairs_rows(const Window& window, int groups);

// Whether popcount would copy windows of only a few bytes. Then look-up, which copies none, is up to twice as fast.
bool small_groups(const Op& op, const Shape& in);

// By look-up, see ../kernels/look_up.h: all but unusual shapes. Groups must be whole bytes and the kernel three wide.
std::unique_ptr<Task> make_look_up_conv(const Op& op, const Quantizer& quantizer, int input, const std::vector<ValueInfo>& values,
                                        std::unique_ptr<Epilogue> epilogue, const Kernels& kernels, int jobs);

// By vectors of popcounts, see ../kernels/popcount.h: the same shapes, and any groups of whole bytes.
std::unique_ptr<Task> make_popcount_conv(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue,
                                         const Kernels& kernels, int jobs);

// By counting differing bits of 64 channels at a time: one filter per channel, over 1, 2 or 4 channels, without an offset.
bool counts_channels(const Op& op);
std::unique_ptr<Task> make_channel_count(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, int jobs);

// By counting differing bits window by window: any shape, groups and number of channels.
std::unique_ptr<Task> make_counting_conv(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, int jobs);

}  // namespace unflip
