// The sign gradient of a binary 3×3 convolution: stride 1, padding 1, as many channels out as in, 16, 32 or 64.
//
//     grad_s[o][kh][kw][c] = Σ g[p][o] · B(x)[p + (kh − 1, kw − 1)][c]      over all pixels p of all images
//
// x and g are float16, NHWC; the sums are float32. B(x) is sign(x) (KIND 0; sign(±0) = +1), 1[x > 1/2] (KIND 1) or x
// itself (KIND 2), and 0 in the padding. A block copies a strip of rows to shared memory, and the next strip while it
// multiplies this one. A warp walks down 16 columns of the strip:
//
//               x, between columns of zeros                          g
//              ┌─┬────────────────────────┬─┐          ┌────────────────────────┐
//              │0│                        │0│          │                        │
//              │0│                        │0│      ┌─▶ │ [· · 16 pixels · ·]    │  above: kh = 2
//        row r │0│⟨[· · 16 pixels · ·]⟩   │0│ ─────┼─▶ │ [· · · · · · · · ·]    │  here:  kh = 1
//              │0│ kw = 0, 1, 2           │0│      └─▶ │ [· · · · · · · · ·]    │  below: kh = 0
//              │0│                        │0│          │                        │
//              └─┴────────────────────────┴─┘          └────────────────────────┘
//
//     per step down: 3 loads of x (ldmatrix, 16 pixels × 16 channels), each one pixel further to the right
//                    1 load of g, the row below; the other two rows are still in registers
//                    3 × 3 taps × 2 products (mma m16n8k16: rows o, columns c, summed over 16 pixels)
//
// Images of up to 8 columns are taken in pairs: 8 pixels of one and 8 of the other make the 16.
//
// In shared memory, 8 channels of all pixels make a plane. Eight pixels in a row are 128 adjacent bytes, without bank
// conflicts wherever they begin, so that taps differ only in a constant of the address.
//
//        plane 0: channels 0–7                plane 1: channels 8–15
//       ┌───────┬───────┬───────┬─ ─         ┌───────┬───────┬───────┬─ ─
//       │ p = 0 │ p = 1 │ p = 2 │            │ p = 0 │ p = 1 │ p = 2 │          16 bytes each
//       └───────┴───────┴───────┴─ ─         └───────┴───────┴───────┴─ ─
//
// Copies (cp.async) bypass the registers, which hold the sums of 9 taps × 16 × 16 channels per warp. So the sign is
// taken after ldmatrix, three times for every x, by units that would wait for the tensor cores anyway: x + 0 is never
// −0, and its sign bit is put on 1.0 (0x3C00), or on 0.0 in the columns beside the image. Rows outside are skipped.
//
// A block has O_TILE × C_TILE channels; the second axis of the grid counts these tiles. A warp has 16 × 16 channels of a
// tile. Warps with the same channels share the columns and rows of a strip. Their sums are added at the end through
// shared memory.
// Chunk i of the grid's first axis takes strips i, i + chunks, … and writes partial[i][o][kh][kw][c]. There are no
// atomics: the same bits every time.
//
// Constants are set by -D: C, H, W, KIND, ROWS of a strip, WARPS of a block, O_TILE, C_TILE and SHARED_BYTES of dynamic
// shared memory. The tests also compile this file with g++, against an emulator of a warp that provides the instructions.

// ---------------------------------------------------------------------------------------- instructions

#ifdef __CUDACC__

#define INLINE static __device__ __forceinline__
#define SHARED_MEMORY(type, name) extern __shared__ __align__(128) type name[]

INLINE unsigned shared_address(const void* at) {
  unsigned address;
  asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(at));
  return address;
}

INLINE void ldmatrix_x4_trans(unsigned (&words)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(at)
               : "memory");
}

