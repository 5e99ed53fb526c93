// Resizes a part of an RGB image with a triangle filter: byte for byte what Pillow's BILINEAR computes.
//
// A separate library with a C interface, which unflip/resize.py loads. More than 400 lines, because one command must be
// able to build it:
//
//   g++ -std=c++17 -O3 -ffp-contract=off -shared -fPIC -o src/unflip/libunflip_pixels.so native/pixels/resize.cpp \
//       native/src/kernels/cpu.cpp
//
// Per axis, with scale = in / out and reach = max(scale, 1): output i is centered at (i + 0.5) · scale, and a pixel at
// distance d from there has the weight max(0, 1 - d / reach). Weights are divided by their sum and rounded to 22
// fractional bits. The sums of the first axis are rounded to 8 bits before those of the second axis are computed.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "../src/kernels/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define UNFLIP_AVX2 __attribute__((target("avx2")))
#endif

namespace {

using std::int32_t;
using std::int64_t;
using std::uint8_t;

constexpr int BITS = 22;  // the fractional bits of a weight
constexpr int32_t HALF = 1 << (BITS - 1);
// AVX2 multiplies numbers of 16 bits, so it needs a weight as high · 2^11 + low.
constexpr int LOW_BITS = 11;
constexpr int32_t LOW_MASK = (1 << LOW_BITS) - 1;
constexpr int GROUP = 4;  // columns, and the weights of a column, are padded with zeros to a multiple
constexpr int CHANNELS = 3;
constexpr int PADDING = 32;           // bytes that vectors may read or write after a row
constexpr int32_t LONGEST = 1 << 24;  // of a side, in pixels

enum Status { DONE = 0, BAD_ARGUMENTS = 1, NO_MEMORY = 2 };
enum Instructions { BEST = 0, PLAIN = 1, AVX2 = 2 };

template <typename T>
std::unique_ptr<T[]> zeros(size_t count) {
  return std::unique_ptr<T[]>(new T[count]());  // throws if memory runs out
}

int32_t rounded_up(int32_t count) { return (count + GROUP - 1) / GROUP * GROUP; }

// How the outputs of one axis are made of its inputs.
struct Scale {
  double step, reach;  // inputs per output; the distance at which a weight becomes 0

  Scale(int32_t in, int32_t out) : step(static_cast<double>(in) / out), reach(step < 1 ? 1 : step) {}

  double center(int32_t output) const { return (output + 0.5) * step; }
  int32_t begin(int32_t output) const {
    const int32_t found = static_cast<int32_t>(center(output) - reach + 0.5);
    return found < 0 ? 0 : found;
  }
  int32_t end(int32_t output, int32_t in) const {
    const int32_t found = static_cast<int32_t>(center(output) + reach + 0.5);
    return found > in ? in : found;
  }
};

// Which inputs each output of one axis sums, and their weights.
struct Axis {
  int32_t count;                       // outputs
  int32_t most;                        // the largest number of inputs of an output
  int32_t stride;                      // weights per output, padded with zeros
  std::unique_ptr<int32_t[]> first;    // input of each output, padded
  std::unique_ptr<int32_t[]> inputs;   // number of inputs of each output
  std::unique_ptr<int32_t[]> weights;  // count × stride
};

// Outputs begin .. begin + count - 1 of the `out` that `in` inputs become; the last one first if reversed.
Axis make_axis(int32_t in, int32_t out, int32_t begin, int32_t count, bool reversed) {
  const Scale scale(in, out);
  const bool same = in == out;  // Pillow leaves such an axis as it is
  Axis axis{count, 1, 0, zeros<int32_t>(rounded_up(count)), zeros<int32_t>(count), nullptr};
  for (int32_t i = 0; i < count; ++i) {
    const int32_t place = reversed ? count - 1 - i : i;
    axis.first[place] = same ? begin + i : scale.begin(begin + i);
    axis.inputs[place] = same ? 1 : scale.end(begin + i, in) - axis.first[place];
    if (axis.inputs[place] > axis.most) axis.most = axis.inputs[place];
  }
  axis.stride = rounded_up(axis.most);
  axis.weights = zeros<int32_t>(static_cast<size_t>(count) * axis.stride);
  const auto exact = zeros<double>(axis.most);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t place = reversed ? count - 1 - i : i;
    const double center = scale.center(begin + i);
    double sum = 0;
    for (int32_t k = 0; k < axis.inputs[place]; ++k) {
      double distance = (axis.first[place] + k - center + 0.5) * (1 / scale.reach);
      distance = distance < 0 ? -distance : distance;
      exact[k] = same ? 1 : distance < 1 ? 1 - distance : 0;
      sum += exact[k];
    }
    for (int32_t k = 0; k < axis.inputs[place]; ++k) {
      const double share = sum != 0 ? exact[k] / sum : 0;
      axis.weights[static_cast<size_t>(place) * axis.stride + k] = static_cast<int32_t>(0.5 + share * (1 << BITS));
    }
  }
  return axis;
}

