// Windows are read in place: the value has a border in memory, filled with the numbers that stand for 0. So every window has all
// its taps, and the sum of weight * zero is the same for all pixels.
//
// A row of taps is a *segment* of bytes, read in steps of four. The bytes that remain, one of 21 in a stem of 7 x 7 x 3, would take
// a whole step in each segment. Where it pays, they are gathered first, those of four segments in one step.
#include "byte_conv.h"

#include <algorithm>
#include <cstring>

#include "aligned.h"
#include "pooled_rows.h"
#include "stem_conv.h"
#include "window.h"

namespace unflip {
namespace {

constexpr int kLevels = 256;
constexpr int kMostImageChannels = 16;
constexpr int kStep = kFloatBlock * kByteGroup;  // weights of a step of a block

template <class T>
T at(const std::vector<T>& values, int64_t channel) {
  return values[values.size() == 1 ? 0 : channel];
}

// ------------------------------------------------------------------------------------------------------------------- to_bytes

class ToBytes : public Task {
 public:
  ToBytes(const Op& op, int input, int output, const std::vector<ValueInfo>& values, int jobs)
      : input_(input), output_(output), info_(values[input]), layout_(values[output].layout) {
    const Shape& s = info_.shape;
    // Pixels without gaps are converted several at a time.
    const bool gaps = info_.stride != s.channels;
    pixels_ = gaps ? 1 : std::min(s.width, std::max(1, 1024 / s.channels));
    for (int i = 0; i < pixels_ * s.channels; i++) {
      scale_.push_back(at(op.range.scale, i % s.channels));
      shift_.push_back(at(op.range.shift, i % s.channels));
    }
    for (int c = 0; c < s.channels; c++) zero_.push_back(at(op.range.zero, c));
    cut_ = Cut(layout_.rows, jobs, 1);
  }

  void run(const RunContext& context) const override {
    uint8_t* out = context.codes[output_];
    parallel(context, cut_.jobs, [&](int job, int) {
      for (int row = cut_.first(job); row < cut_.last(job); row++)
        make_row(context, row - layout_.top, out + row * layout_.row_bytes);
    });
  }

 private:
  void make_row(const RunContext& context, int y, uint8_t* to) const {
    const Shape& s = info_.shape;
    if (y < 0 || y >= s.height) return fill(to, layout_.columns);
    fill(to, layout_.left);
    to += int64_t{layout_.left} * s.channels;
    if (context.pixels && input_ == 0)
      context.kernels->interleave_bytes(context.pixels + int64_t{y} * s.width, int64_t{s.height} * s.width, s.width, s.channels,
                                        to);
    else
      convert(context, y, to);
    fill(to + int64_t{s.width} * s.channels, layout_.columns - layout_.left - s.width);
  }

  void convert(const RunContext& context, int y, uint8_t* to) const {
    const Shape& s = info_.shape;
    const float* from = context.values[input_] + int64_t{y} * s.width * info_.stride;
    for (int x = 0; x < s.width; x += pixels_) {
      const int64_t count = int64_t{std::min(pixels_, s.width - x)} * s.channels;
      context.kernels->to_bytes(from + int64_t{x} * info_.stride, count, scale_.data(), shift_.data(),
                                to + int64_t{x} * s.channels);
    }
  }

  // Copies the part that is filled, twice as much each time: a border may be large, and pixel by pixel is slow for few channels.
  void fill(uint8_t* to, int columns) const {
    const int64_t pixel = static_cast<int64_t>(zero_.size()), bytes = columns * pixel;
    if (bytes > 0) std::memcpy(to, zero_.data(), pixel);
    for (int64_t done = pixel; done < bytes; done *= 2) std::memcpy(to + done, to, std::min(done, bytes - done));
  }

  int input_, output_;
  ValueInfo info_;
  CodeLayout layout_;
  int pixels_ = 1;
  std::vector<float> scale_, shift_;  // of `pixels_` pixels
  std::vector<uint8_t> zero_;
  Cut cut_;
};

// ---------------------------------------------------------------------------------------------------------------- convolution

// Whether the bytes of a row of taps are contiguous.
bool joins_taps(int dilation, int groups) { return groups == 1 && dilation == 1; }

class ByteConv : public Task {
 public:
  ByteConv(const Op& op, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
           std::unique_ptr<Epilogue> epilogue, const Op* pool, std::unique_ptr<Epilogue> pool_epilogue, const Kernels& kernels,
           int jobs)
      : window_(op.conv, values[input].shape, op.shape), input_(input), layout_(values[input].layout),
        channels_(op.conv.channels), groups_(op.conv.groups), group_filters_(op.conv.filters / op.conv.groups),
        epilogue_(std::move(epilogue)) {
    rest_count_ = byte_rest_steps(op.conv, kernels);
    choose_segments();
    pack(op.conv, range, kernels.byte_bias);
    if (pool) {
      pooled_ = std::make_unique<PooledRows>(*pool, *epilogue_, std::move(pool_epilogue), 1, jobs);
      plan_scratch(pooled_->bytes(), window_.out.width);
    } else {
      choose_jobs(jobs);
    }
  }

