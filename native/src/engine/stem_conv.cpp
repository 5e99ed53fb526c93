// A thread computes one row of tiles after another, each two rows of the image. A row of tiles needs nine rows of the input.
// Their lines (column terms) are kept in a ring buffer, in which the next row of tiles finds five of them. From these it computes
// the ten lines of the row terms. Floats are added one by one, so the bits do not depend on the width of vectors.
#include "stem_conv.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../kernels/stem.h"
#include "../kernels/whole_stem.h"
#include "aligned.h"
#include "pooled_rows.h"
#include "window.h"

namespace unflip {
namespace {

constexpr int kTaps = 7, kMostChannels = 4;
constexpr int kNewLines = kStemTerms - 2;     // two of the row terms are lines of the input
constexpr int64_t kMostLineBytes = 64 << 10;  // per line; a thread has seventeen

int tile_rows(int rows) { return (rows + 1) / 2; }

int64_t line_floats(const Op& op) { return int64_t{(op.shape.width + 1) / 2} * kStemTerms * op.conv.channels; }

// `Count` numbers at a time. Those beyond the channels are overwritten by the next term.
template <class Number, int Count>
struct Group {
  typedef Number Vector __attribute__((vector_size(Count * sizeof(Number))));
  static Vector load(const Number* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static void store(Vector v, Number* to) { std::memcpy(to, &v, sizeof v); }
};

// The terms along a row. A line has them kind by kind, those of a kind with all channels of each term.
struct FloatColumns {
  using Number = float;
  static constexpr int kOutputs = 2, kTerms = kStemTerms, kKinds = kStemKinds, kGroup = 1;
  static int first(int kind) { return stem_first(kind); }
  static int terms(int kind) { return stem_terms(kind); }
  static int numbers(int channels) { return kTerms * channels; }
  static int64_t block(int channels) { return stem_block(channels); }

  // The left factors. row: the padded input.
  static void lines(const float* row, int tiles, int channels, float* line) {
    using Four = Group<float, 4>;
    for (int i = 0; i < tiles; i++, row += 4 * channels, line += kTerms * channels) {
      auto even = [=](int k) { return Four::load(row + 2 * k * channels); };
      auto odd = [=](int k) { return Four::load(row + (2 * k + 1) * channels); };
      float* to = line;
      auto put = [&](Four::Vector v) { Four::store(v, to), to += channels; };
      put(even(1)), put(even(3)), put(odd(1) + odd(2));
      put(odd(2) - odd(1));
      put(even(0) - even(1)), put(even(2) - even(3)), put(odd(0) - odd(2));
      put(even(2) - even(1)), put(even(4) - even(3)), put(odd(3) - odd(1));
    }
  }

  // The right factors of seven taps, which are `step` apart.
  static void filter(const double* w, int step, double* to) {
    const double a0 = w[0], b0 = w[step], a1 = w[2 * step], b1 = w[3 * step], a2 = w[4 * step], b2 = w[5 * step],
                 a3 = w[6 * step];
    const double terms[kTerms] = {a0 + a1, a2 + a3, (b0 + b1 + b2) / 2, (b0 - b1 + b2) / 2, a0, a2, b0, a1, a3, b2};
    std::copy(terms, terms + kTerms, to);
  }

  static constexpr double kRows = 1;  // factor of the right factors of rows
};

struct WholeColumns {
  using Number = int16_t;
  static constexpr int kOutputs = kWholeStemWidth, kTerms = kStemPointTerms, kKinds = kStemPoints, kGroup = kStemGroup;
  static int first(int point) { return point * point_terms(0); }
  static int terms(int point) { return point_terms(point); }
  static int numbers(int channels) { return whole_stem_numbers(channels); }
  static int64_t block(int channels) { return whole_stem_block(channels); }

  // A vector has an even column's channels, then an odd one's. The odd ones' last numbers belong to the next column and are
  // overwritten, except those of the last point.
  static void lines(const int16_t* row, int tiles, int channels, int16_t* line) {
    using Eight = Group<int16_t, 8>;
    using Vector = Eight::Vector;
    Vector mixed, kept, last;  // d = mixed * next column - kept * this column
    for (int i = 0; i < 8; i++) {
      mixed[i] = i < channels ? 2 : 0;
      kept[i] = i < channels ? 1 : -1;
      last[i] = i < channels ? -1 : 0;
    }
    const int64_t step = numbers(channels);
    for (int i = 0; i < tiles; i++, row += 8 * channels, line += step) {
      Vector x[7], d[6];
      for (int k = 0; k < 7; k++) x[k] = Eight::load(row + 2 * k * channels);
      for (int k = 0; k < 6; k++) d[k] = mixed * x[k + 1] - kept * x[k];
      int16_t* to = line;
      auto put = [&](Vector v) { Eight::store(v, to), to += 2 * channels; };
      const Vector a = d[4] - 4 * d[2], b = d[3] - 4 * d[1], c = d[4] - d[2], e = 2 * (d[3] - d[1]);
      put(4 * (d[0] - d[2]) - d[2] + d[4]);
      put(a + b), put(a - b), put(c + e), put(c - e);
      put(4 * (d[1] - d[3]) - d[3] + d[5]);
      put((4 * (x[1] - x[3]) - x[3] + x[5]) & last);
    }
  }

