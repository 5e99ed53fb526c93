// A thread computes one row of tiles after another, each two rows of the image. A row of tiles needs nine rows of the input.
// Their lines (column terms) are kept in a ring buffer, in which the next row of tiles finds five of them. From these it computes
// the ten lines of the row terms. These are additions of single floats, so the bits do not depend on the width of vectors.
#include "stem_conv.h"

#include <algorithm>
#include <cstring>

#include "../kernels/stem.h"
#include "aligned.h"
#include "pooled_rows.h"
#include "window.h"

namespace unflip {
namespace {

constexpr int kTaps = 7, kMostChannels = 4;
constexpr int kNewLines = kStemTerms - 2;     // two of the row terms are lines of the input
constexpr int64_t kMostLineBytes = 64 << 10;  // per line; a thread has seventeen

int tiles_of(int outputs) { return (outputs + 1) / 2; }

int64_t line_floats(const Op& op) { return int64_t{tiles_of(op.shape.width)} * kStemTerms * op.conv.channels; }

// Four numbers at a time. Those beyond the channels are overwritten by the next term.
template <class Number>
struct Four {
  typedef Number Vector __attribute__((vector_size(4 * sizeof(Number))));
};

// The left factors of all column terms. row: the padded input, four columns per tile.
template <class Number>
void transform_columns(const Number* row, int tiles, int channels, Number* line) {
  using Vector = typename Four<Number>::Vector;
  auto load = [](const Number* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
  };
  for (int i = 0; i < tiles; i++, row += 4 * channels, line += kStemTerms * channels) {
    auto even = [=](int k) { return load(row + 2 * k * channels); };
    auto odd = [=](int k) { return load(row + (2 * k + 1) * channels); };
    Number* to = line;
    auto put = [&](Vector v) { std::memcpy(to, &v, sizeof v), to += channels; };
    put(even(1)), put(even(3)), put(odd(1) + odd(2));
    put(odd(2) - odd(1));
    put(even(0) - even(1)), put(even(2) - even(3)), put(odd(0) - odd(2));
    put(even(2) - even(1)), put(even(4) - even(3)), put(odd(3) - odd(1));
  }
}

// The right factors of the terms of one filter's seven taps, which are `step` apart. Whole numbers are twice as large, so that
// they stay whole.
void transform_filter(const double* w, int step, bool whole, double* to) {
  const double a0 = w[0], b0 = w[step], a1 = w[2 * step], b1 = w[3 * step], a2 = w[4 * step], b2 = w[5 * step], a3 = w[6 * step];
  const double terms[kStemTerms] = {a0 + a1, a2 + a3, (b0 + b1 + b2) / 2, (b0 - b1 + b2) / 2, a0, a2, b0, a1, a3, b2};
  for (int t = 0; t < kStemTerms; t++) to[t] = whole ? 2 * terms[t] : terms[t];
}

// Number: float, or int16_t for whole numbers.
template <class Number>
class StemConv : public Task {
  static constexpr bool kWhole = sizeof(Number) == 2;
  static constexpr int kGroup = kWhole ? kStemGroup : 1;

 public:
  // weight: filters x channels x 7 x 7. range: of the op that made whole numbers.
  StemConv(const Op& op, const std::vector<float>& weight, const ByteRange& range, int input,
           const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, const Op* pool,
           std::unique_ptr<Epilogue> pool_epilogue, int jobs)
      : window_(op.conv, values[input].shape, op.shape), input_(input), channels_(op.conv.channels),
        input_stride_(values[input].stride), layout_(values[input].layout), tiles_(tiles_of(op.shape.width)),
        line_(line_floats(op)), epilogue_(std::move(epilogue)) {
    pack(op.conv, weight);
    if (kWhole) {
      for (int i = 0; i < window_.in.width * channels_; i++)
        zero_.push_back(range.zero[range.zero.size() == 1 ? 0 : i % channels_]);
      scale_ = op.conv.scales;
      scale_.resize(round_up(op.conv.filters, kFloatBlock), 0.f);
    }
    if (pool) {
      pooled_ = std::make_unique<PooledRows>(*pool, *epilogue_, std::move(pool_epilogue), 2, jobs);
      lines_at_ = round_up(pooled_->bytes(), 64);
    } else {
      cut_ = Cut(tiles_of(window_.out.height), jobs, 1);
      if (!epilogue_->stores_floats()) lines_at_ = 2 * row_floats() * sizeof(float);
    }
    line_step_ = round_up(line_ + 16, 16);  // vectors extend beyond the end
    padded_floats_ = round_up((4 * tiles_ + kStemRows - 4) * channels_ + kLanes, 16);
    thread_scratch_bytes =
        lines_at_ + (line_step_ * (kStemRows + kNewLines) + padded_floats_) * static_cast<int64_t>(sizeof(Number));
  }

