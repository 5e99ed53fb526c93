// Tiles of look_up.h with AVX2. Flags of this file: -mavx2 -mfma -mbmi2 -mpopcnt
//
// A tile has eight vectors of sums in registers: four vectors of filters and pairs, each with two sums (both and high, see below).
// The four vectors are 64 filters of two pairs, 32 of four, or 16 of eight, where the two halves of a vector belong to different
// pairs. One group does this for each of the four:
//
//     s = table[number 0][w0] + table[number 1][w1] + table[number 2][w2]     3 shuffles, 2 additions; bytes of two nibbles
//     both += s                                                               bytes: the pairs' first pixels + 16 * the second ones
//     high += s >> 4                                                          shift of words, addition of bytes: the second ones
//
// Nothing is masked, although AVX2 has no shift of bytes. All is right modulo 256, and the sums are less than 256 (even and odd
// bytes of a word, h and l: the nibbles of s, summed):
//
//     byte         odd              even
//     both         16 h1 + l1       16 h0 + l0
//     high         h1               h0 + 16 l1        a shift of words brings in l1 from the byte above
//     16 * high    16 h1            16 h0             because 16 * 16 l1 = 0
//
// So l = both - 16 * high in all bytes, and then h0 = high - 16 l1.
//
// Compilers order these instructions badly (they keep sums in memory or move them between registers), so the loops are in
// assembly. The intrinsics next to them do the same.
//
// Adjacent pairs share tables: the third tap of a pair is the second of the next pair and the first of the one after.
#include "avx2.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "look_up.h"

#define UNFLIP_INLINE inline __attribute__((always_inline))

namespace unflip {
namespace {

struct Sums {
  __m256i both[4], high[4];
};

UNFLIP_INLINE void clear(Sums& s) {
  for (int i = 0; i < 4; i++) s.both[i] = s.high[i] = _mm256_setzero_si256();
}

// Keeps a vector in its register: without this the compiler reorders the additions and runs out of registers.
UNFLIP_INLINE void keep(__m256i& v) { asm("" : "+x"(v)); }

UNFLIP_INLINE __m256i load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }

UNFLIP_INLINE const __m128i* table_at(uint16_t number) {
  return reinterpret_cast<const __m128i*>(&kLookUpTable.at[0][0] + number);
}

// -------------------------------------------------------------------------------------------------- inner loops, intrinsics

// Numbers of the pairs of a tile.
struct Streams {
  const uint16_t* at[kLookUpPairs];
  int64_t tap;
};

// The table of vector v's pair (or two pairs), for one tap of a group.
template <int Filters>
UNFLIP_INLINE __m256i table_of(const Streams& s, int v, int k, int64_t group) {
  const int64_t n = group + k * s.tap;
  if (Filters == 64) return _mm256_broadcastsi128_si256(_mm_load_si128(table_at(s.at[v / 2][n])));
  if (Filters == 32) return _mm256_broadcastsi128_si256(_mm_load_si128(table_at(s.at[v][n])));
  const __m128i first = _mm_load_si128(table_at(s.at[v][n])), second = _mm_load_si128(table_at(s.at[v + 4][n]));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

template <int Filters>
struct IntrinsicsLoop {
  static constexpr int kStreams = look_up_pairs(Filters);
  static UNFLIP_INLINE const uint8_t* run(Sums& sums, const Streams& s, const uint8_t* w, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) {
      __m256i sum[4];
#pragma GCC unroll 3
      for (int k = 0; k < 3; k++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
          const __m256i table = table_of<Filters>(s, v, k, g);
          const uint8_t* indices = w + k * look_up_row(Filters) + (Filters == 64 ? v % 2 * 32 : 0);
          const __m256i found = _mm256_shuffle_epi8(table, load(indices));
          sum[v] = k ? _mm256_add_epi8(sum[v], found) : found;
          keep(sum[v]);
        }
      w += 3 * look_up_row(Filters);
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) {
        sums.both[v] = _mm256_add_epi8(sums.both[v], sum[v]);
        sums.high[v] = _mm256_add_epi8(sums.high[v], _mm256_srli_epi16(sum[v], 4));
        keep(sums.both[v]);
        keep(sums.high[v]);
      }
    }
    return w;
  }
};

