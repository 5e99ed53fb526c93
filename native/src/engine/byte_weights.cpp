#include "byte_weights.h"

namespace unflip {
namespace {

constexpr int kStep = kFloatBlock * kByteGroup;  // weights of a step of a block

int32_t sum_of_zeros(const Convolution& conv, int filter, const ByteRange& range, int bias) {
  const int taps = conv.kernel.h * conv.kernel.w, group = filter / (conv.filters / conv.groups);
  const int8_t* w = &conv.bytes[int64_t{filter} * conv.channels * taps];
  int64_t sum = 0;
  for (int c = 0; c < conv.channels; c++)
    for (int t = 0; t < taps; t++) sum += *w++ * (at(range.zero, int64_t{group} * conv.channels + c) - bias);
  return static_cast<int32_t>(sum);
}

}  // namespace

ByteWeights::ByteWeights(const Op& op, const ByteRange& range, const ValueInfo& in, const Kernels& kernels)
    : window_(op.conv, in.shape, op.shape), layout_(in.layout), channels_(op.conv.channels), groups_(op.conv.groups),
      group_filters_(op.conv.filters / op.conv.groups), rest_count_(gathered_steps(op.conv, kernels)),
      wide_(is_wide(op, kernels)) {
  choose_segments(op.conv);
  pack(op.conv, range, kernels.byte_bias);
}

void ByteWeights::choose_segments(const Convolution& conv) {
  const int taps = conv.kernel.h * conv.kernel.w;
  segment_taps_ = joins_taps(conv) ? conv.kernel.w : 1;
  const int bytes = segment_taps_ * channels_;
  segment_steps_ = rest_count_ ? bytes / kByteGroup : (bytes + kByteGroup - 1) / kByteGroup;
  for (int t = 0; t < taps; t += segment_taps_) {
    const int64_t segment = t / conv.kernel.w * conv.dilation.h * layout_.row_bytes +
                            int64_t{t % conv.kernel.w} * conv.dilation.w * layout_.pixel_bytes;
    for (int k = 0; k < segment_steps_; k++) steps_.push_back(segment + k * kByteGroup);
    for (int k = segment_steps_ * kByteGroup; k < bytes; k++) rest_.push_back(segment + k);
  }
}

// The filters of a group fill whole blocks; those after them are 0.
void ByteWeights::pack(const Convolution& conv, const ByteRange& range, int bias) {
  const int filters = groups_ * group_blocks() * kFloatBlock, taps = conv.kernel.h * conv.kernel.w;
  if (wide_)
    wide_weights_.assign(group_blocks() * window_numbers() * kFloatBlock, 0);
  else
    weights_.assign(groups_ * group_blocks() * block_bytes(), 0);
  minus_.assign(filters, 0);
  scale_.assign(filters, 0.f);
  const int8_t* from = conv.bytes.data();
  for (int o = 0; o < conv.filters; o++) {
    const int own = o / group_filters_ * group_blocks() * kFloatBlock + o % group_filters_;
    for (int c = 0; c < channels_; c++)
      for (int t = 0; t < taps; t++) put(own, place(t / segment_taps_, t % segment_taps_ * channels_ + c), *from++);
    minus_[own] = sum_of_zeros(conv, o, range, bias);
    scale_[own] = conv.scales[o];
  }
}

// Of a byte of a segment, among those of all steps.
int64_t ByteWeights::place(int64_t segment, int byte) const {
  const int steps = segment_steps_ * kByteGroup;
  if (byte < steps || !rest_count_) return segment * steps + byte;
  return static_cast<int64_t>(steps_.size()) * kByteGroup + segment * (segment_taps_ * channels_ - steps) + byte - steps;
}

void ByteWeights::put(int filter, int64_t place, int8_t weight) {
  const int64_t block = filter / kFloatBlock, own = filter % kFloatBlock;
  if (wide_)
    wide_weights_[(block * window_numbers() + place / kWideGroup * kWideGroup) * kFloatBlock + own * kWideGroup +
                  place % kWideGroup] = weight;
  else
    weights_[block * block_bytes() + place / kByteGroup * kStep + own * kByteGroup + place % kByteGroup] = weight;
}

void ByteWeights::negate(int filter) {
  int8_t* w = &weights_[filter / kFloatBlock * block_bytes() + filter % kFloatBlock * kByteGroup];
  for (int64_t s = 0; s < block_bytes(); s += kStep)
    for (int i = 0; i < kByteGroup; i++) w[s + i] = static_cast<int8_t>(-w[s + i]);
}

}  // namespace unflip