uint8_t rounded(int32_t sum) {
  const int32_t value = sum >> BITS;
  return static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
}

// One row of pixels to one row of `axis.count` pixels. The row has PADDING bytes at its end.
void columns_plain(const uint8_t* row, const Axis& axis, const int16_t*, uint8_t* out) {
  for (int32_t i = 0; i < axis.count; ++i) {
    const uint8_t* pixel = row + static_cast<size_t>(axis.first[i]) * CHANNELS;
    const int32_t* weights = &axis.weights[static_cast<size_t>(i) * axis.stride];
    int32_t red = HALF, green = HALF, blue = HALF;
    for (int32_t k = 0; k < axis.inputs[i]; ++k, pixel += CHANNELS) {
      red += pixel[0] * weights[k];
      green += pixel[1] * weights[k];
      blue += pixel[2] * weights[k];
    }
    *out++ = rounded(red);
    *out++ = rounded(green);
    *out++ = rounded(blue);
  }
}

// The weighted sum of `count` rows of `length` bytes.
void rows_plain(const uint8_t* const* rows, const int32_t* weights, int32_t count, size_t length, uint8_t* out) {
  constexpr size_t BLOCK = 64;
  int32_t sums[BLOCK];
  for (size_t start = 0; start < length; start += BLOCK) {
    const size_t size = length - start < BLOCK ? length - start : BLOCK;
    for (size_t x = 0; x < size; ++x) sums[x] = HALF;
    for (int32_t k = 0; k < count; ++k) {
      const uint8_t* row = rows[k] + start;
      const int32_t weight = weights[k];
      for (size_t x = 0; x < size; ++x) sums[x] += row[x] * weight;
    }
    for (size_t x = 0; x < size; ++x) out[start + x] = rounded(sums[x]);
  }
}

// Weights as columns_avx2 needs them: blocks of 16 high parts and 16 low parts, which alternate between two inputs. The
// first eight are for inputs 0 and 1 of a group of four, the last eight for 2 and 3. If no column has more than two
// inputs, the last eight are those of the next column but one: of columns 0 to 3, block 0 is for 0 and 2, block 1 for 1
// and 3.
std::unique_ptr<int16_t[]> split_weights(const Axis& axis) {
  const bool pairs = axis.most <= 2;
  const size_t columns = rounded_up(axis.count), groups = axis.stride / GROUP;
  const size_t blocks = pairs ? columns / 2 : columns * groups;
  auto split = zeros<int16_t>(blocks * 32);
  for (size_t b = 0; b < blocks; ++b) {
    for (size_t half = 0; half < 2; ++half) {
      const size_t column = pairs ? b / 2 * 4 + b % 2 + half * 2 : b / groups;
      const size_t input = pairs ? 0 : b % groups * GROUP + half * 2;
      if (column >= static_cast<size_t>(axis.count)) continue;
      for (size_t lane = 0; lane < 8; ++lane) {
        const int32_t weight = axis.weights[column * axis.stride + input + lane % 2];
        split[b * 32 + half * 8 + lane] = static_cast<int16_t>(weight >> LOW_BITS);
        split[b * 32 + 16 + half * 8 + lane] = static_cast<int16_t>(weight & LOW_MASK);
      }
    }
  }
  return split;
}

#ifdef UNFLIP_AVX2

// The three sums of a column: those of inputs 0, 1, 4, 5, ... in the lower half, the others in the upper half.
UNFLIP_AVX2 inline __m256i column_sums(const uint8_t* pixel, const int16_t* split, int32_t groups) {
  // Each channel of two neighbors side by side, as numbers of 16 bits: inputs 0 and 1 below, 2 and 3 above.
  const __m256i pairs = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1, 6, -1, 9, -1, 7, -1, 10, -1, 8,
                                         -1, 11, -1, -1, -1, -1, -1);
  __m256i high = _mm256_setzero_si256(), low = high;
  for (int32_t g = 0; g < groups; ++g, pixel += GROUP * CHANNELS, split += 32) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pixel));
    const __m256i values = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), pairs);
    const __m256i* weights = reinterpret_cast<const __m256i*>(split);
    high = _mm256_add_epi32(high, _mm256_madd_epi16(values, _mm256_loadu_si256(weights)));
    low = _mm256_add_epi32(low, _mm256_madd_epi16(values, _mm256_loadu_si256(weights + 1)));
  }
  return _mm256_add_epi32(_mm256_slli_epi32(high, LOW_BITS), low);
}