INLINE void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Starts a copy of 16 bytes to shared memory; zeros if they do not exist.
INLINE void copy_async(unsigned to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

INLINE unsigned add_halves(unsigned a, unsigned b) {
  unsigned sum;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

INLINE unsigned multiply_add_saturated(unsigned a, unsigned b, unsigned c) {  // of halves, in [0, 1]
  unsigned sum;
  asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// Forces the value to be computed here. Otherwise every branch that needs it may compute it again.
INLINE void settle(const unsigned short*& pointer) { asm volatile("" : "+l"(pointer)); }
INLINE void settle(long long& number) { asm volatile("" : "+l"(number)); }
INLINE void settle(unsigned& number) { asm volatile("" : "+r"(number)); }

#else
#include "warp_emulator.h"
#endif

SHARED_MEMORY(unsigned char, shared_memory);

// ------------------------------------------------------------------------------------------- constants

constexpr int IMAGES = W <= 8 ? 2 : 1;  // that share the 16 pixels of a product
constexpr int COLUMNS = W <= 8 ? 8 : (W + 15) / 16 * 16;
constexpr int GROUPS = IMAGES * COLUMNS / 16;  // of 16 pixels, side by side
constexpr int STRIP_ROWS = ROWS < H ? ROWS : H;
constexpr int STRIPS = (H + STRIP_ROWS - 1) / STRIP_ROWS;  // in an image
constexpr int HALO = STRIPS > 1 ? 1 : 0;                   // rows of x above and below a strip

constexpr int PIECE = 16;  // bytes: 8 channels of a pixel
constexpr int X_PIECES = C_TILE / 8;
constexpr int G_PIECES = O_TILE / 8;
constexpr int X_ROWS = STRIP_ROWS + 2 * HALO;
constexpr int X_PITCH = COLUMNS + 2;
constexpr int X_ROW = X_PITCH * PIECE;
constexpr int G_ROW = COLUMNS * PIECE;

// Bytes of a plane: 8 threads copy 8 / pieces pixels, whose pieces should fall into different banks.
INLINE constexpr int plane_bytes(int pixels, int pieces) {
  return (pixels + (8 / pieces + 7 - (pixels + 7) % 8) % 8) * PIECE;
}
constexpr int X_IMAGE = X_ROWS * X_ROW;
constexpr int G_IMAGE = STRIP_ROWS * G_ROW;
constexpr int X_PLANE = plane_bytes(IMAGES * X_ROWS * X_PITCH, X_PIECES);
constexpr int G_PLANE = plane_bytes(IMAGES * STRIP_ROWS * COLUMNS, G_PIECES);
constexpr int X_BYTES = X_PIECES * X_PLANE;
constexpr int BUFFER_BYTES = X_BYTES + G_PIECES * G_PLANE;

constexpr int THREADS = 32 * WARPS;
constexpr int WARPS_AT_ONCE = W == COLUMNS ? 16 : 12;  // on a multiprocessor: up to 128 or 168 registers
constexpr int BLOCKS_AT_ONCE = WARPS < WARPS_AT_ONCE ? WARPS_AT_ONCE / WARPS : 1;
constexpr int C_WARPS = C_TILE / 16;
constexpr int TILE_WARPS = O_TILE / 16 * C_WARPS;
constexpr int PIXEL_WARPS = WARPS / TILE_WARPS;                         // with the same (o, c)
constexpr int PARTS = PIXEL_WARPS > GROUPS ? PIXEL_WARPS / GROUPS : 1;  // of a strip's rows
constexpr int PART_ROWS = (STRIP_ROWS + PARTS - 1) / PARTS;
constexpr bool EQUAL_PARTS = H % STRIP_ROWS == 0 && STRIP_ROWS % PARTS == 0;

constexpr int TAPS = 9;
constexpr int PAIRS = TAPS * 2 * 2;  // of adjacent sums a thread has
constexpr int SCRATCH_BYTES = PIXEL_WARPS > 1 ? WARPS * PAIRS * 32 * 8 : 0;

static_assert(C % O_TILE == 0 && C % C_TILE == 0, "tiles divide the channels");
static_assert(O_TILE % 16 == 0 && C_TILE % 16 == 0, "a warp has 16 x 16 channels");
static_assert(O_TILE <= 64 && C_TILE <= 64, "eight threads copy a pixel at most");
static_assert(WARPS % TILE_WARPS == 0, "every (o, c) has the same number of warps");
static_assert(SHARED_BYTES >= 2 * BUFFER_BYTES && SHARED_BYTES >= SCRATCH_BYTES, "SHARED_BYTES");

// -------------------------------------------------------------------------------------- shared memory

// Zeros where nothing is copied: beside the images, and in g where a row is padded to a multiple of 8 or 16.
template <int ROWS_OF_ALL_IMAGES, int PITCH, int FIRST, int PIECES, int PLANE>
INLINE void clear_columns(unsigned char* planes) {
  constexpr int OUTSIDE = PITCH - W;
  if constexpr (OUTSIDE > 0) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < ROWS_OF_ALL_IMAGES * OUTSIDE * PIECES; i += THREADS) {
      const unsigned piece = i % PIECES, row = i / PIECES / OUTSIDE, column = i / PIECES % OUTSIDE;
      const unsigned at = row * PITCH + (column < FIRST ? column : column + W);
      *reinterpret_cast<uint4*>(planes + piece * PLANE + at * PIECE) = uint4{0, 0, 0, 0};
    }
  }
}

INLINE void clear_outside() {
#pragma unroll 1
  for (int buffer = 0; buffer < 2; ++buffer) {
    unsigned char* at = shared_memory + buffer * BUFFER_BYTES;
    clear_columns<IMAGES * X_ROWS, X_PITCH, 1, X_PIECES, X_PLANE>(at);
    clear_columns<IMAGES * STRIP_ROWS, COLUMNS, 0, G_PIECES, G_PLANE>(at + X_BYTES);
  }
}

// Copies those of the rows first ... first + COUNT - 1 that the image has, to a pitch of ROW bytes.
template <int COUNT, int PIECES, int ROW, int PLANE>
INLINE void copy_rows(unsigned to, const unsigned short* image, int first, bool exists) {
  constexpr int BORDER = (COUNT - STRIP_ROWS) / 2;
  constexpr int ACROSS = W * PIECES;
  constexpr int AT_ONCE = ACROSS < THREADS ? THREADS / ACROSS : 1;  // rows
  constexpr int ABREAST = ACROSS < THREADS ? ACROSS : THREADS;      // threads in a row
  const int own = threadIdx.x / ABREAST;
  if (THREADS % ABREAST != 0 && own >= AT_ONCE) return;
#pragma unroll
  for (int i = 0; i < ACROSS; i += ABREAST) {
    const int at = threadIdx.x % ABREAST + i;
    if (ACROSS % ABREAST != 0 && at >= ACROSS) break;
    const int column = at / PIECES, piece = at % PIECES;
    const unsigned short* from = image + ((first + own) * W + column) * C + piece * 8;
    unsigned into = to + own * ROW + column * PIECE + piece * PLANE;
    settle(from);
    settle(into);
#pragma unroll
    for (int j = 0; j < COUNT; j += AT_ONCE) {  // each row adds a constant to the address
      if (COUNT % AT_ONCE != 0 && own + j >= COUNT) break;
      const bool inside = H % STRIP_ROWS == 0 && j >= BORDER && j + AT_ONCE <= COUNT - BORDER;
      if (inside || (unsigned)(first + own + j) < H) copy_async(into + j * ROW, from + j * (W * C), exists);
    }
  }
}

// A strip of all channels of the block's tile, of one image or two. A missing second image is zero.
INLINE void copy_strip(unsigned buffer, const unsigned short* g, const unsigned short* x, int strip, int images) {
  const int first = strip % STRIPS * STRIP_ROWS;
#pragma unroll
  for (int i = 0; i < IMAGES; ++i) {
    const int image = strip / STRIPS * IMAGES + i;
    const bool exists = IMAGES == 1 || image < images;
    const long long at = (long long)(exists ? image : 0) * (H * W * C);
    copy_rows<X_ROWS, X_PIECES, X_ROW, X_PLANE>(buffer + X_IMAGE * i + PIECE, x + at, first - HALO, exists);
    copy_rows<STRIP_ROWS, G_PIECES, G_ROW, G_PLANE>(buffer + X_BYTES + G_IMAGE * i, g + at, first, exists);
  }
}

// ------------------------------------------------------------------------------------------- products

struct Words {  // a lane's part of 16 pixels × 16 channels
  unsigned of[4];
};

struct Ones {  // 1.0 for every half of x inside the image, 0.0 for the others: for a kw, 8 pixels and 8 pixels
  unsigned of[3][2];
};

INLINE Ones ones_of(int group, int lane) {
  Ones ones;
  const unsigned inside = 0x3C003C00u + blockIdx.z;  // + 0: a constant would be moved to a register at every use
#pragma unroll
  for (int kw = 0; kw < 3; ++kw)
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const bool first = eight == 0 || IMAGES == 2, last = eight == 1 || IMAGES == 2;
      const bool at_edge = W != COLUMNS || (kw == 0 && first) || (kw == 2 && last);
      const int column = group * 16 + (IMAGES == 1 ? eight * 8 : 0) + lane % 4 * 2 + kw - 1;
      const unsigned low = (unsigned)column < W ? 0x3C00u : 0u;
      const unsigned high = (unsigned)(column + 1) < W ? 0x3C000000u : 0u;
      ones.of[kw][eight] = at_edge ? low | high : inside;
    }
  return ones;
}