  void run(const RunContext& context) const override {
    if (pooled_) {
      pooled_->run(context, [&](int thread) {
        return [this, &context, thread](int y, float* row) {
          sum_pixels(context, thread, y * window_.out.width, (y + 1) * window_.out.width, 0, epilogue_->stride(), row);
        };
      });
      return;
    }
    epilogue_->clear_border(context);
    parallel(context, pixel_cut_.jobs * block_cut_.jobs, [&](int job, int thread) { run_job(context, job, thread); });
  }

 private:
  int taps() const { return window_.kernel.h * window_.kernel.w; }
  int group_blocks() const { return (group_filters_ + kFloatBlock - 1) / kFloatBlock; }
  int64_t block_bytes() const { return (static_cast<int64_t>(steps_.size()) + rest_count_) * kStep; }

  // A row of taps is one segment if its bytes are contiguous.
  void choose_segments() {
    segment_taps_ = joins_taps(window_.dilation.w, groups_) ? window_.kernel.w : 1;
    const int bytes = segment_taps_ * channels_;
    segment_steps_ = rest_count_ ? bytes / kByteGroup : (bytes + kByteGroup - 1) / kByteGroup;
    for (int t = 0; t < taps(); t += segment_taps_) {
      const int64_t segment = t / window_.kernel.w * window_.dilation.h * layout_.row_bytes +
                              int64_t{t % window_.kernel.w} * window_.dilation.w * layout_.pixel_bytes;
      for (int k = 0; k < segment_steps_; k++) steps_.push_back(segment + k * kByteGroup);
      for (int k = segment_steps_ * kByteGroup; k < bytes; k++) rest_.push_back(segment + k);
    }
  }

  // The filters of a group fill whole blocks; those after them are 0.
  void pack(const Convolution& conv, const ByteRange& range, int bias) {
    const int filters = groups_ * group_blocks() * kFloatBlock;
    weights_.assign(int64_t{groups_} * group_blocks() * block_bytes(), 0);
    minus_.assign(filters, 0);
    scale_.assign(filters, 0.f);
    for (int o = 0; o < conv.filters; o++) {
      const int group = o / group_filters_, own = o % group_filters_;
      const int place = group * group_blocks() * kFloatBlock + own;
      int8_t* block = &weights_[(place / kFloatBlock) * block_bytes() + place % kFloatBlock * kByteGroup];
      pack_filter(&conv.bytes[int64_t{o} * channels_ * taps()], block);
      minus_[place] = zeros(&conv.bytes[int64_t{o} * channels_ * taps()], range, group, bias);
      scale_[place] = conv.scales[o];
    }
  }

  void pack_filter(const int8_t* filter, int8_t* to) const {
    for (int t = 0; t < taps(); t++)
      for (int c = 0; c < channels_; c++) {
        const int64_t k = place(t / segment_taps_, t % segment_taps_ * channels_ + c);
        to[k / kByteGroup * kStep + k % kByteGroup] = filter[int64_t{c} * taps() + t];
      }
  }

  // Of a byte of a segment, among those of all steps.
  int64_t place(int64_t segment, int byte) const {
    const int steps = segment_steps_ * kByteGroup;
    if (byte < steps || !rest_count_) return segment * steps + byte;
    return static_cast<int64_t>(steps_.size()) * kByteGroup + segment * (segment_taps_ * channels_ - steps) + byte - steps;
  }

  int32_t zeros(const int8_t* filter, const ByteRange& range, int group, int bias) const {
    int64_t sum = 0;
    for (int c = 0; c < channels_; c++)
      for (int t = 0; t < taps(); t++)
        sum += filter[int64_t{c} * taps() + t] * (at(range.zero, int64_t{group} * channels_ + c) - bias);
    return static_cast<int32_t>(sum);
  }

  // As in float_conv.cpp: all filters for some pixels, or for many weights few filters for many pixels.
  void choose_jobs(int jobs) {
    const bool many_weights = groups_ == 1 && group_blocks() * block_bytes() > (256 << 10);
    const int pixels = epilogue_->pixels();
    const int per_job = many_weights ? 384 : std::max(kBytePixels, 8192 / epilogue_->stride() / kBytePixels * kBytePixels);
    int pixel_jobs = std::max(1, pixels / per_job), block_jobs = many_weights ? (group_blocks() + 3) / 4 : 1;
    if (pixel_jobs * block_jobs < jobs) pixel_jobs = jobs / block_jobs;
    pixel_cut_ = Cut(pixels, pixel_jobs, kBytePixels);
    block_cut_ = Cut(groups_ == 1 ? group_blocks() : 1, block_jobs, kFloatBlocks);
    const bool stores_floats = epilogue_->stores_floats();
    plan_scratch(stores_floats ? 0 : int64_t{pixel_cut_.size} * epilogue_->stride() * static_cast<int64_t>(sizeof(float)),
                 pixel_cut_.size);
  }

