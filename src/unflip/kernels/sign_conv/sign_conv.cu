// The forward product and the input gradient of operator.py for 3×3 taps, stride 1 and padding 1, in CUDA C++.
//
// A product whose operands pass through shared memory moves every value four times and waits at barriers. Here a lane
// loads its part of a tensor core's operand from global memory directly into registers. The other operand, the signs of
// 16 output channels, stays in registers for the life of the warp. Shared memory is used once, to distribute the signs
// to the warps of a block.
//
// mma.m16n8k16: a lane is (g, t) = (lane / 4, lane % 4), and holds two numbers per register.
//
//                 k = 0 ... 15                       n = 0 ... 7                      n = 0 ... 7
//             2t,2t+1  2t+8,2t+9                        g                            2t,2t+1
//            ┌────────┬────────┐              2t,2t+1 ┌────┐                        ┌────────┐
//     row g  │   a0   │   a2   │     ×                │ b0 │          =      row g  │  c0 c1 │
//            ├────────┼────────┤            2t+8,2t+9 ├────┤                        ├────────┤
//    row g+8 │   a1   │   a3   │                      │ b1 │                row g+8 │  c2 c3 │
//            └────────┴────────┘                      └────┘                        └────────┘
//
// Channels can be assigned to k in any order, as long as both operands agree. Lane t takes adjacent channels, so that
// it needs one load of 8 or 16 bytes per pixel (two for 64 channels), and the loads of a warp are whole sectors.
// Channels can be assigned to n in any order too. In the two products side by side, n = g stands for the channels 2g
// and 2g + 1. A lane's sums c0, c1 of both are then the channels 4t ... 4t + 3 of a pixel, 8 bytes to store.
//
//     k of a lane t:  16 channels: 4t + (0 1 | 2 3)     the first pair is 2t, 2t + 1, the second 2t + 8, 2t + 9
//                     32:          8t + (0 1 | 2 3), 8t + 4 + ...
//                     64:          8t + (0 1 | 2 3), 8t + 4 + ..., 32 + 8t + ..., 32 + 8t + 4 + ...
//
// The 16 rows of a product are 16 adjacent columns of images, numbered across all images (column = image · W + w). A
// warp walks down its columns. Each row of pixels is loaded once for each kw, before it is used, and is multiplied with
// all three kh, for the sums of the output rows above, here and below:
//
//     pixels of row r   × signs of kh = 2  → sum of output row r − 1, which is complete and stored
//                       × signs of kh = 1  → sum of output row r
//                       × signs of kh = 0  → sum of output row r + 1, which begins
//
// While a lane walks down, its columns stay the same, and so do the taps that are left or right of the image. Rows above
// and below the image are not multiplied.
//
// The input gradient is the same walk over the output's gradient, with the taps mirrored, K and N exchanged, real
// values for the left side, and the mask of the straight-through gradient at the end. A gradient that x receives
// through a shortcut can be added there.
//
// Constants: H, W, K and N (channels of the sum and of the result), KIND (an index of INPUTS), GRADIENT (0; 1; 2: plus
// another gradient).
// The tests also compile this file with g++, against an emulator of a warp that provides the instructions.

// ---------------------------------------------------------------------------------------- instructions

#ifdef __CUDACC__

#define INLINE static __device__ __forceinline__
#define SHARED_MEMORY(type, name) extern __shared__ __align__(128) type name[]

INLINE void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

INLINE unsigned two_halves(float low, float high) {
  unsigned halves;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  return halves;
}