INLINE unsigned binary(unsigned x, unsigned one) {
  if (KIND == 2) return x;
  // 1[x > 1/2] is 2048 x − 1024 in [0, 1], as the next float16 above 1/2 is 1/2 + 1/2048.
  if (KIND == 1) return multiply_add_saturated(x, 0x68006800u, 0xE400E400u);
  return (add_halves(x, 0) & 0x80008000u) | one;
}

INLINE Words load_words(unsigned at) {
  Words words;
  ldmatrix_x4_trans(words.of, at);
  return words;
}

// Where the lane's row of a matrix is, for ldmatrix. The words that mma wants next to each other are, as rows o by
// columns p (g), channels 0-7 and 8-15, then the second eight pixels; as rows p by columns c (x), the other way round.
INLINE unsigned lane_offset(int lane, int second_word, int third_word) {
  return lane % 8 * PIECE + lane / 8 % 2 * second_word + lane / 16 * third_word;
}

// One row of x against up to three rows of g.
template <bool ABOVE, bool HERE, bool BELOW>
INLINE void meet(float (&sums)[TAPS][2][4], unsigned x_row, const Words& above, const Words& here, const Words& below,
                 const Ones& ones) {
#pragma unroll
  for (int kw = 0; kw < 3; ++kw) {
    Words x = load_words(x_row + kw * PIECE);
#pragma unroll
    for (int i = 0; i < 4; ++i) x.of[i] = binary(x.of[i], ones.of[kw][i % 2]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (BELOW) mma(sums[kw][half], below.of, x.of[half * 2], x.of[half * 2 + 1]);
      if (HERE) mma(sums[kw + 3][half], here.of, x.of[half * 2], x.of[half * 2 + 1]);
      if (ABOVE) mma(sums[kw + 6][half], above.of, x.of[half * 2], x.of[half * 2 + 1]);
    }
  }
}

