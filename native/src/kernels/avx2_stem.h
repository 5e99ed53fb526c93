// The stem of whole numbers with AVX2, for whole_stem.h, and other sums of products of numbers of 16 bits.
//
// A step multiplies two numbers of each tile with two vectors of weights: one broadcast, two products and two additions per tile.
// Compilers keep the sums of so many tiles in memory, so the loop for four tiles or more is in assembly.
#pragma once

#include <immintrin.h>

#include "whole_stem.h"

namespace unflip {
namespace {

// 8 sums.
struct WholeSums {
  static constexpr int kWidth = 8;
  __m256i x;
  static UNFLIP_INLINE WholeSums set(int32_t v) { return {_mm256_set1_epi32(v)}; }
  static UNFLIP_INLINE WholeSums load(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  UNFLIP_INLINE void store(int32_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  UNFLIP_INLINE WholeSums operator+(WholeSums o) const { return {_mm256_add_epi32(x, o.x)}; }
  UNFLIP_INLINE WholeSums operator-(WholeSums o) const { return {_mm256_sub_epi32(x, o.x)}; }
  UNFLIP_INLINE WholeSums times(uint32_t v) const { return {_mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(v)))}; }
  template <int Bits>
  UNFLIP_INLINE WholeSums shifted() const {
    return {_mm256_slli_epi32(x, Bits)};
  }
};

// Tile i has its sums in ymm(2 i) and ymm(2 i + 1). ymm12, ymm13: weights; ymm14, ymm15: products. %[in] is the first tile, %[in3]
// the fourth one.
// clang-format off: one instruction per line.
#define UNFLIP_STEM_CLEAR(low, high)               \
  "vpxor %%ymm" low ", %%ymm" low ", %%ymm" low "\n" \
  "vpxor %%ymm" high ", %%ymm" high ", %%ymm" high "\n"
#define UNFLIP_STEM_ADD(address, low, high)        \
  "vpbroadcastd " address ", %%ymm14\n"            \
  "vpmaddwd %%ymm12, %%ymm14, %%ymm15\n"           \
  "vpaddd %%ymm15, %%ymm" low ", %%ymm" low "\n"   \
  "vpmaddwd %%ymm13, %%ymm14, %%ymm14\n"           \
  "vpaddd %%ymm14, %%ymm" high ", %%ymm" high "\n"
#define UNFLIP_STEM_STORE(at, low, high)           \
  "vmovdqu %%ymm" low ", " at "(%[to])\n"          \
  "vmovdqu %%ymm" high ", " at "+32(%[to])\n"
#define UNFLIP_STEM_LOOP(clear, add, store)                                                                                \
  asm volatile(                                                                                                            \
      clear                                                                                                                \
      "1:\n"                                                                                                               \
      "mov (%[line]), %[in]\n"                                                                                             \
      "add %[first], %[in]\n"                                                                                              \
      "lea (%[in], %[tile]), %[in3]\n"                                                                                     \
      "lea (%[in3], %[tile], 2), %[in3]\n"                                                                                 \
      "mov %[steps], %[n]\n"                                                                                               \
      "2:\n"                                                                                                               \
      "vmovdqa (%[w]), %%ymm12\n"                                                                                          \
      "vmovdqa 32(%[w]), %%ymm13\n"                                                                                        \
      add                                                                                                                  \
      "add $4, %[in]\n"                                                                                                    \
      "add $4, %[in3]\n"                                                                                                   \
      "add $64, %[w]\n"                                                                                                    \
      "dec %[n]\n"                                                                                                         \
      "jnz 2b\n"                                                                                                           \
      "add $8, %[line]\n"                                                                                                  \
      "cmp %[end], %[line]\n"                                                                                              \
      "jne 1b\n"                                                                                                           \
      store                                                                                                                \
      : [in] "=&r"(in), [in3] "=&r"(in3), [n] "=&r"(n), [w] "+&r"(w), [line] "+&r"(line)                                     \
      : [to] "r"(to), [end] "r"(p.lines + p.line_count), [first] "r"(2 * p.first), [tile] "r"(2 * p.tile),                 \
        [steps] "r"(int64_t{p.steps})                                                                                      \
      : "cc", "memory", "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11",  \
        "ymm12", "ymm13", "ymm14", "ymm15")
#define UNFLIP_STEM_CLEAR4 \
  UNFLIP_STEM_CLEAR("0", "1") UNFLIP_STEM_CLEAR("2", "3") UNFLIP_STEM_CLEAR("4", "5") UNFLIP_STEM_CLEAR("6", "7")
#define UNFLIP_STEM_ADD4                           \
  UNFLIP_STEM_ADD("(%[in])", "0", "1")             \
  UNFLIP_STEM_ADD("(%[in], %[tile])", "2", "3")    \
  UNFLIP_STEM_ADD("(%[in], %[tile], 2)", "4", "5") \
  UNFLIP_STEM_ADD("(%[in3])", "6", "7")
#define UNFLIP_STEM_STORE4     \
  UNFLIP_STEM_STORE("0", "0", "1") UNFLIP_STEM_STORE("64", "2", "3") UNFLIP_STEM_STORE("128", "4", "5") \
  UNFLIP_STEM_STORE("192", "6", "7")
#define UNFLIP_STEM_CLEAR5 UNFLIP_STEM_CLEAR4 UNFLIP_STEM_CLEAR("8", "9")
#define UNFLIP_STEM_ADD5 UNFLIP_STEM_ADD4 UNFLIP_STEM_ADD("(%[in3], %[tile])", "8", "9")
#define UNFLIP_STEM_STORE5 UNFLIP_STEM_STORE4 UNFLIP_STEM_STORE("256", "8", "9")
#define UNFLIP_STEM_CLEAR6 UNFLIP_STEM_CLEAR5 UNFLIP_STEM_CLEAR("10", "11")
#define UNFLIP_STEM_ADD6 UNFLIP_STEM_ADD5 UNFLIP_STEM_ADD("(%[in3], %[tile], 2)", "10", "11")
#define UNFLIP_STEM_STORE6 UNFLIP_STEM_STORE5 UNFLIP_STEM_STORE("320", "10", "11")
// clang-format on

// AddressSanitizer does not see what assembly reads.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define UNFLIP_STEM_CHECKED
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define UNFLIP_STEM_CHECKED
#endif
#if defined(UNFLIP_STEM_CHECKED)
constexpr bool kStemAssembly = false;
#else
constexpr bool kStemAssembly = true;
#endif

struct WholeStem {
  using Vector = WholeSums;