INLINE unsigned add_halves(unsigned a, unsigned b) {
  unsigned sum;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

INLINE unsigned ones_above(unsigned a, unsigned b) {  // 1.0 where a > b, elsewhere 0.0
  unsigned ones;
  asm("set.gt.f16x2.f16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  return ones;
}

INLINE unsigned mask_at_most(unsigned a, unsigned b) {  // all bits of a half where a ≤ b
  unsigned mask;
  asm("set.le.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  return mask;
}

#else
#include "warp_emulator.h"
#endif

SHARED_MEMORY(uint4, shared_memory);

// ------------------------------------------------------------------------------------------- constants

constexpr int GROUP = 16;               // output channels of a warp
constexpr int GROUPS = N / GROUP;       // warps that share pixels
constexpr int WARPS = K == 64 ? 8 : 4;  // of a block; cuda_kernels.geometry must agree
constexpr int STRIPS = WARPS / GROUPS;  // of 16 columns, in a block
constexpr int THREADS = 32 * WARPS;
constexpr int CHUNKS = K / 16;             // products for one tap
constexpr int WORDS = K / 8;               // registers of a lane for one tap of a pixel
constexpr int ADJACENT = K == 16 ? 4 : 8;  // channels of a lane, in one load
constexpr int AHEAD = K == 64 ? 1 : 3;     // taps that are loaded ahead: a row, if there are registers for it
constexpr bool BINARIZES = !GRADIENT && KIND != 2;
constexpr bool MASKS = GRADIENT && KIND != 2;
constexpr bool ADDS = GRADIENT == 2;
constexpr unsigned ONES = 0x3C003C00u;    // 1.0, twice
constexpr unsigned HALVES = 0x38003800u;  // 1/2, twice
constexpr unsigned SIGN_BITS = 0x80008000u;
// With fewer registers than this leaves, the compiler would load a row only when it is needed.
constexpr int BLOCKS_PER_SM = K == 16 ? 4 : K == 32 ? 3 : 1;

// Signs in shared memory, in pieces of 16 bytes: one row per output channel. Rows are shifted, so that lanes that read
// at the same time read from different banks.
constexpr int SIGN_ROWS = GRADIENT ? K : N;
constexpr int ROW_PIECES = 9 * (GRADIENT ? N : K) / 8;
constexpr int SHIFT_EVERY = GRADIENT ? ADJACENT : 2;
constexpr int SHIFT_PIECES = GRADIENT || K == 16 ? 2 : 4;

struct Signs {
  unsigned of[9][CHUNKS][2][2];  // b0 and b1 for each tap, chunk and product side by side
};

struct Tap {
  unsigned words[2][WORDS];  // of the pixels g and g + 8
};

struct Sums {
  float of[2][4];  // c0 ... c3 of two products side by side
};

struct Column {  // one of a lane's two
  int at;        // where its channels of the next row to load begin
  int result;    // where its four channels of the next result are, in pieces of 8 bytes
  bool has_left, has_right;
};

INLINE int sign_row(int row) { return row * ROW_PIECES + row / SHIFT_EVERY * SHIFT_PIECES; }

INLINE void stage_signs(const uint4* __restrict__ signs) {
  constexpr int PIECES = SIGN_ROWS * ROW_PIECES;
#pragma unroll
  for (int first = 0; first < PIECES; first += THREADS) {
    const int piece = first + threadIdx.x;
    if (piece < PIECES) shared_memory[sign_row(piece / ROW_PIECES) + piece % ROW_PIECES] = signs[piece];
  }
  __syncthreads();
}

// A lane's channels of a pixel, or of a tap's signs. `at`: where the first of them is.
INLINE void load_channels(unsigned (&words)[WORDS], const unsigned short* at) {
  if constexpr (K == 16) {
    const uint2 piece = *reinterpret_cast<const uint2*>(at);
    words[0] = piece.x;
    words[1] = piece.y;
  } else {
#pragma unroll
    for (int first = 0; first < WORDS; first += 4) {
      const uint4 piece = *reinterpret_cast<const uint4*>(at + 8 * first);
      words[first] = piece.x;
      words[first + 1] = piece.y;
      words[first + 2] = piece.z;
      words[first + 3] = piece.w;
    }
  }
}

INLINE void take_signs(Signs& signs, int group, int g, int t) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const uint4* row = shared_memory + sign_row(group * GROUP + 2 * g + side);
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
      unsigned words[WORDS];
      load_channels(words, reinterpret_cast<const unsigned short*>(row) + tap * K + t * ADJACENT);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        signs.of[tap][chunk][side][0] = words[2 * chunk];
        signs.of[tap][chunk][side][1] = words[2 * chunk + 1];
      }
    }
  }
}

// For the gradient, k counts output channels: adjacent ones are rows apart.
INLINE void take_signs_transposed(Signs& signs, int group, int g, int t) {
  const unsigned* words = reinterpret_cast<const unsigned*>(shared_memory) + group * GROUP / 2 + g;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = chunk / 2 * 32 + t * ADJACENT + chunk % 2 * 4 + 2 * half;
      const unsigned* first = words + 4 * sign_row(k);
      const unsigned* second = words + 4 * sign_row(k + 1);
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) {
        const unsigned low = first[(8 - tap) * N / 2], high = second[(8 - tap) * N / 2];
        signs.of[tap][chunk][0][half] = (low & 0xFFFFu) | (high << 16);
        signs.of[tap][chunk][1][half] = (low >> 16) | (high & 0xFFFF0000u);
      }
    }
  }
}

// `load` and `store`: the first rows that are loaded and stored.
INLINE Column column_at(int number, int images, int load, int store, int channel, int result_channel) {
  Column column;
  number = min(number, images * W - 1);  // past the end, the last column is computed and stored again
  const int image = number / W, w = number % W;
  column.has_left = w > 0;
  column.has_right = w < W - 1;
  column.at = ((image * H + load) * W + w) * K + channel;
  column.result = (((image * H + store) * W + w) * N + result_channel) / 4;
  return column;
}

INLINE bool has_tap(const Column& column, int kw) {
  return kw == 0 ? column.has_left : kw == 2 ? column.has_right : true;
}

INLINE void load_tap(Tap& tap, const unsigned short* __restrict__ input, const Column (&columns)[2], int kw) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (has_tap(columns[i], kw)) {
      load_channels(tap.words[i], input + columns[i].at + (kw - 1) * K);
    } else {
#pragma unroll
      for (int word = 0; word < WORDS; ++word) tap.words[i][word] = 0;
    }
  }
}