  void run(const RunContext& context) const override {
    if (pooled_) {
      pooled_->run(context, [&](int thread) {
        return [this, &context, lines = lines_of(context, thread)](int y, float* rows) mutable {
          make_rows(context, lines, y, rows);
        };
      });
      return;
    }
    epilogue_->clear_border(context);
    parallel(context, cut_.jobs, [&](int job, int thread) {
      Lines lines = lines_of(context, thread);
      for (int i = cut_.first(job); i < cut_.last(job); i++) run_tiles(context, lines, i, thread);
    });
  }

 private:
  // The state of a thread while it computes rows of tiles.
  struct Lines {
    Number* ring = nullptr;    // the line of padded input row r is at position r % 9
    Number* terms = nullptr;   // the lines of the row terms
    Number* padded = nullptr;  // a padded input row
    int next = 0;              // input rows before this one are in the ring
  };

  int64_t row_floats() const { return int64_t{window_.out.width} * epilogue_->stride(); }

  Lines lines_of(const RunContext& context, int thread) const {
    Lines lines;
    lines.ring = reinterpret_cast<Number*>(context.scratch_of(thread) + lines_at_);
    lines.terms = lines.ring + kStemRows * line_step_;
    lines.padded = lines.terms + kNewLines * line_step_;
    return lines;
  }

  // A row of tiles with its epilogue.
  void run_tiles(const RunContext& context, Lines& lines, int row, int thread) const {
    const EpilogueTarget target = epilogue_->target(context);
    const int width = window_.out.width, stride = epilogue_->stride();
    const int first = 2 * row * width, last = std::min(first + 2 * width, epilogue_->pixels());
    float* sums = target.out ? target.out + int64_t{first} * stride : reinterpret_cast<float*>(context.scratch_of(thread));
    make_rows(context, lines, 2 * row, sums);
    if (epilogue_->has_work()) context.kernels->epilogue(epilogue_->params(), target, sums, stride, first, last, 0, stride);
  }

  // Filters are transformed in double precision and rounded once.
  void pack(const Convolution& conv, const std::vector<float>& weight) {
    const int blocks = (conv.filters + kFloatBlock - 1) / kFloatBlock;
    weights_.assign(blocks * stem_block(channels_, kGroup), Number(0));
    std::vector<double> terms(int64_t{kStemTerms} * kStemTerms * channels_);
    for (int o = 0; o < conv.filters; o++) {
      for (int c = 0; c < channels_; c++)
        transform(&weight[(int64_t{o} * channels_ + c) * kTaps * kTaps], &terms[int64_t{c} * kStemTerms * kStemTerms]);
      pack_filter(terms, &weights_[o / kFloatBlock * stem_block(channels_, kGroup) + o % kFloatBlock * kGroup]);
    }
  }

  // One channel of a filter: [row term][column term].
  static void transform(const float* weight, double* terms) {
    double taps[kTaps * kTaps], columns[kTaps * kStemTerms];
    std::copy(weight, weight + kTaps * kTaps, taps);
    for (int r = 0; r < kTaps; r++) transform_filter(taps + r * kTaps, 1, kWhole, columns + r * kStemTerms);
    for (int t = 0; t < kStemTerms; t++) {
      double rows[kStemTerms];
      transform_filter(columns + t, kStemTerms, kWhole, rows);
      for (int u = 0; u < kStemTerms; u++) terms[u * kStemTerms + t] = rows[u];
    }
  }

  void pack_filter(const std::vector<double>& terms, Number* to) const {
    for (int kind = 0; kind < kStemKinds; kind++)
      for (int column_kind = 0; column_kind < kStemKinds; column_kind++)
        for (int u = stem_first(kind); u < stem_first(kind) + stem_terms(kind); u++) {
          for (int k = 0; k < stem_terms(column_kind) * channels_; k++) {
            const int t = stem_first(column_kind) + k / channels_, c = k % channels_;
            to[k / kGroup * kGroup * kFloatBlock + k % kGroup] =
                static_cast<Number>(terms[(c * kStemTerms + u) * kStemTerms + t]);
          }
          to += stem_steps(column_kind, channels_, kGroup) * kGroup * kFloatBlock;
        }
  }

  // Rows y and y + 1 (y is even), the second only if it is inside the image.
  void make_rows(const RunContext& context, Lines& lines, int y, float* rows) const {
    const int first = 2 * y;
    for (int r = std::max(first, lines.next); r < first + kStemRows; r++) make_line(context, lines, r);
    lines.next = first + kStemRows;
    StemTileOf<Number> tile;
    aim(context, lines, first, tile);
    tile.width = window_.out.width;
    tile.out_stride = epilogue_->stride();
    const bool two = y + 1 < window_.out.height;
    const int calls = (tiles_ + kStemTiles - 1) / kStemTiles, step = context.kernels->float_filters;
    for (int f = 0; f < epilogue_->stride(); f += step) {
      tile.weights = &weights_[f / kFloatBlock * stem_block(channels_, kGroup)];
      if (kWhole) tile.scale = &scale_[f];
      tile.filters = std::min(step, epilogue_->stride() - f);
      tile.out[0] = rows + f;
      tile.out[1] = two ? rows + row_floats() + f : nullptr;
      for (int i = 0; i < calls; i++) {  // in equal parts, because calls with few tiles are slow
        tile.first = tiles_ * i / calls;
        tile.tiles = tiles_ * (i + 1) / calls - tile.first;
        if constexpr (kWhole)
          context.kernels->whole_stem_tile(tile);
        else
          context.kernels->stem_tile(tile);
      }
    }
  }