  // Of a thread: its rows or sums, then the gathered steps of `pixels` pixels.
  void plan_scratch(int64_t bytes, int64_t pixels) {
    rest_at_ = round_up(bytes, 64);
    rest_stride_ = pixels * kByteGroup;
    thread_scratch_bytes = rest_at_ + rest_count_ * rest_stride_;
  }

  void run_job(const RunContext& context, int job, int thread) const {
    const int pixel_job = job / block_cut_.jobs, block_job = job % block_cut_.jobs, stride = epilogue_->stride();
    const int first = pixel_cut_.first(pixel_job), last = pixel_cut_.last(pixel_job);
    const int channel = block_cut_.first(block_job) * kFloatBlock;
    const int end = groups_ == 1 ? std::min(block_cut_.last(block_job) * kFloatBlock, stride) : stride;
    const EpilogueTarget target = epilogue_->target(context);
    float* sums = target.out ? target.out + int64_t{first} * stride : reinterpret_cast<float*>(context.scratch_of(thread));
    if (groups_ == 1)
      sum_pixels(context, thread, first, last, channel, end, sums);
    else
      sum_groups(context, first, last, sums);
    if (epilogue_->has_work())
      context.kernels->epilogue(epilogue_->params(), target, sums + channel, stride, first, last, channel, end - channel);
  }

  ByteTile new_tile(int block) const {
    ByteTile tile;
    tile.steps = steps_.data();
    tile.step_count = static_cast<int>(steps_.size());
    tile.rest_count = rest_count_;
    tile.rest_stride = rest_stride_;
    tile.weights = &weights_[block * block_bytes()];
    tile.minus = &minus_[block * kFloatBlock];
    tile.scale = &scale_[block * kFloatBlock];
    return tile;
  }

  int64_t window_at(int y, int x) const { return layout_.at(window_.row(y), window_.column(x)); }

  // Sets the tile's windows to those of some pixels.
  void aim(const RunContext& context, ByteTile& tile, int first, int count, int group) const {
    tile.pixels = count;
    const int64_t down = window_.stride.h * layout_.row_bytes, right = int64_t{window_.stride.w} * layout_.pixel_bytes;
    const int y = first / window_.out.width;
    int x = first - y * window_.out.width;
    const uint8_t* row = context.codes[input_] + window_at(y, 0) + int64_t{group} * channels_;
    for (int p = 0; p < count; p++) {
      tile.input[p] = row + x * right;
      if (++x == window_.out.width) {
        x = 0;
        row += down;
      }
    }
  }

  // Pixels first .. last - 1, channels channel .. end - 1; sums: those of the first pixel.
  void sum_pixels(const RunContext& context, int thread, int first, int last, int channel, int end, float* sums) const {
    const int step = last - first == 1 ? kFloatBlock * kFloatBlocks : context.kernels->float_filters;
    const int pixels = context.kernels->byte_pixels;
    uint8_t* rest = context.scratch_of(thread) + rest_at_;
    if (rest_count_) gather(context, first, last, rest);
    for (int c = channel; c < end; c += step) {
      ByteTile tile = new_tile(c / kFloatBlock);
      tile.filters = std::min(step, end - c);
      for (int p = first; p < last; p += pixels) {
        aim(context, tile, p, std::min(pixels, last - p), 0);
        tile.rest = rest + int64_t{p - first} * kByteGroup;
        for (int i = 0; i < tile.pixels; i++) tile.out[i] = sums + int64_t{p - first + i} * epilogue_->stride() + c;
        context.kernels->byte_tile(tile);
      }
    }
  }

  // The rest of all segments, row by row of the image.
  void gather(const RunContext& context, int first, int last, uint8_t* to) const {
    ByteGather g;
    g.step = window_.stride.w * layout_.pixel_bytes;
    for (int p = first; p < last; p += g.pixels, to += int64_t{g.pixels} * kByteGroup) {
      const int y = p / window_.out.width, x = p - y * window_.out.width;
      g.pixels = std::min(last - p, window_.out.width - x);
      const uint8_t* window = context.codes[input_] + window_at(y, x);
      g.to = to;
      for (size_t i = 0; i < rest_.size(); i += g.count, g.to += rest_stride_) {
        g.count = static_cast<int>(std::min<size_t>(kByteGroup, rest_.size() - i));
        for (int k = 0; k < g.count; k++) g.from[k] = window + rest_[i + k];
        context.kernels->gather_bytes(g);
      }
    }
  }