// Down `rows` rows of g, from the first; of x, also the rows above and below them if the image has these.
INLINE void walk(float (&sums)[TAPS][2][4], unsigned x, unsigned g, int rows, bool has_above, bool has_below,
                 const Ones& ones) {
  Words above = {}, here = {}, below = load_words(g);
  if (has_above) meet<false, false, true>(sums, x - X_ROW, above, here, below, ones);
  here = below;
  if (rows == 1) {
    meet<false, true, false>(sums, x, above, here, below, ones);
  } else {
    below = load_words(g += G_ROW);
    meet<false, true, true>(sums, x, above, here, below, ones);
#pragma unroll 3
    for (int row = 2; row < rows; ++row) {
      above = here;
      here = below;
      below = load_words(g += G_ROW);
      meet<true, true, true>(sums, x += X_ROW, above, here, below, ones);
    }
    above = here;
    here = below;
    meet<true, true, false>(sums, x += X_ROW, above, here, below, ones);
  }
  if (has_below) meet<true, false, false>(sums, x + X_ROW, here, here, below, ones);
}

// The warp's share of a strip: groups of columns times parts of the rows. `x` and `g` are the lane's first addresses.
INLINE void walk_strip(float (&sums)[TAPS][2][4], unsigned x, unsigned g, int strip, int lane, int pixel_warp) {
  const int first = strip % STRIPS * STRIP_ROWS;
  const int strip_rows = H - first < STRIP_ROWS ? H - first : STRIP_ROWS;
  for (int i = pixel_warp; i < GROUPS * PARTS; i += PIXEL_WARPS) {
    const int group = i % GROUPS, top = i / GROUPS * PART_ROWS;
    const int left = strip_rows - top < PART_ROWS ? strip_rows - top : PART_ROWS;
    const int rows = EQUAL_PARTS ? PART_ROWS : left;
    if (rows <= 0) break;
    const bool has_above = PARTS * STRIPS > 1 && first + top > 0;
    const bool has_below = PARTS * STRIPS > 1 && first + top + rows < H;
    walk(sums, x + (top + HALO) * X_ROW + group * 16 * PIECE, g + top * G_ROW + group * 16 * PIECE, rows, has_above,
         has_below, ones_of(group, lane));
  }
}