UNFLIP_AVX2 inline __m256i finish(__m256i sums) {
  return _mm256_srai_epi32(_mm256_add_epi32(sums, _mm256_set1_epi32(HALF)), BITS);
}

// Rounds and stores four pixels: 0 and 2 in one vector, 1 and 3 in the other.
UNFLIP_AVX2 inline void store_four(__m256i even, __m256i odd, uint8_t* out) {
  const __m256i pixels = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 4, 5, 6, -1, -1, -1,
                                          -1, -1, -1, -1, -1, -1, -1);
  const __m256i words = _mm256_packs_epi32(finish(even), finish(odd));  // 0, 1 in one half and 2, 3 in the other
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_packus_epi16(words, words), pixels);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(bytes));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 6), _mm256_extracti128_si256(bytes, 1));
}

// Two columns with at most two inputs each.
UNFLIP_AVX2 inline __m256i pair_sums(const uint8_t* one, const uint8_t* other, const int16_t* split) {
  const __m256i pairs = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1, 0, -1, 3, -1, 1, -1, 4, -1, 2,
                                         -1, 5, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(one))),
                                                _mm_loadl_epi64(reinterpret_cast<const __m128i*>(other)), 1);
  const __m256i values = _mm256_shuffle_epi8(bytes, pairs);
  const __m256i* weights = reinterpret_cast<const __m256i*>(split);
  return _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(values, _mm256_loadu_si256(weights)), LOW_BITS),
                          _mm256_madd_epi16(values, _mm256_loadu_si256(weights + 1)));
}

UNFLIP_AVX2 void columns_by_pairs(const uint8_t* row, const Axis& axis, const int16_t* split, uint8_t* out) {
  for (int32_t i = 0; i < axis.count; i += 4, out += 4 * CHANNELS, split += 64) {
    const int32_t* first = &axis.first[i];
    const auto at = [&](int32_t column) { return row + first[column] * size_t{CHANNELS}; };
    store_four(pair_sums(at(0), at(2), split), pair_sums(at(1), at(3), split + 32), out);
  }
}

// Columns after the last one have the weight 0 and are written into the padding of `out`.
template <int32_t GROUPS>  // per column; 0: any number
UNFLIP_AVX2 void columns_by_four(const uint8_t* row, const Axis& axis, const int16_t* split, uint8_t* out) {
  const int32_t groups = GROUPS ? GROUPS : axis.stride / GROUP;
  for (int32_t i = 0; i < axis.count; i += 4, out += 4 * CHANNELS) {
    __m256i sums[4];
    for (int32_t j = 0; j < 4; ++j) {
      const size_t column = static_cast<size_t>(i) + j;
      sums[j] = column_sums(row + axis.first[column] * size_t{CHANNELS}, split + column * groups * 32, groups);
    }
    store_four(
        _mm256_add_epi32(_mm256_permute2x128_si256(sums[0], sums[2], 0x20), _mm256_permute2x128_si256(sums[0], sums[2], 0x31)),
        _mm256_add_epi32(_mm256_permute2x128_si256(sums[1], sums[3], 0x20), _mm256_permute2x128_si256(sums[1], sums[3], 0x31)),
        out);
  }
}

UNFLIP_AVX2 void columns_avx2(const uint8_t* row, const Axis& axis, const int16_t* split, uint8_t* out) {
  if (axis.most <= 2) return columns_by_pairs(row, axis, split, out);
  if (axis.stride == GROUP) return columns_by_four<1>(row, axis, split, out);
  if (axis.stride == 2 * GROUP) return columns_by_four<2>(row, axis, split, out);
  columns_by_four<0>(row, axis, split, out);
}