// ----------------------------------------------------------------------------------------------------- inner loops, assembly
// Operands: %[p] .. numbers (advanced by 2 bytes per group), %[d] bytes between taps, %[w] weights, %[n] groups left, %[table].
// ymm8 .. ymm11: s of the four vectors; ymm12, ymm13: tables; ymm14: temporary.

// clang-format off: one instruction per line.
#define UNFLIP_TABLE(address, table) \
  "movzwl " address ", %%eax\n"      \
  "vbroadcasti128 (%[table], %%rax), %%ymm" table "\n"
#define UNFLIP_TWO_TABLES(address0, address1, table) \
  "movzwl " address0 ", %%eax\n"                     \
  "movzwl " address1 ", %%edx\n"                     \
  "vmovdqa (%[table], %%rax), %%xmm" table "\n"      \
  "vinserti128 $1, (%[table], %%rdx), %%ymm" table ", %%ymm" table "\n"
#define UNFLIP_FIRST(weights, table, s) "vpshufb " weights "(%[w]), %%ymm" table ", %%ymm" s "\n"
#define UNFLIP_MORE(weights, table, s)                      \
  "vpshufb " weights "(%[w]), %%ymm" table ", %%ymm14\n"    \
  "vpaddb %%ymm14, %%ymm" s ", %%ymm" s "\n"
#define UNFLIP_SPLIT(s, v)                       \
  "vpaddb %%ymm" s ", %[b" v "], %[b" v "]\n"    \
  "vpsrlw $4, %%ymm" s ", %%ymm" s "\n"          \
  "vpaddb %%ymm" s ", %[h" v "], %[h" v "]\n"
#define UNFLIP_SPLITS UNFLIP_SPLIT("8", "0") UNFLIP_SPLIT("9", "1") UNFLIP_SPLIT("10", "2") UNFLIP_SPLIT("11", "3")
#define UNFLIP_SUMS                                                                                              \
  [b0] "+x"(sums.both[0]), [b1] "+x"(sums.both[1]), [b2] "+x"(sums.both[2]), [b3] "+x"(sums.both[3]),            \
      [h0] "+x"(sums.high[0]), [h1] "+x"(sums.high[1]), [h2] "+x"(sums.high[2]), [h3] "+x"(sums.high[3])
#define UNFLIP_CLOBBERS "rax", "rdx", "cc", "memory", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12", "ymm13", "ymm14"

// 64 filters, two pairs at any addresses.
struct AnyLoop64 {
  static constexpr int kStreams = 2;
  static UNFLIP_INLINE const uint8_t* run(Sums& sums, const Streams& s, const uint8_t* w, int64_t groups) {
    const uint16_t *p = s.at[0], *q = s.at[1];
    asm volatile(
        "1:\n"
        UNFLIP_TABLE("(%[p])", "12")
        UNFLIP_TABLE("(%[q])", "13")
        UNFLIP_FIRST("0", "12", "8") UNFLIP_FIRST("32", "12", "9")
        UNFLIP_FIRST("0", "13", "10") UNFLIP_FIRST("32", "13", "11")
        UNFLIP_TABLE("(%[p], %[d])", "12")
        UNFLIP_TABLE("(%[q], %[d])", "13")
        UNFLIP_MORE("64", "12", "8") UNFLIP_MORE("96", "12", "9")
        UNFLIP_MORE("64", "13", "10") UNFLIP_MORE("96", "13", "11")
        UNFLIP_TABLE("(%[p], %[d], 2)", "12")
        UNFLIP_TABLE("(%[q], %[d], 2)", "13")
        UNFLIP_MORE("128", "12", "8") UNFLIP_MORE("160", "12", "9")
        UNFLIP_MORE("128", "13", "10") UNFLIP_MORE("160", "13", "11")
        UNFLIP_SPLITS
        "add $2, %[p]\n"
        "add $2, %[q]\n"
        "add $192, %[w]\n"
        "dec %[n]\n"
        "jnz 1b\n"
        : [p] "+r"(p), [q] "+r"(q), [w] "+r"(w), [n] "+r"(groups), UNFLIP_SUMS
        : [d] "r"(2 * s.tap), [table] "r"(&kLookUpTable)
        : UNFLIP_CLOBBERS);
    return w;
  }
};

