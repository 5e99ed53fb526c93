// What an instruction set provides: a few small functions on plain memory. Everything around them (shapes, borders, threads,
// memory) is in ../engine, compiled once. All sets give the same bits, so each function says exactly what it computes.
//
// This header and the files that use it for a special instruction set must not instantiate anything from the standard
// library: the linker keeps one copy of an inline function, and that copy might contain instructions the CPU lacks.
#pragma once

#include <cstdint>

#include "../curve.h"

namespace unflip {

// Channels of float values are padded to a multiple of this many (only the network's input is not padded).
constexpr int kLanes = 8;

constexpr int padded(int channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

// ---------------------------------------------------------------------------------------------------------------- finish
// What happens to a sum before it is a value: the steps of docs/format.md, then storing it as floats, as bits, or both.

enum class FinishKind { Scale, Shift, ScaleShift, Prelu, Clamp, Add, MulChannels, MulGroups };

struct FinishStep {
  FinishKind kind = FinishKind::Scale;
  const float* scale = nullptr;  // padded to the channels; Prelu: the slope
  const float* shift = nullptr;
  float low = 0, high = 0;       // Clamp
  int value = 0;                 // Add, Mul: which value
  int64_t value_stride = 0;      // floats from one pixel of it to the next
  const int* group = nullptr;    // MulGroups: for each of our channels, the channel of the value
};

// Where the bits of a code are: plane p, row y, column x, channel c is bit c % 8 of byte
//   p * plane_bytes + (y + top) * row_bytes + (x + left) * pixel_bytes + c / 8.
// There is a border of zeros, as wide as the convolutions that read the code need it.
struct CodeLayout {
  int planes = 0, pixel_bytes = 0;
  int top = 0, left = 0, rows = 0, columns = 0;  // rows and columns with the border
  int64_t row_bytes = 0, plane_bytes = 0;

  int64_t at(int y, int x) const { return (y + top) * row_bytes + int64_t{x + left} * pixel_bytes; }
};

// Thresholds that lie about evenly. x * scale + shift, at least 0 and at most `most`, has a threshold's number before the point:
// those of smaller numbers are reached, those of larger ones are not. This one is if what is behind the point is above `high`, and
// is not if that is below `low`; between them it has to be compared with x. In the padding it is NaN.
struct EvenSteps {
  const float *scale = nullptr, *shift = nullptr;  // for each channel; null: thresholds are compared one by one
  float most = 0, low = 0, high = 0;
  const int* first = nullptr;  // where each channel's thresholds begin
  const float* threshold = nullptr;
};

struct Finish {
  int width = 0;   // of the image: pixels are numbered row by row
  int stride = 0;  // floats from one pixel to the next where the value is stored
  const FinishStep* steps = nullptr;
  int step_count = 0;

  int thresholds = 0;                 // of the quantizer; 0: no bits
  const float* threshold = nullptr;   // thresholds x stride; NaN (never reached) in the padding
  const uint8_t* strict = nullptr;    // x > t, not x >= t
  bool levels = false;                // planes are the binary digits of the number of thresholds reached
  int unit = -1;                      // the value that multiplies the thresholds, or -1
  bool one_at_least = false;          // there is one threshold, not strict, and no unit
  EvenSteps even;                     // only with levels, all or none strict, and no unit
  CodeLayout code;
};

struct FinishTarget {
  const float* const* values = nullptr;  // of the steps and of unit, by number
  float* out = nullptr;                  // null: floats are not stored
  uint8_t* bits = nullptr;
};

// The sums of a binary convolution: at pixel first + i and channel channel + c it is
//   scale[c] * (base[c] - multiple * count[i * count_stride + c]),  base = bases + class_of[pixel] * base_stride,
// and all but the last product is exact. The pointers are at the first channel.
struct Counts {
  const uint16_t* count = nullptr;
  int64_t count_stride = 0;
  const float* bases = nullptr;
  int64_t base_stride = 0;
  const uint16_t* class_of = nullptr;  // for every pixel of the image
  const float* scale = nullptr;
  float multiple = 1;
};

// The same where the code has several planes, the weights several bases, or the filters an offset: a sum of terms
//   scale[c] * (base[c] - the sum over its planes of multiple[p] * count), base = bases + class_of[pixel] * base_stride,  or
//   scale[c] * window[pixel],
// whose numbers in brackets are exact; each product and each sum of two terms is rounded. The pointers are at the first channel.
struct CountTerm {
  const float* scale = nullptr;
  const float* bases = nullptr;
  int64_t base_stride = 0;           // 0: the same in all classes
  const uint16_t* count = nullptr;   // of the first plane at the first pixel
  const float* multiple = nullptr;   // for each plane
  int planes = 0;
  const float* window = nullptr;     // a number for each pixel, or null
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
// Over a window of rows x columns pixels; the sum begins with the first row and goes on in order, from 0.
struct PoolTile {
  const float* input = nullptr;  // the window's first pixel
  int rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 0;  // floats
  int channels = 0;                           // multiple of 8
  bool max = false;                           // p > m ? p : m, from -infinity
  float divisor = 1;                          // of the sum
  float* out = nullptr;
};

// ----------------------------------------------------------------------------------------------------- float convolution
constexpr int kFloatBlock = 16;  // filters of one block of packed weights: weights[block][k][16]
constexpr int kFloatPixels = 6;  // pixels of one tile
constexpr int kFloatBlocks = 4;  // blocks of a tile of one pixel

// out[pixel][filter] = the sum over k of input * weight, by fused multiply-add in the order of k, from 0.
// k counts the segments of a window and the floats of each: a segment is contiguous.
struct FloatTile {
  const float* input[kFloatPixels] = {};  // each pixel's window
  int pixels = 0;                         // 1 .. 6
  const int64_t* segments = nullptr;      // where each begins, from the window's start
  int segment_count = 0, segment_length = 0;
  const float* weights = nullptr;  // of the first block
  int filters = 0;                 // multiple of 8; at most Kernels::float_filters, or 64 with one pixel
  float* out[kFloatPixels] = {};
};

// ------------------------------------------------------------------------------- float convolution, 7 x 7 with stride 2
// See stem.h for the idea, a picture, and the order of operations.
constexpr int kStemTiles = 6;   // tiles of two by two outputs, at most
constexpr int kStemTerms = 10;  // for two outputs next to each other
constexpr int kStemRows = 9;    // of the input, for a tile

struct StemTile {
  const float* lines[kStemTerms] = {};  // of a row of tiles
  int channels = 0;
  int first = 0, tiles = 0;             // 1 .. 6 tiles of that row
  const float* weights = nullptr;       // of the first block
  int filters = 0;                      // multiple of 8; at most Kernels::float_filters
  float* out[2] = {};                   // upper and lower row of the image; null: the image ends with the upper one
  int width = 0;                        // of the image: a tile may reach beyond it
  int64_t out_stride = 0;               // floats from one pixel to the next
};

// ------------------------------------------------------------------------------------- float convolution, channel by channel
// See depthwise.h for a picture. out[pixel][channel] = the sum over the taps of input * weight, by fused multiply-add in the order
// of the taps, from 0. Pixels are next to each other, any number of them, or apart, up to 6.
constexpr int kDepthwisePixels = 6;

struct DepthwiseTile {
  const float* const* taps = nullptr;  // where each tap of the first pixel is; if apart: of each pixel, [tap][pixel]
  int tap_count = 0;
  int pixels = 0;
  int64_t pixel_step = 0;              // floats from a tap of one pixel to that of the next
  const int* columns = nullptr;        // if apart: which pixels of `out` they are
  const float* weights = nullptr;      // [tap][channels]
  int channels = 0;                    // multiple of 8
  float* out = nullptr;                // [pixel][channels]
};

// ------------------------------------------------------------------------------------------- binary convolution by look-up
// See look_up.h for the idea and a picture.
constexpr int kLookUpPairs = 8;  // at most

struct LookUpTile {
  int filters = 0;                             // 64 (two pairs of pixels), 32 (four) or 16 (eight)
  bool adjacent = false;                       // pair j's numbers are those of pair 0, `tap` * j later
  const uint16_t* pairs[kLookUpPairs] = {};    // look-up numbers of each pair's window
  int64_t tap = 0;                             // numbers between the three of one group
  int segments = 0, groups = 0;                // groups in each segment
  int64_t segment_step = 0;                    // numbers from one segment to the next
  const uint8_t* weights = nullptr;            // 32-byte aligned
  uint16_t* counts = nullptr;                  // [2 * pair + which pixel of it][filters], 32-byte aligned
};

// ---------------------------------------------------------------------------------------- binary convolution by popcount
// See popcount.h for the idea and a picture.
constexpr int popcount_pixels(int filters) { return 128 / filters; }  // of one tile, at most

// Copies windows of pixels next to each other, and pairs them.
struct WindowCopy {
  const uint8_t* from = nullptr;  // the first pixel's window
  int pixels = 0;
  int64_t pixel_step = 0;         // bytes from one pixel's window to the next
  int rows = 0, runs = 0;         // of a window: runs of bytes in each row
  int64_t row_step = 0, run_step = 0;
  int run = 0;                    // bytes; up to 63 more may be read
  uint32_t* to = nullptr;         // one window after another; up to 63 bytes more may be written
};

struct PopcountTile {
  int filters = 0;                    // 32 (up to four pixels) or 16 (up to eight)
  int pixels = 0;
  int words = 0;                      // of a window
  const uint32_t* windows = nullptr;  // of the first pixel, paired
  int64_t window_step = 0;            // words from one pixel's to the next; even
  const uint32_t* weights = nullptr;  // paired, 64-byte aligned
  uint16_t* counts = nullptr;         // [pixel][filters]
};

struct Kernels {
  const char* name;

  // Pixels first .. last - 1 and `channels` channels from `channel` on (multiples of 8). source points at the first
  // pixel's first of these channels, its pixels are source_stride floats apart; it may be where the result goes.
  void (*finish)(const Finish&, const FinishTarget&, const float* source, int64_t source_stride, int first, int last,
                 int channel, int channels);

  // The same for the sums of a binary convolution.
  void (*finish_counts)(const Finish&, const FinishTarget&, const Counts&, int first, int last, int channel, int channels);

  void (*sum_counts)(const CountSums&);

  void (*pool)(const PoolTile&);

  // sums[r] = the sum of the sizes of `count` floats from `from + r * step` on, in the order of sum_abs.h.
  void (*sum_abs)(const float* from, int64_t step, int runs, int64_t count, double* sums);

  // to[i] = function of from[i], i = 0 .. count - 1; see curves.h.
  void (*curve)(Curve function, const float* from, int64_t count, float* to);

  void (*float_tile)(const FloatTile&);
  void (*stem_tile)(const StemTile&);

  // The lines of a row of tiles, from those of nine rows of the input; `count` floats, or up to 15 more. The first and the second
  // of them are input lines, the others are written to `to`, each `step` floats after the one before.
  void (*stem_lines)(const float* const* rows, int64_t count, float* to, int64_t step);

  void (*depthwise_tile)(const DepthwiseTile&);

  // out[f] = in how many bits window and weights[f] differ, f = 0 .. filters - 1.
  void (*differences)(const uint64_t* window, const uint64_t* weights, int words, int filters, int32_t* out);

  // Look-up numbers of two pixels' bytes: two numbers a byte. May go on to the next multiple of 16 bytes.
  void (*pair_numbers)(const uint8_t* first, const uint8_t* second, int64_t bytes, uint16_t* out);
  void (*look_up_tile)(const LookUpTile&);
  bool prefer_look_up;  // over differences

  // Binary convolution by popcount, if not null; over both.
  void (*copy_windows)(const WindowCopy&) = nullptr;
  void (*popcount_tile)(const PopcountTile&) = nullptr;

  int float_filters = kFloatBlock;  // of a float tile with several pixels and of a stem's tile: up to four blocks

  // to[3 * i + c] = from[c * plane + i], i = 0 .. count - 1; if null, the engine does it.
  void (*interleave3)(const float* from, int64_t plane, int64_t count, float* to) = nullptr;
};

// Null where this build or this CPU lacks the set.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

// For tests: the plain versions of what the sets above do in a special way.
const Kernels* portable_look_up_kernels();
const Kernels* portable_popcount_kernels();
const Kernels* avx2_intrinsics_kernels();

}  // namespace unflip
