// The window of a pixel is copied to 64-bit words: the bits of all taps, with zeros in the padding, one row of words per plane
// and group. It is compared with the words of each filter, which have the same layout.
#include <algorithm>
#include <cstring>

#include "binary_conv.h"
#include "binary_sums.h"

namespace unflip {
namespace {

// Copies `count` bits from bit `first` of `from` to bit `at` of words, which must be zero there. Reads up to 7 bytes beyond the
// last bit: values have that much slack.
void copy_bits(const uint8_t* from, int first, int count, int64_t at, uint64_t* to) {
  const int shift = first % 8, most = shift ? 56 : 64;  // the bits that one word always contains
  from += first / 8;
  for (int n; count > 0; count -= n, at += n, from += most / 8) {
    n = std::min(count, most);
    uint64_t word;
    std::memcpy(&word, from, 8);
    word >>= shift;
    if (n < 64) word &= (uint64_t{1} << n) - 1;
    to[at / 64] |= word << (at % 64);
    if (at % 64 + n > 64) to[at / 64 + 1] |= word >> (64 - at % 64);
  }
}

class CountingConv : public Task {
 public:
  CountingConv(const Op& op, const Quantizer& quantizer, int input, const std::vector<ValueInfo>& values,
               std::unique_ptr<Epilogue> epilogue, int jobs)
      : window_(op.conv, values[input].shape, op.shape), sums_(op.conv, quantizer, window_), input_(input),
        layout_(values[input].layout), channels_(op.conv.channels), groups_(op.conv.groups),
        group_filters_(op.conv.filters / op.conv.groups), filters_(op.conv.filters),
        words_(static_cast<int>((int64_t{channels_} * window_.kernel.h * window_.kernel.w + 63) / 64)),
        epilogue_(std::move(epilogue)) {
    pack(op.conv);
    const int pixels = epilogue_->pixels();
    cut_ = Cut(pixels, std::max(pixels / 64, jobs), 1);
    places_.plan(*this);
    thread_scratch_bytes = places_.bytes;
  }

  void run(const RunContext& context) const override {
    parallel(context, cut_.jobs, [&](int job, int thread) {
      epilogue_->clear_border(context, cut_.first(job), cut_.last(job));
      const Scratch scratch(places_, context.scratch_of(thread));
      const EpilogueTarget target = epilogue_->target(context);
      Taps rows, columns;  // the taps that the signs belong to
      for (int pixel = cut_.first(job); pixel < cut_.last(job); pixel++) {
        const int y = pixel / window_.out.width, x = pixel % window_.out.width;
        const bool same = pixel > cut_.first(job) && rows == window_.row_taps(y) && columns == window_.column_taps(x);
        rows = window_.row_taps(y), columns = window_.column_taps(x);
        if (sums_.counts_border() && !same) sums_.inside_signs(rows, columns, scratch.signs);
        run_pixel(context, target, scratch, pixel, rows, columns);
      }
    });
  }

 private:
  // The parts of a thread's scratch, as byte offsets.
  struct Places {
    int64_t window = 0, differences = 0, signs = 0, sums = 0, bytes = 0;

    void plan(const CountingConv& c) {
      auto take = [this](int64_t size) {
        int64_t at = bytes;
        bytes += round_up(size, 64);
        return at;
      };
      window = take(int64_t{c.sums_.planes()} * c.words_ * 8);
      differences = take(int64_t{c.sums_.planes()} * c.sums_.bases() * c.sums_.stride() * 4);
      signs = take(int64_t{c.sums_.bases()} * c.sums_.stride() * 4);
      sums = take(c.sums_.stride() * 4);
    }
  };

  struct Scratch {
    uint64_t* window;
    int32_t *differences, *signs;
    float* sums;
    Scratch(const Places& p, uint8_t* base)
        : window(reinterpret_cast<uint64_t*>(base + p.window)), differences(reinterpret_cast<int32_t*>(base + p.differences)),
          signs(reinterpret_cast<int32_t*>(base + p.signs)), sums(reinterpret_cast<float*>(base + p.sums)) {}
  };

  void pack(const Convolution& conv) {
    const int taps = conv.kernel.h * conv.kernel.w;
    weights_.assign(int64_t{conv.bases} * filters_ * words_, 0);
    int64_t bit = 0;
    for (int64_t filter = 0; filter < int64_t{conv.bases} * filters_; filter++)
      for (int c = 0; c < channels_; c++)
        for (int t = 0; t < taps; t++, bit++)
          if (conv.bits[bit / 8] >> (bit % 8) & 1) {
            const int at = t * channels_ + c;
            weights_[filter * words_ + at / 64] |= uint64_t{1} << (at % 64);
          }
  }

  void copy_window(const uint8_t* plane, int y, int x, int group, Taps rows, Taps columns, uint64_t* to) const {
    std::memset(to, 0, words_ * sizeof *to);
    for (int r = rows.first; r < rows.last; r++)
      for (int c = columns.first; c < columns.last; c++) {
        const int row = window_.row(y) + r * window_.dilation.h, column = window_.column(x) + c * window_.dilation.w;
        copy_bits(plane + layout_.at(row, column), group * channels_, channels_, (int64_t{r} * window_.kernel.w + c) * channels_,
                  to);
      }
  }

  void run_pixel(const RunContext& context, const EpilogueTarget& target, const Scratch& s, int pixel, Taps rows,
                 Taps columns) const {
    const int y = pixel / window_.out.width, x = pixel % window_.out.width;
    for (int g = 0; g < groups_; g++) {
      int32_t plane_sums[9] = {};
      plane_sums[sums_.planes()] = channels_ * (rows.last - rows.first) * (columns.last - columns.first);
      for (int p = 0; p < sums_.planes(); p++) {
        copy_window(context.codes[input_] + p * layout_.plane_bytes, y, x, g, rows, columns, s.window);
        count_plane(context, s, g, p);
        if (sums_.counts_window()) plane_sums[p] = ones_in_window(s.window);
      }
      sums_.combine(s.differences, group_filters_, sums_.counts_border() ? s.signs : nullptr, plane_sums, g * group_filters_,
                    group_filters_, s.sums + g * group_filters_);
    }
    context.kernels->epilogue(epilogue_->params(), target, s.sums, 0, pixel, pixel + 1, 0, epilogue_->stride());
  }

  void count_plane(const RunContext& context, const Scratch& s, int group, int plane) const {
    for (int b = 0; b < sums_.bases(); b++)
      context.kernels->differences(s.window, &weights_[(int64_t{b} * filters_ + group * group_filters_) * words_], words_,
                                   group_filters_, s.differences + (int64_t{b} * sums_.planes() + plane) * group_filters_);
  }

  int32_t ones_in_window(const uint64_t* window) const {
    int32_t ones = 0;
    for (int i = 0; i < words_; i++) ones += __builtin_popcountll(window[i]);
    return ones;
  }

  Window window_;
  BinarySums sums_;
  int input_;
  CodeLayout layout_;
  int channels_, groups_, group_filters_, filters_, words_;
  std::vector<uint64_t> weights_;  // [base][filter][tap][word]
  Cut cut_;
  Places places_;
  std::unique_ptr<Epilogue> epilogue_;
};

}  // namespace

std::unique_ptr<Task> make_counting_conv(const Op& op, const Quantizer& quantizer, int input,
                                         const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, int jobs) {
  return std::make_unique<CountingConv>(op, quantizer, input, values, std::move(epilogue), jobs);
}

}  // namespace unflip