// 64 filters, two adjacent pairs: four tables.
struct AdjacentLoop64 {
  static constexpr int kStreams = 1;
  static UNFLIP_INLINE const uint8_t* run(Sums& sums, const Streams& s, const uint8_t* w, int64_t groups) {
    const uint16_t *p = s.at[0], *q = p + 3 * s.tap;
    asm volatile(
        "1:\n"
        UNFLIP_TABLE("(%[p])", "12")
        UNFLIP_TABLE("(%[p], %[d])", "13")
        UNFLIP_FIRST("0", "12", "8") UNFLIP_FIRST("32", "12", "9")
        UNFLIP_FIRST("0", "13", "10") UNFLIP_FIRST("32", "13", "11")
        UNFLIP_TABLE("(%[p], %[d], 2)", "12")
        UNFLIP_MORE("64", "13", "8") UNFLIP_MORE("96", "13", "9")
        UNFLIP_TABLE("(%[q])", "13")
        UNFLIP_MORE("64", "12", "10") UNFLIP_MORE("96", "12", "11")
        UNFLIP_MORE("128", "12", "8") UNFLIP_MORE("160", "12", "9")
        UNFLIP_MORE("128", "13", "10") UNFLIP_MORE("160", "13", "11")
        UNFLIP_SPLITS
        "add $2, %[p]\n"
        "add $2, %[q]\n"
        "add $192, %[w]\n"
        "dec %[n]\n"
        "jnz 1b\n"
        : [p] "+r"(p), [q] "+r"(q), [w] "+r"(w), [n] "+r"(groups), UNFLIP_SUMS
        : [d] "r"(2 * s.tap), [table] "r"(&kLookUpTable)
        : UNFLIP_CLOBBERS);
    return w;
  }
};

// Four vectors of adjacent pairs, six tables: number k is tap k - v of vector v.
#define UNFLIP_SIX_TABLES(TABLE0, TABLE1, TABLE2, TABLE3, TABLE4, TABLE5)                 \
  TABLE0 UNFLIP_FIRST("0", "12", "8")                                                     \
  TABLE1 UNFLIP_FIRST("0", "13", "9") UNFLIP_MORE("32", "13", "8")                        \
  TABLE2 UNFLIP_FIRST("0", "12", "10") UNFLIP_MORE("32", "12", "9") UNFLIP_MORE("64", "12", "8") \
  TABLE3 UNFLIP_FIRST("0", "13", "11") UNFLIP_MORE("32", "13", "10") UNFLIP_MORE("64", "13", "9") \
  TABLE4 UNFLIP_MORE("32", "12", "11") UNFLIP_MORE("64", "12", "10")                      \
  TABLE5 UNFLIP_MORE("64", "13", "11")

