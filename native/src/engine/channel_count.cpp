// Convolution of a code with one binary filter per channel, over that channel or the few channels of its group. A word holds the
// bits of 64 channels at one tap. Its differences from the weights are one word too. The words of all taps are added per channel;
// each binary digit of the counts is one word:
//
//     tap 0    0 1 1 0 ...              ones     0 1 0 1 ...
//     tap 1    0 1 0 1 ...    - add ->  twos     0 1 1 0 ...       channel 1: 1 + 2 + 4 * 0 = 3 differences
//     tap 2    0 1 1 0 ...              fours    0 0 0 0 ...
//
// Then the digits of eight channels at a time become eight bytes. In a group of several channels, each channel is a separate tap
// whose bit is repeated for the whole group:
//
//     code     a b c d  e f g h ...     first taps   a a a a  e e e e ...     second   b b b b  f f f f ...
#include <algorithm>
#include <cstring>

#include "binary_conv.h"
#include "binary_sums.h"

namespace unflip {
namespace {

constexpr int kMostTaps = 255, kDigits = 8;  // counts are bytes

// Byte i of the result is bit i of the number.
uint64_t spread(int number) {
  uint64_t bytes = 0;
  for (int i = 0; i < 8; i++) bytes |= static_cast<uint64_t>(number >> i & 1) << (8 * i);
  return bytes;
}

struct SpreadTable {
  uint64_t of[256];
  SpreadTable() {
    for (int i = 0; i < 256; i++) of[i] = spread(i);
  }
};

int digits_of(int number) {
  int digits = 0;
  for (; number; number >>= 1) digits++;
  return digits;
}

class ChannelCount : public Task {
 public:
  ChannelCount(const Op& op, const Quantizer& quantizer, int input, const std::vector<ValueInfo>& values,
               std::unique_ptr<Epilogue> epilogue, int jobs)
      : window_(op.conv, values[input].shape, op.shape), sums_(op.conv, quantizer, window_), input_(input),
        layout_(values[input].layout), channels_(op.conv.filters), words_((channels_ + 63) / 64), group_(op.conv.channels),
        taps_(op.conv.kernel.h * op.conv.kernel.w * group_), epilogue_(std::move(epilogue)) {
    pack(op.conv);
    const int pixels = epilogue_->pixels();
    cut_ = Cut(pixels, std::max(pixels / 64, jobs), 1);
    signs_at_ = round_up(int64_t{sums_.bases()} * sums_.planes() * counts_stride(), 64);
    sums_at_ = signs_at_ + round_up(int64_t{sums_.bases()} * sums_.stride() * 4, 64);
    thread_scratch_bytes = sums_at_ + round_up(int64_t{sums_.stride()} * 4, 64);
  }

  void run(const RunContext& context) const override {
    const EpilogueTarget target = epilogue_->target(context);
    parallel(context, cut_.jobs, [&](int job, int thread) {
      epilogue_->clear_border(context, cut_.first(job), cut_.last(job));
      uint8_t* scratch = context.scratch_of(thread);
      Taps rows, columns;  // the taps that the signs belong to; initially none
      for (int pixel = cut_.first(job); pixel < cut_.last(job); pixel++) {
        const int y = pixel / window_.out.width, x = pixel % window_.out.width;
        const bool same = pixel > cut_.first(job) && rows == window_.row_taps(y) && columns == window_.column_taps(x);
        rows = window_.row_taps(y), columns = window_.column_taps(x);
        auto* signs = reinterpret_cast<int32_t*>(scratch + signs_at_);
        if (sums_.counts_border() && !same) sums_.inside_signs(rows, columns, signs);
        count(context, y, x, rows, columns, scratch);
        auto* sums = reinterpret_cast<float*>(scratch + sums_at_);
        sums_.combine(scratch, counts_stride(), sums_.counts_border() ? signs : nullptr, nullptr, 0, channels_, sums);
        context.kernels->epilogue(epilogue_->params(), target, sums, 0, pixel, pixel + 1, 0, epilogue_->stride());
      }
    });
  }

 private:
  int64_t counts_stride() const { return int64_t{words_} * 64; }