UNFLIP_AVX2 inline __m256i sixteen(const uint8_t* bytes) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// 16 bytes at `x`: rows are added in pairs, because madd sums two products.
template <int32_t COUNT>  // rows; 0: any number
UNFLIP_AVX2 inline void add_rows(const uint8_t* const* rows, const int32_t* weights, int32_t count, size_t x, uint8_t* out) {
  if (COUNT) count = COUNT;
  __m256i high[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  __m256i low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int32_t k = 0; k < count; k += 2) {
    const bool pair = k + 1 < count;
    const int32_t first = weights[k], second = pair ? weights[k + 1] : 0;
    const __m256i above = sixteen(rows[k] + x), below = pair ? sixteen(rows[k + 1] + x) : _mm256_setzero_si256();
    const __m256i highs = _mm256_set1_epi32((first >> LOW_BITS) | (second >> LOW_BITS) << 16);
    const __m256i lows = _mm256_set1_epi32((first & LOW_MASK) | (second & LOW_MASK) << 16);
    const __m256i values[2] = {_mm256_unpacklo_epi16(above, below), _mm256_unpackhi_epi16(above, below)};
    for (int32_t j = 0; j < 2; ++j) {
      high[j] = _mm256_add_epi32(high[j], _mm256_madd_epi16(values[j], highs));
      low[j] = _mm256_add_epi32(low[j], _mm256_madd_epi16(values[j], lows));
    }
  }
  const __m256i words = _mm256_packs_epi32(finish(_mm256_add_epi32(_mm256_slli_epi32(high[0], LOW_BITS), low[0])),
                                           finish(_mm256_add_epi32(_mm256_slli_epi32(high[1], LOW_BITS), low[1])));
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + x), _mm256_castsi256_si128(bytes));
}

template <int32_t COUNT>
UNFLIP_AVX2 void rows_by_sixteen(const uint8_t* const* rows, const int32_t* weights, int32_t count, size_t length, uint8_t* out) {
  for (size_t x = 0; x + 16 <= length; x += 16) add_rows<COUNT>(rows, weights, count, x, out);
  if (length % 16)
    add_rows<COUNT>(rows, weights, count, length - 16, out);  // the last 16 bytes; some of them were written before
}

UNFLIP_AVX2 void rows_avx2(const uint8_t* const* rows, const int32_t* weights, int32_t count, size_t length, uint8_t* out) {
  if (length < 16) return rows_plain(rows, weights, count, length, out);
  if (count == 2) return rows_by_sixteen<2>(rows, weights, count, length, out);
  if (count == 3) return rows_by_sixteen<3>(rows, weights, count, length, out);
  if (count == 4) return rows_by_sixteen<4>(rows, weights, count, length, out);
  rows_by_sixteen<0>(rows, weights, count, length, out);
}

bool has_avx2() {
  static const bool found = unflip::cpu_has_avx2();
  return found;
}

#else

constexpr auto columns_avx2 = columns_plain;
constexpr auto rows_avx2 = rows_plain;
bool has_avx2() { return false; }

#endif

struct Task {
  const uint8_t* pixels;  // of the box's upper left corner
  int64_t stride;
  int32_t width, height;  // of the box
  int32_t out_width, out_height;
  int32_t window_left, window_top, window_width, window_height;
  bool flip, rows_first, avx2;
  uint8_t* out;
  int64_t out_stride;
};

class Resizer {
 public:
  explicit Resizer(const Task& task)
      : task_(task), across_(make_axis(task.width, task.out_width, task.window_left, task.window_width, task.flip)),
        down_(make_axis(task.height, task.out_height, task.window_top, task.window_height, false)),
        columns_change_(task.width != task.out_width || task.flip), rows_change_(task.height != task.out_height),
        in_length_(static_cast<size_t>(task.width) * CHANNELS), length_(static_cast<size_t>(task.window_width) * CHANNELS),
        rows_(zeros<const uint8_t*>(down_.most)) {
    if (!columns_change_) return;
    if (task.avx2) split_ = split_weights(across_);
    // Padded weights reach up to `stride` pixels beyond the end of a row.
    row_ = zeros<uint8_t>(in_length_ + static_cast<size_t>(across_.stride) * CHANNELS + PADDING);
    kept_length_ = length_ + PADDING;
    kept_ = zeros<uint8_t>(kept_length_ * down_.most);
  }

  void run() {
    for (int32_t y = 0; y < task_.window_height; ++y) {
      if (columns_change_ && rows_change_ && task_.rows_first) {
        point_to_pixels(y, 0);
        sum_rows(y, in_length_, row_.get());
        resize_columns(kept_.get());
        std::memcpy(out(y), kept_.get(), length_);
        continue;
      }
      if (columns_change_) {
        point_to_kept(y);
      } else {
        point_to_pixels(y, task_.window_left);
      }
      if (rows_change_) {
        sum_rows(y, length_, out(y));
      } else {
        std::memcpy(out(y), rows_[0], length_);
      }
    }
  }

 private:
  uint8_t* out(int32_t y) const { return task_.out + y * task_.out_stride; }

  const uint8_t* pixels(int32_t row) const { return task_.pixels + row * task_.stride; }