  // Computes the lines of a row of tiles from the nine input rows from `first` on.
  void aim(const RunContext& context, const Lines& lines, int first, StemTileOf<Number>& tile) const {
    const Number* rows[kStemRows];
    for (int i = 0; i < kStemRows; i++) rows[i] = lines.ring + (first + i) % kStemRows * line_step_;
    if constexpr (kWhole)
      context.kernels->whole_stem_lines(rows, line_, lines.terms, line_step_);
    else
      context.kernels->stem_lines(rows, line_, lines.terms, line_step_);
    tile.channels = channels_;
    tile.lines[0] = rows[2];
    tile.lines[1] = rows[6];
    for (int i = 0; i < kNewLines; i++) tile.lines[2 + i] = lines.terms + i * line_step_;
  }

  // The line of row r of the padded input.
  void make_line(const RunContext& context, const Lines& lines, int r) const {
    Number* line = lines.ring + r % kStemRows * line_step_;
    const int y = r - window_.top;
    if (y < 0 || y >= window_.in.height) {
      std::fill(line, line + line_, Number(0));  // the terms of a row of zeros
      return;
    }
    if constexpr (kWhole)
      copy_bytes(context.codes[input_], y, lines.padded);
    else
      copy_padded_row(context.values[input_], window_.in, input_stride_, y, channels_, window_.left, padded_columns(),
                      padded_floats_, lines.padded);
    transform_columns(lines.padded, tiles_, channels_, line);
  }

  int64_t padded_columns() const { return 4 * tiles_ + kStemRows - 4; }

  // Row y of a value of whole numbers, relative to zero. The border of the value is not used: it may be narrower.
  void copy_bytes(const uint8_t* in, int y, Number* to) const {
    const int64_t first = std::min<int64_t>(window_.left, padded_columns());
    const int64_t last = std::min(padded_columns(), first + window_.in.width);
    const uint8_t* from = in + layout_.at(y, 0);
    const Number* zero = zero_.data();
    std::fill(to, to + first * channels_, Number(0));
    std::fill(to + last * channels_, to + padded_floats_, Number(0));
    to += first * channels_;
    for (int64_t i = 0; i < (last - first) * channels_; i++) to[i] = static_cast<Number>(from[i] - zero[i]);
  }

  Window window_;
  int input_, channels_, input_stride_;
  CodeLayout layout_;         // of whole numbers
  std::vector<Number> zero_;  // the same, for a row of the input
  std::vector<float> scale_;  // the same, for each filter
  int tiles_;                 // of a row
  int64_t line_;              // numbers of a line
  std::unique_ptr<Epilogue> epilogue_;
  AlignedVector<Number> weights_;       // [block of 16 filters], each as in stem.h
  std::unique_ptr<PooledRows> pooled_;  // if there is a pool
  Cut cut_;                             // otherwise: rows of tiles
  int64_t lines_at_ = 0;                // bytes, in a thread's scratch
  int64_t line_step_ = 0, padded_floats_ = 0;
};

}  // namespace

bool is_stem(const Op& op) {
  const Convolution& c = op.conv;
  return c.kernel.h == kTaps && c.kernel.w == kTaps && c.stride.h == 2 && c.stride.w == 2 && c.dilation.h == 1 &&
         c.dilation.w == 1 && c.groups == 1 && c.channels <= kMostChannels &&
         line_floats(op) * static_cast<int64_t>(sizeof(float)) <= kMostLineBytes;
}

std::unique_ptr<Task> make_stem_conv(const Op& op, const std::vector<float>& weight, int input,
                                     const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, const Op* pool,
                                     std::unique_ptr<Epilogue> pool_epilogue, int jobs) {
  return std::make_unique<StemConv<float>>(op, weight, ByteRange(), input, values, std::move(epilogue), pool,
                                           std::move(pool_epilogue), jobs);
}

std::unique_ptr<Task> make_whole_stem_conv(const Op& op, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
                                           std::unique_ptr<Epilogue> epilogue, const Op* pool,
                                           std::unique_ptr<Epilogue> pool_epilogue, int jobs) {
  const std::vector<float> weight(op.conv.bytes.begin(), op.conv.bytes.end());
  return std::make_unique<StemConv<int16_t>>(op, weight, range, input, values, std::move(epilogue), pool,
                                             std::move(pool_epilogue), jobs);
}

}  // namespace unflip