  static void filter(const double* w, int step, double* to) {
    const double a0 = w[0], b0 = w[step], a1 = w[2 * step], b1 = w[3 * step], a2 = w[4 * step], b2 = w[5 * step],
                 a3 = w[6 * step];
    const double terms[kTerms] = {-a0,
                                  b0,
                                  -(a0 + a1 + a2 + a3),
                                  -(b0 + b1 + b2),
                                  a0 - a1 + a2 - a3,
                                  -3 * (b0 - b1 + b2),
                                  a0 + 2 * a1 + 4 * a2 + 8 * a3,
                                  3 * (b0 + 2 * b1 + 4 * b2),
                                  -(a0 - 2 * a1 + 4 * a2 - 8 * a3),
                                  5 * (b0 - 2 * b1 + 4 * b2),
                                  a3,
                                  2 * b2,
                                  8 * a0 + 4 * a1 + 2 * a2 + a3};
    std::copy(terms, terms + kTerms, to);
  }

  static constexpr double kRows = 2;  // so that halves are whole
};

// Columns: FloatColumns or WholeColumns.
template <class Columns>
class StemConv : public Task {
  using Number = typename Columns::Number;
  static constexpr bool kWhole = std::is_same_v<Number, int16_t>;
  static constexpr int kGroup = Columns::kGroup;

 public:
  // weight: filters x channels x 7 x 7. range: of the op that made whole numbers.
  StemConv(const Op& op, const std::vector<float>& weight, const ByteRange& range, int input,
           const std::vector<ValueInfo>& values, std::unique_ptr<Epilogue> epilogue, const Op* pool,
           std::unique_ptr<Epilogue> pool_epilogue, int jobs)
      : window_(op.conv, values[input].shape, op.shape), input_(input), channels_(op.conv.channels),
        input_stride_(values[input].stride), layout_(values[input].layout),
        tiles_((op.shape.width + Columns::kOutputs - 1) / Columns::kOutputs),
        line_(int64_t{tiles_} * Columns::numbers(channels_)), epilogue_(std::move(epilogue)) {
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
      cut_ = Cut(tile_rows(window_.out.height), jobs, 1);
      if (!epilogue_->stores_floats()) lines_at_ = 2 * row_floats() * sizeof(float);
    }
    line_step_ = round_up(line_ + 16, 16);  // vectors extend beyond the end
    padded_floats_ = round_up(padded_columns() * channels_ + kLanes, 16);
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
    weights_.assign(blocks * Columns::block(channels_), Number(0));
    std::vector<double> terms(int64_t{kStemTerms} * Columns::kTerms * channels_);
    for (int o = 0; o < conv.filters; o++) {
      for (int c = 0; c < channels_; c++)
        transform(&weight[(int64_t{o} * channels_ + c) * kTaps * kTaps], &terms[int64_t{c} * kStemTerms * Columns::kTerms]);
      pack_filter(terms, &weights_[o / kFloatBlock * Columns::block(channels_) + o % kFloatBlock * kGroup]);
    }
  }

  // One channel of a filter: [row term][column term].
  static void transform(const float* weight, double* terms) {
    constexpr int kTerms = Columns::kTerms;
    double taps[kTaps * kTaps], columns[kTaps * kTerms];
    std::copy(weight, weight + kTaps * kTaps, taps);
    for (int r = 0; r < kTaps; r++) Columns::filter(taps + r * kTaps, 1, columns + r * kTerms);
    for (int t = 0; t < kTerms; t++) {
      double rows[kStemTerms];
      FloatColumns::filter(columns + t, kTerms, rows);
      for (int u = 0; u < kStemTerms; u++) terms[u * kTerms + t] = Columns::kRows * rows[u];
    }
  }

  void pack_filter(const std::vector<double>& terms, Number* to) const {
    for (int kind = 0; kind < kStemKinds; kind++)
      for (int column_kind = 0; column_kind < Columns::kKinds; column_kind++) {
        const int count = Columns::terms(column_kind) * channels_;
        for (int u = stem_first(kind); u < stem_first(kind) + stem_terms(kind); u++) {
          for (int k = 0; k < count; k++) {
            const int t = Columns::first(column_kind) + k / channels_, c = k % channels_;
            to[k / kGroup * kGroup * kFloatBlock + k % kGroup] =
                static_cast<Number>(terms[(int64_t{c} * kStemTerms + u) * Columns::kTerms + t]);
          }
          to += round_up(count, kGroup) * kFloatBlock;
        }
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
      tile.weights = &weights_[f / kFloatBlock * Columns::block(channels_)];
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
    Columns::lines(lines.padded, tiles_, channels_, line);
  }

  int64_t padded_columns() const { return int64_t{2 * Columns::kOutputs} * tiles_ + kTaps - 2; }

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
  AlignedVector<Number> weights_;       // [block of 16 filters]
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
  return std::make_unique<StemConv<FloatColumns>>(op, weight, ByteRange(), input, values, std::move(epilogue), pool,
                                                  std::move(pool_epilogue), jobs);
}

std::unique_ptr<Task> make_whole_stem_conv(const Op& op, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
                                           std::unique_ptr<Epilogue> epilogue, const Op* pool,
                                           std::unique_ptr<Epilogue> pool_epilogue, int jobs) {
  const std::vector<float> weight(op.conv.bytes.begin(), op.conv.bytes.end());
  return std::make_unique<StemConv<WholeColumns>>(op, weight, range, input, values, std::move(epilogue), pool,
                                                  std::move(pool_epilogue), jobs);
}

}  // namespace unflip
