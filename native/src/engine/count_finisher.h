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
    uint8_t* scratch = nullptr;        // scratch_bytes() of them, aligned to 8
  };

  int64_t scratch_bytes(int64_t pixels, int channels) const;
  // What all channels of a strip have in common; before finish(), once for all blocks of it.
  void count_windows(const RunContext& context, const Strip& strip) const;
  void finish(const RunContext& context, const Strip& strip) const;

 private:
  void finish_terms(const FinishTarget& target, const Strip& strip) const;
  CountTerm term_at(size_t t, const Strip& strip) const;
  void count_columns(const RunContext& context, int plane, int y, int x, int columns, int32_t* ones) const;

  // Parts of a strip's scratch.
  CountTerm* terms_of(const Strip& s) const { return reinterpret_cast<CountTerm*>(s.scratch); }
  // [window term][pixel]
  float* numbers_of(const Strip& s) const { return reinterpret_cast<float*>(terms_of(s) + sums_.terms().size()); }
  float* sums_of(const Strip& s) const { return numbers_of(s) + int64_t{window_terms_} * (s.last - s.first); }

  const Window& window_;
  const BinarySums& sums_;
  const Finisher& finisher_;
  int input_;
  const CodeLayout& layout_;
  const Kernels& kernels_;

  int window_terms_ = 0;            // of the sum's terms, at their end
  std::vector<int64_t> base_at_;    // of each other term, in the table
  std::vector<float> base_table_;   // for each term [border class][stride], or [stride] if the border makes no difference
  std::vector<float> multiples_;    // of each plane's counts
  std::vector<uint16_t> class_of_;  // for each output pixel
};

}  // namespace unflip