  // In the file a filter is [channel][tap]; here it is [tap][channel].
  void pack(const Convolution& conv) {
    weights_.assign(int64_t{conv.bases} * taps_ * words_, 0);
    const int places = taps_ / group_;
    for (int64_t filter = 0, bit = 0; filter < int64_t{conv.bases} * channels_; filter++)
      for (int t = 0; t < taps_; t++, bit++)
        if (conv.bits[bit / 8] >> (bit % 8) & 1) {
          const int c = static_cast<int>(filter % channels_), tap = t % places * group_ + t / places;
          weights_[(filter / channels_ * taps_ + tap) * words_ + c / 64] |= uint64_t{1} << (c % 64);
        }
  }

  // Copies bit `which` of every group to all bits of the group.
  uint64_t spread_in_groups(uint64_t word, int which) const {
    if (group_ == 1) return word;
    const uint64_t all = (uint64_t{1} << group_) - 1, first = ~uint64_t{0} / all;
    return (word >> which & first) * all;
  }

  // Differences of all channels at one pixel: bytes [base][plane][channel].
  void count(const RunContext& context, int y, int x, Taps rows, Taps columns, uint8_t* to) const {
    for (int base = 0; base < sums_.bases(); base++)
      for (int plane = 0; plane < sums_.planes(); plane++)
        for (int word = 0; word < words_; word++, to += 64) {
          const uint8_t* code = context.codes[input_] + plane * layout_.plane_bytes + 8 * word;
          uint64_t digits[kDigits] = {};
          add_taps(code, base, word, y, x, rows, columns, digits);
          put_counts(digits, to);
        }
  }

  void add_taps(const uint8_t* code, int base, int word, int y, int x, Taps rows, Taps columns, uint64_t* digits) const {
    const int bytes = std::min(8, layout_.pixel_bytes - 8 * word);
    const uint64_t* weights = &weights_[int64_t{base} * taps_ * words_ + word];
    int tap = 0;
    for (int r = 0; r < window_.kernel.h; r++)
      for (int c = 0; c < window_.kernel.w; c++) {
        uint64_t pixel = 0;  // in the padding
        if (r >= rows.first && r < rows.last && c >= columns.first && c < columns.last) {
          const int row = window_.row(y) + r * window_.dilation.h, column = window_.column(x) + c * window_.dilation.w;
          pixel = load(code + layout_.at(row, column), bytes);
        }
        for (int which = 0; which < group_; which++, tap++, weights += words_) {
          uint64_t carry = *weights ^ spread_in_groups(pixel, which);
          for (int i = 0; i < digits_[tap]; i++) {
            const uint64_t digit = digits[i];
            digits[i] = digit ^ carry;
            carry &= digit;
          }
        }
      }
  }

  static uint64_t load(const uint8_t* from, int bytes) {
    uint64_t word = 0;
    if (bytes == 8)
      std::memcpy(&word, from, 8);
    else
      std::memcpy(&word, from, bytes);
    return word;
  }

  void put_counts(const uint64_t* digits, uint8_t* to) const {
    static const SpreadTable table;
    for (int eight = 0; eight < 8; eight++, to += 8) {
      uint64_t counts = 0;
      for (int i = 0; i < digits_.back(); i++) counts += table.of[digits[i] >> (8 * eight) & 255] << i;
      std::memcpy(to, &counts, 8);
    }
  }

  // The number of digits of the counts after each tap.
  static std::vector<int> digits_after(int taps) {
    std::vector<int> digits;
    for (int t = 1; t <= taps; t++) digits.push_back(digits_of(t));
    return digits;
  }

  Window window_;
  BinarySums sums_;
  int input_;
  CodeLayout layout_;
  int channels_, words_, group_, taps_;  // group_: channels of a filter
  std::vector<int> digits_ = digits_after(taps_);
  std::vector<uint64_t> weights_;  // [base][tap][word]
  Cut cut_;
  int64_t signs_at_ = 0, sums_at_ = 0;  // in a thread's scratch, after the counts
  std::unique_ptr<Epilogue> epilogue_;
};

}  // namespace

bool counts_channels(const Op& op) {
  const Convolution& c = op.conv;
  const bool plain = std::all_of(c.offset.begin(), c.offset.end(), [](float v) { return v == 0; });
  // No such group spans two words. From 8 channels on, windows are faster.
  const bool few = c.channels == 1 || c.channels == 2 || c.channels == 4;
  return c.groups > 1 && c.filters == c.groups * c.channels && few && plain &&
         int64_t{c.channels} * c.kernel.h * c.kernel.w <= kMostTaps;
}

std::unique_ptr<Task> make_channel_count(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, int jobs) {
  return std::make_unique<ChannelCount>(op, quantizer, input, values, std::move(epilogue), jobs);
}

}  // namespace unflip