// 32 filters, four adjacent pairs.
struct AdjacentLoop32 {
  static constexpr int kStreams = 1;
  static UNFLIP_INLINE const uint8_t* run(Sums& sums, const Streams& s, const uint8_t* w, int64_t groups) {
    const uint16_t *p = s.at[0], *q = p + 3 * s.tap;
    asm volatile(
        "1:\n"
        UNFLIP_SIX_TABLES(UNFLIP_TABLE("(%[p])", "12"), UNFLIP_TABLE("(%[p], %[d])", "13"),
                          UNFLIP_TABLE("(%[p], %[d], 2)", "12"), UNFLIP_TABLE("(%[q])", "13"),
                          UNFLIP_TABLE("(%[q], %[d])", "12"), UNFLIP_TABLE("(%[q], %[d], 2)", "13"))
        UNFLIP_SPLITS
        "add $2, %[p]\n"
        "add $2, %[q]\n"
        "add $96, %[w]\n"
        "dec %[n]\n"
        "jnz 1b\n"
        : [p] "+r"(p), [q] "+r"(q), [w] "+r"(w), [n] "+r"(groups), UNFLIP_SUMS
        : [d] "r"(2 * s.tap), [table] "r"(&kLookUpTable)
        : UNFLIP_CLOBBERS);
    return w;
  }
};

// 16 filters, eight adjacent pairs: a table holds pair k in its lower half and pair k + 4 in its upper half. q is pair 5 of p.
struct AdjacentLoop16 {
  static constexpr int kStreams = 1;
  static UNFLIP_INLINE const uint8_t* run(Sums& sums, const Streams& s, const uint8_t* w, int64_t groups) {
    const uint16_t *p = s.at[0], *q = p + 5 * s.tap;
    asm volatile(
        "1:\n"
        UNFLIP_SIX_TABLES(UNFLIP_TWO_TABLES("(%[p])", "(%[p], %[d], 4)", "12"),
                          UNFLIP_TWO_TABLES("(%[p], %[d])", "(%[q])", "13"),
                          UNFLIP_TWO_TABLES("(%[p], %[d], 2)", "(%[q], %[d])", "12"),
                          UNFLIP_TWO_TABLES("(%[p], %[d3])", "(%[q], %[d], 2)", "13"),
                          UNFLIP_TWO_TABLES("(%[p], %[d], 4)", "(%[q], %[d3])", "12"),
                          UNFLIP_TWO_TABLES("(%[q])", "(%[q], %[d], 4)", "13"))
        UNFLIP_SPLITS
        "add $2, %[p]\n"
        "add $2, %[q]\n"
        "add $96, %[w]\n"
        "dec %[n]\n"
        "jnz 1b\n"
        : [p] "+r"(p), [q] "+r"(q), [w] "+r"(w), [n] "+r"(groups), UNFLIP_SUMS
        : [d] "r"(2 * s.tap), [d3] "r"(6 * s.tap), [table] "r"(&kLookUpTable)
        : UNFLIP_CLOBBERS);
    return w;
  }
};

// clang-format on

// ------------------------------------------------------------------------------------------------------------ around the loops

UNFLIP_INLINE void put(uint16_t* to, __m256i words, bool first) {
  __m256i* p = reinterpret_cast<__m256i*>(to);
  _mm256_store_si256(p, first ? words : _mm256_add_epi16(words, _mm256_load_si256(p)));
}

// 32 bytes of sums to 16-bit counts: of 32 filters, or of 16 filters and two pairs, the second four rows of pairs later.
template <int Filters>
UNFLIP_INLINE void put_bytes(uint16_t* to, __m256i bytes, bool first) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i a = _mm256_unpacklo_epi8(bytes, zero), b = _mm256_unpackhi_epi8(bytes, zero);
  if (Filters == 16) {
    const __m256i upper = _mm256_permute2x128_si256(a, b, 0x31);
    put(to, _mm256_permute2x128_si256(a, b, 0x20), first);
    put(to + 4 * 2 * 16, upper, first);
  } else {
    put(to, a, first);
    put(to + 16, b, first);
  }
}

