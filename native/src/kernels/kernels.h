// The interface of an instruction set: a few small functions on plain memory. Everything else (shapes, borders, threads, memory)
// is in ../engine, compiled once. All sets give the same bits, so each function states exactly what it computes, in which order.
//
// This header and the files that use it for a special instruction set must not instantiate anything from the standard
// library: the linker keeps one copy of an inline function, and that copy could contain instructions that the CPU lacks.
#pragma once

#include <cstdint>

#include "../activation.h"

namespace unflip {

// Channels of float values are padded to a multiple of this many (only the network's input is not padded).
constexpr int kLanes = 8;

constexpr int padded(int channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

// -------------------------------------------------------------------------------------------------------------- epilogue
// The steps of docs/format.md that are applied to a sum, then storing the result as floats, as bits, or both.

enum class EpilogueKind { Scale, Shift, ScaleShift, Prelu, Clamp, Add, MulChannels, MulGroups };

struct EpilogueStep {
  EpilogueKind kind = EpilogueKind::Scale;
  const float* scale = nullptr;  // padded to the channels; Prelu: the slope
  const float* shift = nullptr;
  float low = 0, high = 0;     // Clamp
  int value = 0;               // Add, Mul: which value
  int64_t value_stride = 0;    // floats from one pixel of it to the next
  const int* group = nullptr;  // MulGroups: for each of our channels, the channel of the value
};

// Where the bits of a code are: plane p, row y, column x, channel c is bit c % 8 of byte
//   p * plane_bytes + (y + top) * row_bytes + (x + left) * pixel_bytes + c / 8.
// There is a border of zeros, as wide as needed by the convolutions that read the code.
struct CodeLayout {
  int planes = 0, pixel_bytes = 0;
  int top = 0, left = 0, rows = 0, columns = 0;  // rows and columns with the border
  int64_t row_bytes = 0, plane_bytes = 0;

  int64_t at(int y, int x) const { return (y + top) * row_bytes + int64_t{x + left} * pixel_bytes; }
};

// Thresholds that are nearly evenly spaced. Let p = clamp(x * scale + shift, 0, most) and n = floor(p). Thresholds 0 .. n - 1 are
// reached, n + 1 and above are not. For threshold n: if frac(p) > high it is reached, if frac(p) < low it is not; otherwise x is
// compared with threshold n itself. In the padding the threshold is NaN.
struct EvenSteps {
  const float *scale = nullptr, *shift = nullptr;  // for each channel; null: thresholds are compared one by one
  float most = 0, low = 0, high = 0;
  const int* first = nullptr;  // the position of each channel's thresholds
  const float* threshold = nullptr;
};

struct EpilogueParams {
  int width = 0;   // of the image; pixels are numbered row by row
  int stride = 0;  // floats from one pixel to the next in the stored value
  const EpilogueStep* steps = nullptr;
  int step_count = 0;

  int thresholds = 0;                // of the quantizer; 0: no bits
  const float* threshold = nullptr;  // thresholds x stride; NaN (never reached) in the padding
  const uint8_t* strict = nullptr;   // x > t instead of x >= t
  bool levels = false;               // planes are the binary digits of the number of thresholds reached
  int unit = -1;                     // the value that multiplies the thresholds, or -1
  bool one_at_least = false;         // there is one threshold, not strict, and no unit
  EvenSteps even;                    // only with levels, all or none strict, and no unit
  CodeLayout code;
};

struct EpilogueTarget {
  const float* const* values = nullptr;  // the values that steps and unit read, by number
  float* out = nullptr;                  // null: floats are not stored
  uint8_t* bits = nullptr;
};

// The sums of a binary convolution. At pixel first + i and channel channel + c the sum is
//   scale[c] * (base[c] - multiple * count[i * count_stride + c]),  base = bases + class_of[pixel] * base_stride,
// in which only the last product is rounded. The pointers point to the first channel.
struct Counts {
  const uint16_t* count = nullptr;
  int64_t count_stride = 0;
  const float* bases = nullptr;
  int64_t base_stride = 0;
  const uint16_t* class_of = nullptr;  // for every pixel of the image
  const float* scale = nullptr;
  float multiple = 1;
};

// The same if the code has several planes, the weights several bases, or the filters an offset: a sum of terms
//   scale[c] * (base[c] - the sum over its planes of multiple[p] * count), base = bases + class_of[pixel] * base_stride,  or
//   scale[c] * window[pixel],
// whose numbers in brackets are exact. Each product and each sum of two terms is rounded. The pointers point to the first
// channel.
struct CountTerm {
  const float* scale = nullptr;
  const float* bases = nullptr;
  int64_t base_stride = 0;          // 0: the same in all classes
  const uint16_t* count = nullptr;  // of the first plane at the first pixel
  const float* multiple = nullptr;  // for each plane
  int planes = 0;
  const float* window = nullptr;  // a number for each pixel, or null
};

struct CountSums {
  const CountTerm* terms = nullptr;
  int term_count = 0;
  int64_t plane_stride = 0, pixel_stride = 0;  // counts from one plane to the next, and from one pixel
  const uint16_t* class_of = nullptr;          // of the first pixel
  int pixels = 0, channels = 0;                // channels: multiple of 8
  float* sums = nullptr;                       // [pixel][channels]
};

// ------------------------------------------------------------------------------------------------------------------- pooling
// Over a window of rows x columns pixels. The sum starts at 0 and adds the pixels row by row.
// Adjacent windows of one row, with the same number of columns.
struct PoolTile {
  const float* input = nullptr;  // the first window's first pixel
  int windows = 0;
  int rows = 0, columns = 0;                                     // of a window
  int64_t row_stride = 0, column_stride = 0, window_stride = 0;  // floats
  int channels = 0;                                              // multiple of 8
  bool max = false;                                              // p > m ? p : m, from -infinity; or the mean
  bool begins = true, ends = true;                               // rows before them are in `out`; more rows will follow
  float divisor = 1;                                             // of the sum
  float* out = nullptr;                                          // [window][channels]
};

// ----------------------------------------------------------------------------------------------------- float convolution
constexpr int kFloatBlock = 16;  // filters per block of packed weights: weights[block][k][16]
constexpr int kFloatPixels = 6;  // pixels per tile
constexpr int kFloatBlocks = 4;  // blocks per tile of one pixel

// out[pixel][filter] = the sum over k of input * weight, by fused multiply-add in the order of k, from 0.
// k runs over the segments of a window and the floats of each segment, which are contiguous.
struct FloatTile {
  const float* input[kFloatPixels] = {};  // each pixel's window
  int pixels = 0;                         // 1 .. 6
  const int64_t* segments = nullptr;      // the start of each, relative to the window's start
  int segment_count = 0, segment_length = 0;
  const float* weights = nullptr;  // of the first block
  int filters = 0;                 // multiple of 8; at most Kernels::float_filters, or 64 with one pixel
  float* out[kFloatPixels] = {};
};

// ----------------------------------------------------------------------------------------------------- 8-bit convolution
constexpr int kBytePixels = 6;  // pixels per tile, at most
constexpr int kByteGroup = 4;   // whole numbers per step: the unit of dot-product instructions
constexpr int kWideGroup = 2;   // the same of numbers of 16 bits

// out[pixel][filter] = float(the sum over k of input * weight - minus[filter]) * scale[filter]. The sum is exact; the conversion to
// float and the product are rounded. k runs over the segments of a window and the bytes of each segment, as in FloatTile. A
// segment may extend beyond the window, where the weights are 0.
struct ByteTile {
  const uint8_t* input[kBytePixels] = {};  // each pixel's window
  int pixels = 0;                          // 1 .. Kernels::byte_pixels
  const int64_t* steps = nullptr;          // the place of each step's four bytes, relative to the window's start
  int step_count = 0;
  const uint8_t* rest = nullptr;  // more steps, four bytes for each pixel in order; the next step is `rest_stride` bytes further
  int rest_count = 0;             // always 0 if Kernels::gather_bytes is null
  int64_t rest_stride = 0;
  const int8_t* weights = nullptr;  // of the first block of 16 filters: [block][step, then rest][filter][4]
  const int32_t* minus = nullptr;   // the sum of weight * (zero - Kernels::byte_bias)
  const float* scale = nullptr;
  int filters = 0;  // multiple of 8; at most Kernels::float_filters, or 64 with one pixel
  float* out[kBytePixels] = {};
  // Of wide_byte_tile: any multiple of 8 filters, no gathered steps.
  int segment_steps = 1;                  // steps that follow one another; divides step_count
  const int16_t* wide_weights = nullptr;  // instead of `weights`: [block][pair of numbers][filter][2]
  int16_t* wide_input = nullptr;          // a place for all numbers of kBytePixels pixels
};

// Steps of bytes that are not next to each other: for each pixel up to four bytes, at from[i] + pixel * step; the others are 0.
struct ByteGather {
  const uint8_t* from[kByteGroup] = {};
  int count = 0;  // 1 .. kByteGroup
  int step = 0;   // at most kGatherStep
  int pixels = 0;
  uint8_t* to = nullptr;
};
constexpr int kGatherStep = 8;

// Two rows of an 8-bit convolution with a max pool of 3 x 3, stride 2 and padding 1 after it. Window x of row y of the pool has the
// largest sums of two by two pixels of rows 2 y and 2 y + 1, of the odd column before them, and of row 2 y - 1 above all these:
//
//     row 2 y - 1      o e o          from the call before, in `partial`
//     row 2 y          o e o
//     row 2 y + 1      o e o          with the same columns they become the next row's `partial`
//
// The result is float((largest ^ flip) + plus) * scale, in which the conversion and the product are rounded. If a filter's scale
// is negative, its weights here are negated. Then flip is -1 (otherwise 0), and `plus` restores the sign of the sum. It also has
// -minus of ByteTile. Gathered steps, weights and filters are those of ByteTile.
struct BytePoolRow {
  const uint8_t* input[2] = {};  // the first window of each row; both are the same if there is no second row
  int64_t right = 0;             // bytes to the next window
  int pixels = 0;                // of a row of the convolution
  const int64_t* steps = nullptr;
  int step_count = 0;
  const uint8_t* rest[2] = {};
  int rest_count = 0;
  int64_t rest_stride = 0;
  const int8_t* weights = nullptr;
  const int32_t *flip = nullptr, *plus = nullptr;
  const float* scale = nullptr;
  int filters = 0;             // multiple of 8, at most 64
  int32_t* partial = nullptr;  // of each window, 64-byte aligned
  int64_t partial_stride = 0;
  float* out = nullptr;  // null: only `partial` is wanted
  int64_t out_stride = 0;
};

// ------------------------------------------------------------------------------- float convolution, 7 x 7 with stride 2
// See stem.h for the idea, a picture, and the order of operations.
constexpr int kStemTiles = 6;   // tiles of two by two outputs (of whole numbers: two by four), at most
constexpr int kStemTerms = 10;  // for two outputs next to each other
constexpr int kStemRows = 9;    // of the input, for a tile

template <class T>
struct StemTileOf {
  const T* lines[kStemTerms] = {};  // of a row of tiles
  int channels = 0;
  int first = 0, tiles = 0;      // 1 .. 6 tiles of that row
  const T* weights = nullptr;    // of the first block
  const float* scale = nullptr;  // of whole numbers, for each filter
  int filters = 0;               // multiple of 8; at most Kernels::float_filters
  float* out[2] = {};            // the two rows of the image; the second is null if the image ends with the first
  int width = 0;                 // of the image; a tile may extend beyond it
  int64_t out_stride = 0;        // floats from one pixel to the next
};

using StemTile = StemTileOf<float>;
using WholeStemTile = StemTileOf<int16_t>;

// ------------------------------------------------------------------------------------- float convolution, depthwise
// See depthwise.h for a picture. out[pixel][channel] = the sum over the taps of input * weight, by fused multiply-add in the
// order of the taps, from 0. Either any number of adjacent pixels, or up to 6 separate pixels.
constexpr int kDepthwisePixels = 6;

struct DepthwiseTile {
  const float* const* taps = nullptr;  // each tap of the first pixel; if separate: of each pixel, [tap][pixel]
  int tap_count = 0;
  int pixels = 0;
  int64_t pixel_step = 0;          // floats from a tap of one pixel to the same tap of the next
  const int* columns = nullptr;    // if separate: their positions in `out`
  const float* weights = nullptr;  // [tap][channels]
  int channels = 0;                // multiple of 8
  float* out = nullptr;            // [pixel][channels]
};

// ------------------------------------------------------------------------------------------- binary convolution by look-up
// See look_up.h for the idea and a picture.
constexpr int kLookUpPairs = 8;  // at most

struct LookUpTile {
  int filters = 0;                           // 64 (two pairs of pixels), 32 (four) or 16 (eight)
  bool adjacent = false;                     // the numbers of pair j start `tap` * j after those of pair 0
  const uint16_t* pairs[kLookUpPairs] = {};  // look-up numbers of each pair's window
  int64_t tap = 0;                           // distance between the three numbers of a group
  int segments = 0, groups = 0;              // groups in each segment
  int64_t segment_step = 0;                  // numbers from one segment to the next
  const uint8_t* weights = nullptr;          // 32-byte aligned
  uint16_t* counts = nullptr;                // [2 * pair + which pixel of it][filters], 32-byte aligned
};

// ---------------------------------------------------------------------------------------- binary convolution by popcount
// See popcount.h for the idea and a picture.
constexpr int popcount_pixels(int filters) { return 128 / filters; }  // of one tile, at most

// Copies the windows of adjacent pixels and pairs their words.
struct WindowCopy {
  const uint8_t* from = nullptr;  // the first pixel's window
  int pixels = 0;
  int64_t pixel_step = 0;  // bytes from one pixel's window to the next
  int rows = 0, runs = 0;  // of a window; a row has `runs` runs of bytes
  int64_t row_step = 0, run_step = 0;
  int run = 0;             // bytes; up to 63 more may be read
  uint32_t* to = nullptr;  // one window after another; up to 63 bytes more may be written
};

struct PopcountTile {
  int filters = 0;  // 32 (up to four pixels) or 16 (up to eight)
  int pixels = 0;
  int words = 0;                             // of a window
  const uint32_t* const* windows = nullptr;  // of each pixel, paired; a single word is the second one
  const int32_t* pairs = nullptr;            // the place of each pair in a window, in words
  const uint32_t* weights = nullptr;         // paired, 64-byte aligned
  uint16_t* counts = nullptr;                // [pixel][filters]
};

struct Kernels {
  const char* name;

  // Pixels first .. last - 1 and `channels` channels from `channel` on (multiples of 8). source points to the first of these
  // channels at the first pixel. Its pixels are source_stride floats apart. source may be the place of the result.
  void (*epilogue)(const EpilogueParams&, const EpilogueTarget&, const float* source, int64_t source_stride, int first, int last,
                   int channel, int channels);

  // The same for the sums of a binary convolution.
  void (*epilogue_counts)(const EpilogueParams&, const EpilogueTarget&, const Counts&, int first, int last, int channel,
                          int channels);

  void (*sum_counts)(const CountSums&);

  void (*pool)(const PoolTile&);

  // sums[r] = the sum of the absolute values of `count` floats from `from + r * step` on, in the order of sum_abs.h.
  void (*sum_abs)(const float* from, int64_t step, int runs, int64_t count, double* sums);

  // to[i] = function(from[i]), i = 0 .. count - 1; see activations.h.
  void (*activation)(Activation function, const float* from, int64_t count, float* to);

  void (*float_tile)(const FloatTile&);
  void (*stem_tile)(const StemTile&);

  // The ten lines of a row of tiles, from the lines of nine rows of the input; `count` floats, or up to 15 more. The first two
  // are input lines. The others are written to `to`, `step` floats apart.
  void (*stem_lines)(const float* const* rows, int64_t count, float* to, int64_t step);

  void (*depthwise_tile)(const DepthwiseTile&);

  // to[i] = round(clamp(from[i] * scale[i] + shift[i], 0, 255)), i = 0 .. count - 1, rounded to even; 0 for NaN.
  void (*to_bytes)(const float* from, int64_t count, const float* scale, const float* shift, uint8_t* to);

  // to[channels * i + c] = from[c * plane + i], i = 0 .. count - 1.
  void (*interleave_bytes)(const uint8_t* from, int64_t plane, int64_t count, int channels, uint8_t* to);

  void (*byte_tile)(const ByteTile&);

  // out[f] = the number of bits in which window and weights[f] differ, f = 0 .. filters - 1.
  void (*differences)(const uint64_t* window, const uint64_t* weights, int words, int filters, int32_t* out);

  // Look-up numbers of two pixels' bytes: two numbers per byte. May continue to the next multiple of 16 bytes.
  void (*pair_numbers)(const uint8_t* first, const uint8_t* second, int64_t bytes, uint16_t* out);
  void (*look_up_tile)(const LookUpTile&);
  bool prefer_look_up;  // instead of differences

  // Binary convolution by popcount; preferred to both if not null.
  void (*copy_windows)(const WindowCopy&) = nullptr;
  void (*popcount_tile)(const PopcountTile&) = nullptr;

  int float_filters = kFloatBlock;  // the most filters of a float tile with several pixels, and of a stem tile: up to four blocks

  int byte_pixels = kBytePixels;  // the most pixels of a byte tile
  int byte_bias = 0;              // byte tiles subtract this from every input, for signed instructions

  // byte_tile for outputs of more than one pixel, with numbers of 16 bits: each is widened once for all filters. If null, byte_tile is used.
  void (*wide_byte_tile)(const ByteTile&) = nullptr;

  // The same stem for whole numbers; exact, so it gives the bits of byte_tile. If null, byte_tile is used.
  void (*whole_stem_tile)(const WholeStemTile&) = nullptr;
  void (*whole_stem_lines)(const int16_t* const* rows, int64_t count, int16_t* to, int64_t step) = nullptr;

  // to[3 * i + c] = from[c * plane + i], i = 0 .. count - 1. If null, the engine does it.
  void (*interleave3)(const float* from, int64_t plane, int64_t count, float* to) = nullptr;

  void (*gather_bytes)(const ByteGather&) = nullptr;

  // popcount_tile and epilogue_counts for pixels first .. last - 1 and all filters of a block, without storing counts. first, last
  // and the image's width are multiples of popcount_pixels(). If null, both are used.
  void (*popcount_epilogue)(const EpilogueParams&, const EpilogueTarget&, const Counts&, const PopcountTile&, int first, int last,
                            int channel) = nullptr;

  void (*byte_pool_row)(const BytePoolRow&) = nullptr;  // If null, the pool runs after byte_tile.
};

// Null if this build or this CPU lacks the set.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();
const Kernels* wasm_kernels();

// For tests: plain versions of what the sets above do with special instructions.
const Kernels* portable_look_up_kernels();
const Kernels* portable_popcount_kernels();
const Kernels* avx2_intrinsics_kernels();
const Kernels* neon_base_kernels();  // without extensions

}  // namespace unflip
