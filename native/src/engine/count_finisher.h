// From counts of differing bits to a binary convolution's values: the sums they mean, and the finish.
#pragma once

#include <vector>

#include "binary_sums.h"
#include "finisher.h"

namespace unflip {

// Whether there are few enough kinds of borders for a table of them.
bool few_border_classes(const Window& window);

class CountFinisher {
 public:
  CountFinisher(const Window& window, const BinarySums& sums, const Finisher& finisher, int input,
                const CodeLayout& layout, const Kernels& kernels);

  // Counts of pixels that follow one another, and of channels that begin with one of a block.
  struct Strip {
    const uint16_t* counts = nullptr;  // [base][plane][pixel][channel]
    int64_t term_stride = 0;           // counts from one plane to the next
    int64_t pixel_stride = 0;          // and from one pixel
    int first = 0, last = 0;           // pixels first .. last - 1
    int channel = 0, channels = 0;
    float* sums = nullptr;             // scratch for `channels` floats
  };

  void finish(const RunContext& context, const Strip& strip) const;

 private:
  void finish_terms(const RunContext& context, const FinishTarget& target, const Strip& strip) const;
  void count_window(const RunContext& context, int pixel, int32_t* plane_sums) const;

  const Window& window_;
  const BinarySums& sums_;
  const Finisher& finisher_;
  int input_;
  const CodeLayout& layout_;
  const Kernels& kernels_;

  std::vector<float> base_table_;   // [border class][stride], for one term
  std::vector<int32_t> signs_;      // [border class][base][stride], else
  std::vector<uint16_t> class_of_;  // for each output pixel
};

}  // namespace unflip