  static UNFLIP_INLINE void add(WholeSums& sum, const int16_t* x, const int16_t* w) {
    int32_t two;
    __builtin_memcpy(&two, x, sizeof two);
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    sum.x = _mm256_add_epi32(sum.x, _mm256_madd_epi16(_mm256_set1_epi32(two), weights));
  }

  template <int Tiles, int N>
  static UNFLIP_INLINE void add_products(const StemProducts& p, int32_t* to) {
    static_assert(N == 2 && Tiles <= 6);
    if constexpr (Tiles < 4 || !kStemAssembly) {
      add_stem_products<WholeStem, Tiles, N>(p, to);
    } else {
      const int16_t *in, *in3, *w = p.weights, *const *line = p.lines;
      int64_t n;
      if constexpr (Tiles == 4) UNFLIP_STEM_LOOP(UNFLIP_STEM_CLEAR4, UNFLIP_STEM_ADD4, UNFLIP_STEM_STORE4);
      if constexpr (Tiles == 5) UNFLIP_STEM_LOOP(UNFLIP_STEM_CLEAR5, UNFLIP_STEM_ADD5, UNFLIP_STEM_STORE5);
      if constexpr (Tiles == 6) UNFLIP_STEM_LOOP(UNFLIP_STEM_CLEAR6, UNFLIP_STEM_ADD6, UNFLIP_STEM_STORE6);
    }
  }

  static UNFLIP_INLINE void put(WholeSums sum, const float* scale, float* to) {
    const __m256 y = _mm256_cvtepi32_ps(_mm256_srai_epi32(sum.x, 4));
    _mm256_storeu_ps(to, _mm256_mul_ps(y, _mm256_loadu_ps(scale)));
  }
};

// 16 numbers of 16 bits.
struct Shorts {
  static constexpr int kWidth = 16;
  __m256i x;
  static Shorts load(const int16_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  void store(int16_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  Shorts operator+(Shorts o) const { return {_mm256_add_epi16(x, o.x)}; }
  Shorts operator-(Shorts o) const { return {_mm256_sub_epi16(x, o.x)}; }
};

}  // namespace
}  // namespace unflip