  void sum_groups(const RunContext& context, int first, int last, float* sums) const {
    float results[kBytePixels][kFloatBlock];
    const int pixels = context.kernels->byte_pixels;
    for (int b = 0; b < groups_ * group_blocks(); b++) {
      const int group = b / group_blocks(), own = b % group_blocks() * kFloatBlock;
      const int count = std::min(kFloatBlock, group_filters_ - own);
      ByteTile tile = new_tile(b);
      tile.filters = padded(count);
      for (int i = 0; i < kBytePixels; i++) tile.out[i] = results[i];
      for (int p = first; p < last; p += pixels) {
        aim(context, tile, p, std::min(pixels, last - p), group);
        context.kernels->byte_tile(tile);
        for (int i = 0; i < tile.pixels; i++)
          std::copy(results[i], results[i] + count,
                    sums + int64_t{p - first + i} * epilogue_->stride() + group * group_filters_ + own);
      }
    }
  }

  Window window_;
  int input_;
  CodeLayout layout_;
  int channels_, groups_, group_filters_;
  std::vector<int64_t> steps_;  // the place of each, relative to a window's start
  std::vector<int64_t> rest_;   // the place of each gathered byte
  int segment_taps_ = 1, segment_steps_ = 1, rest_count_ = 0;
  int64_t rest_at_ = 0, rest_stride_ = 0;
  AlignedVector<int8_t> weights_;  // [group][block][step, then rest][16 filters][4]
  AlignedVector<int32_t> minus_;   // [group][block][16 filters]
  AlignedVector<float> scale_;     // the same
  Cut pixel_cut_, block_cut_;
  std::unique_ptr<Epilogue> epilogue_;
  std::unique_ptr<PooledRows> pooled_;  // if there is a pool
};

}  // namespace

// Gathering takes about as long as this many steps of a block.
int byte_rest_steps(const Convolution& conv, const Kernels& kernels) {
  constexpr int kGatherSteps = 8;
  if (!kernels.gather_bytes || !joins_taps(conv.dilation.w, conv.groups) || conv.stride.w * int64_t{conv.channels} > kGatherStep)
    return 0;
  const int rest = static_cast<int>(int64_t{conv.kernel.w} * conv.channels % kByteGroup);
  const int steps = (conv.kernel.h * rest + kByteGroup - 1) / kByteGroup;
  const bool pays = int64_t{conv.kernel.h - steps} * ((conv.filters + kFloatBlock - 1) / kFloatBlock) >= kGatherSteps;
  return rest && pays ? steps : 0;
}

bool takes_pixels(const Graph& graph) {
  if (graph.mean.empty() || graph.input.channels > kMostImageChannels) return false;
  bool found = false;
  for (const Output& output : graph.outputs)
    if (output.value == 0) return false;
  for (const Op& op : graph.ops) {
    for (const Step& s : op.steps)
      if ((s.kind == StepKind::Add || s.kind == StepKind::Mul) && s.value == 0) return false;
    if (std::find(op.inputs.begin(), op.inputs.end(), 0) == op.inputs.end()) continue;
    if (op.kind != OpKind::ToBytes) return false;
    found = true;
    for (int c = 0; c < graph.input.channels; c++) {
      const float mean = static_cast<float>(graph.mean[c]), deviation = static_cast<float>(graph.deviation[c]);
      for (int n = 0; n < kLevels; n++) {
        const float x = (static_cast<float>(n) / 255.f - mean) / deviation;
        const float place = x * at(op.range.scale, c) + at(op.range.shift, c);
        if (!(place > static_cast<float>(n) - 0.5f && place < static_cast<float>(n) + 0.5f)) return false;
      }
    }
  }
  return found;
}

std::unique_ptr<Task> make_to_bytes(const Op& op, int input, int output, const std::vector<ValueInfo>& values, int jobs) {
  return std::make_unique<ToBytes>(op, input, output, values, jobs);
}

std::unique_ptr<Task> make_byte_conv(const Op& op, const ByteRange& range, int input, const std::vector<ValueInfo>& values,
                                     std::unique_ptr<Epilogue> epilogue, const Op* pool, std::unique_ptr<Epilogue> pool_epilogue,
                                     const Kernels& kernels, int jobs) {
  if (kernels.whole_stem_tile && is_stem(op))
    return make_whole_stem_conv(op, range, input, values, std::move(epilogue), pool, std::move(pool_epilogue), jobs);
  return std::make_unique<ByteConv>(op, range, input, values, std::move(epilogue), pool, std::move(pool_epilogue), kernels,
                                    jobs);
}

}  // namespace unflip