// --------------------------------------------------------------------------------------------- output

// Where a pair of sums (tap, half, lower) lies in partial[o][tap][c], from the lane's first.
INLINE constexpr int pair_offset(int pair) {
  const int tap = pair / 4, half = pair / 2 % 2, lower = pair % 2;
  return (lower * 8 * TAPS + tap) * C + half * 8;
}

INLINE float2 pair_of(const float (&sums)[TAPS][2][4], int pair) {
  const float* four = sums[pair / 4][pair / 2 % 2];
  return float2{four[pair % 2 * 2], four[pair % 2 * 2 + 1]};
}

// Adds the warps with the same (o, c), always in the same order; each of them writes some of the sums.
INLINE void write_sums(const float (&sums)[TAPS][2][4], float* partial, int lane, int warp) {
  long long first = lane / 4 * (TAPS * C) + lane % 4 * 2;
  settle(first);
  partial += first;
  if (PIXEL_WARPS == 1) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
      *reinterpret_cast<float2*>(partial + pair_offset(pair)) = pair_of(sums, pair);
    return;
  }
  float2* scratch = reinterpret_cast<float2*>(shared_memory);  // [warp][pair][lane]
  __syncthreads();                                             // the last strip has been read
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) scratch[(warp * PAIRS + pair) * 32 + lane] = pair_of(sums, pair);
  __syncthreads();
  for (int pair = warp / TILE_WARPS; pair < PAIRS; pair += PIXEL_WARPS) {
    float2 total = {0, 0};
#pragma unroll
    for (int i = 0; i < PIXEL_WARPS; ++i) {
      const float2 term = scratch[((warp % TILE_WARPS + i * TILE_WARPS) * PAIRS + pair) * 32 + lane];
      total = float2{total.x + term.x, total.y + term.y};
    }
    *reinterpret_cast<float2*>(partial + pair_offset(pair)) = total;
  }
}

// --------------------------------------------------------------------------------------------- kernel

// The grid is (chunks, C / O_TILE · C / C_TILE), a block has 32 · WARPS threads, `partial` is (chunks, C, 3, 3, C).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    sign_conv_wgrad(const unsigned short* g, const unsigned short* x, float* partial, int images) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int o_tile = blockIdx.y / (C / C_TILE) * O_TILE, c_tile = blockIdx.y % (C / C_TILE) * C_TILE;
  const int o_warp = warp % TILE_WARPS / C_WARPS * 16, c_warp = warp % TILE_WARPS % C_WARPS * 16;
  const int strips = (images + IMAGES - 1) / IMAGES * STRIPS;
  g += o_tile;
  x += c_tile;

  const unsigned first_buffer = shared_address(shared_memory);
  const int x_eight = IMAGES == 1 ? 8 * PIECE : X_IMAGE, g_eight = IMAGES == 1 ? 8 * PIECE : G_IMAGE;
  const unsigned x_lane = lane_offset(lane, x_eight, X_PLANE) + c_warp / 8 * X_PLANE;
  const unsigned g_lane = lane_offset(lane, G_PLANE, g_eight) + o_warp / 8 * G_PLANE;

  float sums[TAPS][2][4] = {};
  int strip = blockIdx.x;
  unsigned buffer = first_buffer, other = first_buffer + BUFFER_BYTES;
  if (strip < strips) copy_strip(buffer, g, x, strip, images);
  clear_outside();
  for (; strip < strips; strip += gridDim.x) {
    wait_for_copies();
    __syncthreads();  // this strip is complete, and no warp still reads the last one
    const int next = strip + gridDim.x;
    if (next < strips) copy_strip(other, g, x, next, images);
    walk_strip(sums, buffer + x_lane, buffer + X_BYTES + g_lane, strip, lane, warp / TILE_WARPS);
    const unsigned done = buffer;
    buffer = other;
    other = done;
  }
  partial += (long long)blockIdx.x * (C * TAPS * C) + (o_tile + o_warp) * (TAPS * C) + c_tile + c_warp;
  write_sums(sums, partial, lane, warp);
}
