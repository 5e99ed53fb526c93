// Turns counts of differing bits into the values of a binary convolution: the sums, then the epilogue.
#pragma once

#include <vector>

#include "aligned.h"
#include "binary_sums.h"
#include "epilogue.h"

namespace unflip {

// The number of different borders, or a larger number than the largest allowed one.
int border_classes(const Window& window);

// Whether that is small enough for a table.
bool few_border_classes(const Window& window);

class CountEpilogue {
 public:
  CountEpilogue(const Window& window, const BinarySums& sums, const Epilogue& epilogue, int input, const CodeLayout& layout,
                const Kernels& kernels);

  // The counts of consecutive pixels, for channels from the start of a block on.
  struct Strip {
    const uint16_t* counts = nullptr;  // [base][plane][pixel][channel]
    int64_t term_stride = 0;           // counts from one plane to the next
    int64_t pixel_stride = 0;          // counts from one pixel to the next
    int first = 0, last = 0;           // pixels first .. last - 1
    int channel = 0, channels = 0;
    uint8_t* scratch = nullptr;  // scratch_bytes() bytes, aligned to 8
  };

  int64_t scratch_bytes(int64_t pixels, int channels) const;
  // Computes what all channels of a strip share. Call it once per strip, before run() for its blocks.
  void count_windows(const RunContext& context, const Strip& strip) const;
  void run(const RunContext& context, const Strip& strip) const;
  // Also counts. The sum has one term, and tile.windows are those of all pixels; see Kernels::popcount_epilogue.
  void count_and_run(const RunContext& context, const Strip& strip, const PopcountTile& tile) const;

 private:
  Counts counts_of(const Strip& strip) const;
  void run_terms(const EpilogueTarget& target, const Strip& strip) const;
  CountTerm term_at(size_t t, const Strip& strip) const;
  void count_columns(const RunContext& context, int plane, int y, int x, int step, int columns, int32_t* ones) const;

  // Parts of a strip's scratch.
  CountTerm* terms_of(const Strip& s) const { return reinterpret_cast<CountTerm*>(s.scratch); }
  // [window term][pixel]
  float* numbers_of(const Strip& s) const { return reinterpret_cast<float*>(terms_of(s) + sums_.terms().size()); }
  float* sums_of(const Strip& s) const { return numbers_of(s) + int64_t{window_terms_} * (s.last - s.first); }

  const Window& window_;
  const BinarySums& sums_;
  const Epilogue& epilogue_;
  int input_;
  const CodeLayout& layout_;
  const Kernels& kernels_;

  int window_terms_ = 0;             // the number of window terms; they are the last of the sum's terms
  std::vector<int64_t> base_at_;     // for each other term: its position in base_table_
  AlignedVector<float> base_table_;  // for each term [border class][stride], or [stride] if the border makes no difference
  std::vector<float> multiples_;     // the factor of each plane's counts
  std::vector<uint16_t> class_of_;   // for each output pixel
};

}  // namespace unflip