INLINE void binarize(Tap& tap, const Column (&columns)[2], int kw) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned one = has_tap(columns[i], kw) ? ONES : 0;
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      unsigned& x = tap.words[i][word];
      x = KIND == 1 ? ones_above(x, HALVES) : (add_halves(x, 0) & SIGN_BITS) | one;  // x + 0 is never −0
    }
  }
}

INLINE void multiply_add(Sums& sums, const Tap& tap, const Signs& signs, int number) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    const int low = 2 * chunk, high = 2 * chunk + 1;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const unsigned (&b)[2] = signs.of[number][chunk][side];
      const unsigned a[4] = {tap.words[0][low], tap.words[1][low], tap.words[0][high], tap.words[1][high]};
      mma(sums.of[side], a, b[0], b[1]);
    }
  }
}

INLINE unsigned passes(unsigned x) {  // all bits where the straight-through gradient is 1
  if (KIND == 1) return mask_at_most(0, x) & mask_at_most(x, ONES);
  return mask_at_most(x & ~SIGN_BITS, ONES);
}

INLINE void load_results(uint2 (&here)[2], const uint2* __restrict__ there, const Column (&columns)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) here[i] = there[columns[i].result];
}

// No branch around all of it: the compiler would move the loads of x into the branch, too close to their use.
INLINE void store(uint2* __restrict__ output, const Column (&columns)[2], const Sums& sums, const uint2 (&x)[2],
                  const uint2 (&plus)[2], bool complete) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint2 halves;
    halves.x = two_halves(sums.of[0][2 * i], sums.of[1][2 * i]);
    halves.y = two_halves(sums.of[0][2 * i + 1], sums.of[1][2 * i + 1]);
    if constexpr (MASKS) {
      halves.x &= passes(x[i].x);
      halves.y &= passes(x[i].y);
    }
    if constexpr (ADDS) {
      halves.x = add_halves(halves.x, plus[i].x);
      halves.y = add_halves(halves.y, plus[i].y);
    }
    if (complete) output[columns[i].result] = halves;
  }
}

// A warp computes 16 output channels of `rows` rows of 16 columns. `input` is x, or the gradient of the output; then the
// mask comes from `x`, and `plus` is added. There are ceil(images · W / 16) · ceil(H / rows) such pieces, STRIPS per block.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    convolve(const unsigned short* __restrict__ input, const uint4* __restrict__ all_signs, const uint2* __restrict__ x,
             const uint2* __restrict__ plus, uint2* __restrict__ output, int images, int rows) {
  stage_signs(all_signs);

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int group = warp % GROUPS, piece = blockIdx.x * STRIPS + warp / GROUPS;
  const int segments = (H + rows - 1) / rows, strip = piece / segments;
  if (strip * 16 >= images * W) return;
  const int begin = piece % segments * rows, end = min(begin + rows, H);
  const int first = max(begin - 1, 0), last = min(end, H - 1);

  Signs signs;
  if constexpr (GRADIENT != 0) {
    take_signs_transposed(signs, group, g, t);
  } else {
    take_signs(signs, group, g, t);
  }
  Column columns[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int number = strip * 16 + g + 8 * i;
    columns[i] = column_at(number, images, first, begin, t * ADJACENT, group * GROUP + 4 * t);
  }
  Tap next[AHEAD];
#pragma unroll
  for (int kw = 0; kw < AHEAD; ++kw) load_tap(next[kw], input, columns, kw);

  Sums above = {}, here = {};
  uint2 masked[2], added[2];
  for (int row = first; row <= last; ++row) {
    const int next_row = row < last ? W * K : 0;  // at the end, the last row is loaded again
    if constexpr (MASKS) load_results(masked, x, columns);
    if constexpr (ADDS) load_results(added, plus, columns);
    Sums below = {};
#pragma unroll
    for (int kw = 0; kw < 3; ++kw) {
      Tap tap = next[kw % AHEAD];
      const int next_kw = (kw + AHEAD) % 3;
      if (next_kw == 0) {
        columns[0].at += next_row;
        columns[1].at += next_row;
      }
      load_tap(next[kw % AHEAD], input, columns, next_kw);
      if constexpr (BINARIZES) binarize(tap, columns, kw);
      multiply_add(above, tap, signs, 6 + kw);
      multiply_add(here, tap, signs, 3 + kw);
      multiply_add(below, tap, signs, kw);
    }
    const bool complete = row > begin;
    store(output, columns, above, masked, added, complete);
    const int next_result = complete ? W * N / 4 : 0;
    columns[0].result += next_result;
    columns[1].result += next_result;
    above = here;
    here = below;
  }
  if (end == H) {
    if constexpr (MASKS) load_results(masked, x, columns);
    if constexpr (ADDS) load_results(added, plus, columns);
    store(output, columns, above, masked, added, true);
  }
}