  void point_to_pixels(int32_t y, int32_t left) {
    for (int32_t k = 0; k < down_.inputs[y]; ++k) rows_[k] = pixels(down_.first[y] + k) + size_t{CHANNELS} * left;
  }

  // Rows whose columns are done are kept as long as output rows can need them: row i is at i % most.
  void point_to_kept(int32_t y) {
    const int32_t first = down_.first[y], end = first + down_.inputs[y];
    for (next_ = next_ < first ? first : next_; next_ < end; ++next_) {
      std::memcpy(row_.get(), pixels(next_), in_length_);
      resize_columns(&kept_[next_ % down_.most * kept_length_]);
    }
    for (int32_t k = 0; first + k < end; ++k) rows_[k] = &kept_[(first + k) % down_.most * kept_length_];
  }

  void resize_columns(uint8_t* to) const { (task_.avx2 ? columns_avx2 : columns_plain)(row_.get(), across_, split_.get(), to); }

  void sum_rows(int32_t y, size_t length, uint8_t* to) const {
    const int32_t* weights = &down_.weights[static_cast<size_t>(y) * down_.stride];
    (task_.avx2 ? rows_avx2 : rows_plain)(rows_.get(), weights, down_.inputs[y], length, to);
  }

  const Task& task_;
  const Axis across_, down_;
  const bool columns_change_, rows_change_;
  const size_t in_length_, length_;
  size_t kept_length_ = 0;
  int32_t next_ = 0;  // the first row whose columns are not done
  std::unique_ptr<const uint8_t*[]> rows_;
  std::unique_ptr<int16_t[]> split_;
  std::unique_ptr<uint8_t[]> row_, kept_;
};

bool inside(int32_t begin, int32_t end, int32_t size) { return 0 <= begin && begin < end && end <= size; }

bool fits(int32_t size) { return 0 < size && size <= LONGEST; }

}  // namespace

#if defined(_WIN32)
#define UNFLIP_API __declspec(dllexport)
#else
#define UNFLIP_API __attribute__((visibility("default")))
#endif

// `pixels`: height × width × 3 bytes, `stride` bytes per row. The box left, top, right, bottom of them is resized to
// out_width × out_height. Of that, the window of window_width × window_height pixels at window_left, window_top is
// written to `out`, mirrored if `flip`. Nothing is read outside of the box. `out` must not overlap with `pixels`.
// `rows_first`: whether rows are resized before columns, which can change a value by 1; Pillow 13 chooses.
// `instructions`: 0 for the best of this CPU, 1 for plain C++, 2 for AVX2.
// Returns 0, 1 for arguments that make no sense (or instructions that the CPU does not have), 2 if memory runs out.
extern "C" UNFLIP_API int unflip_resize_rgb(const uint8_t* pixels, int64_t stride, int32_t width, int32_t height, int32_t left,
                                            int32_t top, int32_t right, int32_t bottom, int32_t out_width, int32_t out_height,
                                            int32_t window_left, int32_t window_top, int32_t window_width, int32_t window_height,
                                            int32_t flip, int32_t rows_first, int32_t instructions, uint8_t* out,
                                            int64_t out_stride) noexcept {
  if (!pixels || !out || !fits(width) || !fits(height) || !fits(out_width) || !fits(out_height)) return BAD_ARGUMENTS;
  if (!fits(window_width) || !fits(window_height)) return BAD_ARGUMENTS;
  if (!inside(left, right, width) || !inside(top, bottom, height)) return BAD_ARGUMENTS;
  if (window_left < 0 || window_left > out_width - window_width) return BAD_ARGUMENTS;
  if (window_top < 0 || window_top > out_height - window_height) return BAD_ARGUMENTS;
  if (stride < int64_t{width} * CHANNELS || out_stride < int64_t{window_width} * CHANNELS) return BAD_ARGUMENTS;
  if (stride > INT64_MAX / LONGEST || out_stride > INT64_MAX / LONGEST) return BAD_ARGUMENTS;
  if (instructions < BEST || instructions > AVX2 || (instructions == AVX2 && !has_avx2())) return BAD_ARGUMENTS;
  try {
    const uint8_t* corner = pixels + top * stride + int64_t{left} * CHANNELS;
    const bool avx2 = instructions != PLAIN && has_avx2();
    const Task task{corner,       stride,        right - left, bottom - top,    out_width, out_height, window_left, window_top,
                    window_width, window_height, flip != 0,    rows_first != 0, avx2,      out,        out_stride};
    Resizer(task).run();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
  return DONE;
}