// Adds the sums to the counts, or stores them as counts.
template <int Filters>
UNFLIP_INLINE void flush(const Sums& sums, uint16_t* counts, bool first) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) {
    const __m256i times16 = _mm256_andnot_si256(_mm256_set1_epi8(15), _mm256_slli_epi16(sums.high[v], 4));
    const __m256i low = _mm256_sub_epi8(sums.both[v], times16);
    const __m256i above = _mm256_and_si256(_mm256_srli_epi16(low, 4), _mm256_set1_epi16(0xF0));  // 16 l1
    const int pair = Filters == 64 ? v / 2 : v, filter = Filters == 64 ? v % 2 * 32 : 0;
    uint16_t* row = counts + 2 * pair * Filters + filter;
    put_bytes<Filters>(row, low, first);
    put_bytes<Filters>(row + Filters, _mm256_sub_epi8(sums.high[v], above), first);
  }
}

// Runs the loop over all groups. Sums of bytes are flushed before they can overflow.
template <int Filters, class Loop>
UNFLIP_INLINE void run_tile(const LookUpTile& t) {
  const int chunks = (t.groups + kGroupsPerFlush - 1) / kGroupsPerFlush, chunk = (t.groups + chunks - 1) / chunks;
  Streams row, s;
  row.tap = s.tap = t.tap;
  for (int i = 0; i < Loop::kStreams; i++) row.at[i] = look_up_stream(t, i);
  const uint8_t* w = t.weights;
  Sums sums;
  clear(sums);
  int since = 0;
  bool first = true;
  for (int segment = 0; segment < t.segments; segment++) {
    for (int done = 0; done < t.groups; done += chunk) {
      const int groups = t.groups - done < chunk ? t.groups - done : chunk;
      if (since + groups > kGroupsPerFlush) {
        flush<Filters>(sums, t.counts, first);
        clear(sums);
        since = 0;
        first = false;
      }
      for (int i = 0; i < Loop::kStreams; i++) s.at[i] = row.at[i] + done;
      w = Loop::run(sums, s, w, groups);
      since += groups;
    }
    for (int i = 0; i < Loop::kStreams; i++) row.at[i] += t.segment_step;
  }
  flush<Filters>(sums, t.counts, first);
}

}  // namespace

void avx2_look_up_tile_intrinsics(const LookUpTile& t) {
  if (t.filters == 64) return run_tile<64, IntrinsicsLoop<64>>(t);
  if (t.filters == 32) return run_tile<32, IntrinsicsLoop<32>>(t);
  run_tile<16, IntrinsicsLoop<16>>(t);
}

void avx2_look_up_tile(const LookUpTile& t) {
  if (t.filters == 64) return t.adjacent ? run_tile<64, AdjacentLoop64>(t) : run_tile<64, AnyLoop64>(t);
  if (t.filters == 32) return t.adjacent ? run_tile<32, AdjacentLoop32>(t) : run_tile<32, IntrinsicsLoop<32>>(t);
  if (t.adjacent) return run_tile<16, AdjacentLoop16>(t);
  run_tile<16, IntrinsicsLoop<16>>(t);
}

// Nibbles of 16 bytes of each pixel: low nibbles together, high nibbles together, then interleaved, times 16, as 16-bit numbers.
void avx2_pair_numbers(const uint8_t* first, const uint8_t* second, int64_t bytes, uint16_t* out) {
  const __m128i mask = _mm_set1_epi8(15);
  for (int64_t i = 0; i < bytes; i += 16) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + i));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second + i));
    const __m128i low = _mm_or_si128(_mm_and_si128(a, mask), _mm_andnot_si128(mask, _mm_slli_epi16(b, 4)));
    const __m128i high = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(a, 4), mask), _mm_andnot_si128(mask, b));
    const __m256i numbers0 = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(low, high));
    const __m256i numbers1 = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(low, high));
    __m256i* to = reinterpret_cast<__m256i*>(out + 2 * i);
    _mm256_storeu_si256(to, _mm256_slli_epi16(numbers0, 4));
    _mm256_storeu_si256(to + 1, _mm256_slli_epi16(numbers1, 4));
  }
}

}  // namespace unflip
#endif
