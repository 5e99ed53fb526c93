// The weights of an 8-bit convolution, in the order in which kernels read them.
//
// Windows are read in place: the value has a border in memory, filled with the numbers that stand for 0. So every window has all
// its taps, and the sum of weight * zero is the same for all pixels.
//
// A row of taps is a *segment* of bytes, read in steps of four. The bytes that remain, one of 21 in a stem of 7 x 7 x 3, would take
// a whole step in each segment. Where it pays, they are gathered first, those of four segments in one step.
#pragma once

#include <vector>

#include "aligned.h"
#include "epilogue.h"
#include "window.h"

namespace unflip {

// Whether the bytes of a row of taps are contiguous.
inline bool joins_taps(const Convolution& conv) { return conv.groups == 1 && conv.dilation.w == 1; }

// Whether a convolution uses wide_byte_tile.
inline bool is_wide(const Op& op, const Kernels& kernels) {
  return kernels.wide_byte_tile && op.conv.groups == 1 && int64_t{op.shape.height} * op.shape.width > 1;
}

// The steps of gathered bytes; 0 if none are gathered.
int gathered_steps(const Convolution& conv, const Kernels& kernels);

// A number of each channel, or one of all.
template <class T>
T at(const std::vector<T>& values, int64_t channel) {
  return values[values.size() == 1 ? 0 : channel];
}

class ByteWeights {
 public:
  ByteWeights(const Op& op, const ByteRange& range, const ValueInfo& in, const Kernels& kernels);

  int group_blocks() const { return (group_filters_ + kFloatBlock - 1) / kFloatBlock; }
  int64_t block_bytes() const { return (static_cast<int64_t>(steps_.size()) + rest_count_) * kFloatBlock * kByteGroup; }
  int rest_count() const { return rest_count_; }

  // Whether the weights have 16 bits.
  bool wide() const { return wide_; }
  int64_t window_numbers() const { return static_cast<int64_t>(steps_.size()) * kByteGroup; }  // without gathered ones

  // Negates the weights of a filter.
  void negate(int filter);

  // Sets what a tile of these filters reads. Tile: ByteTile or BytePoolRow.
  template <class Tile>
  void aim(Tile& tile, int block, int64_t rest_stride) const {
    tile.steps = steps_.data();
    tile.step_count = static_cast<int>(steps_.size());
    tile.rest_count = rest_count_;
    tile.rest_stride = rest_stride;
    if (!wide_) tile.weights = weights_.data() + block * block_bytes();
    tile.scale = &scale_[block * kFloatBlock];
  }

  // After `aim`, for wide_byte_tile.
  void aim_wide(ByteTile& tile, int block, int16_t* input) const {
    tile.segment_steps = segment_steps_;
    tile.wide_weights = wide_weights_.data() + block * window_numbers() * kFloatBlock;
    tile.wide_input = input;
  }

  // Of each filter, [group][block][16 filters].
  const AlignedVector<int32_t>& minus() const { return minus_; }
  const AlignedVector<float>& scale() const { return scale_; }

  // The first byte of a window in the value's memory.
  int64_t window_at(int y, int x) const { return layout_.at(window_.row(y), window_.column(x)); }

  // Bytes from one window to the next.
  int64_t right() const { return int64_t{window_.stride.w} * layout_.pixel_bytes; }
  int64_t down() const { return window_.stride.h * layout_.row_bytes; }

  // The gathered steps of `pixels` windows in a row, the first of which is at `window`.
  void gather(const Kernels& kernels, const uint8_t* window, int pixels, uint8_t* to, int64_t rest_stride) const;

 private:
  void choose_segments(const Convolution& conv);
  void pack(const Convolution& conv, const ByteRange& range, int bias);
  int64_t place(int64_t segment, int byte) const;
  void put(int filter, int64_t place, int8_t weight);

  Window window_;
  CodeLayout layout_;
  int channels_, groups_, group_filters_, rest_count_;
  std::vector<int64_t> steps_;  // the place of each, relative to a window's start
  std::vector<int64_t> rest_;   // of each gathered byte
  int segment_taps_ = 1, segment_steps_ = 1;
  bool wide_;
  AlignedVector<int8_t> weights_;        // [group][block][step, then gathered step][16 filters][4]
  AlignedVector<int16_t> wide_weights_;  // or [block][pair of numbers][16 filters][2]
  AlignedVector<int32_t> minus_;
  AlignedVector<float> scale_;
};

}  // namespace unflip
