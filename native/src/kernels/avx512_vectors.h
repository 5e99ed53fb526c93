// Vectors of floats with AVX-512, for epilogue.h and others.
//
// Comparisons give masks with one bit per lane: exactly the bits of a code as stored.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace unflip {
namespace {

// 8 floats, for epilogue.h: the last channels if their number is not a multiple of 16.
struct Wide8 {
  static constexpr int kWidth = 8;
  using Eight = Wide8;
  using Bits = uint8_t;
  using Mask = __mmask8;
  __m256 x;

  static Wide8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Wide8 set(float v) { return {_mm256_set1_ps(v)}; }
  static Wide8 from_counts(const uint16_t* p) {
    __m128i counts = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(counts))};
  }
  static Wide8 fused(Wide8 a, Wide8 b, Wide8 c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
  void store(float* p) const { _mm256_storeu_ps(p, x); }
  Wide8 operator+(Wide8 o) const { return {_mm256_add_ps(x, o.x)}; }
  Wide8 operator-(Wide8 o) const { return {_mm256_sub_ps(x, o.x)}; }
  Wide8 operator*(Wide8 o) const { return {_mm256_mul_ps(x, o.x)}; }
  Wide8 operator/(Wide8 o) const { return {_mm256_div_ps(x, o.x)}; }
  static Wide8 larger(Wide8 a, Wide8 b) { return {_mm256_max_ps(a.x, b.x)}; }
  static Mask above(Wide8 a, Wide8 b) { return _mm256_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ); }
  static Mask at_least(Wide8 a, Wide8 b) { return _mm256_cmp_ps_mask(a.x, b.x, _CMP_GE_OQ); }
  static Wide8 choose(Mask m, Wide8 a, Wide8 b) { return {_mm256_mask_blend_ps(m, b.x, a.x)}; }
  static Bits bits(Mask m) { return m; }

  struct Number {
    __m256i n;
    static Number zero() { return {_mm256_setzero_si256()}; }
    static Number whole(Wide8 v) { return {_mm256_cvttps_epi32(v.x)}; }
    static Number count(Number v, Mask m) { return {_mm256_mask_add_epi32(v.n, m, v.n, _mm256_set1_epi32(1))}; }
    Wide8 floats() const { return {_mm256_cvtepi32_ps(n)}; }
    static Bits digit(Number v, int p) { return _mm256_test_epi32_mask(v.n, _mm256_set1_epi32(1 << p)); }
  };

  struct Sums {
    __m512d x;
    static Sums zero() { return {_mm512_setzero_pd()}; }
    void add(Wide8 v) { x = _mm512_add_pd(x, _mm512_cvtps_pd(_mm256_andnot_ps(_mm256_set1_ps(-0.f), v.x))); }
    Sums operator+(Sums o) const { return {_mm512_add_pd(x, o.x)}; }
    double total() const {
      const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd(x, 1));
      const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
      return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }
  };
  static Wide8 look_up(const float* table, const int* first, Number n) {
    const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    return {_mm256_i32gather_ps(table, _mm256_add_epi32(at, n.n), sizeof(float))};
  }
};

// 16 floats.
struct Wide16 {
  static constexpr int kWidth = 16;
  using Eight = Wide8;
  using Bits = uint16_t;
  static constexpr int kTile = 8;
  static constexpr bool kFixedSteps = true;
  static constexpr bool kKeepsSteps = true;
  using Mask = __mmask16;
  __m512 x;

  static Wide16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Wide16 set(float v) { return {_mm512_set1_ps(v)}; }
  static Wide16 from_counts(const uint16_t* p) {
    __m256i counts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(counts))};
  }
  static Wide16 fused(Wide16 a, Wide16 b, Wide16 c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
  Wide16 operator+(Wide16 o) const { return {_mm512_add_ps(x, o.x)}; }
  Wide16 operator-(Wide16 o) const { return {_mm512_sub_ps(x, o.x)}; }
  Wide16 operator*(Wide16 o) const { return {_mm512_mul_ps(x, o.x)}; }
  Wide16 operator/(Wide16 o) const { return {_mm512_div_ps(x, o.x)}; }
  static Wide16 larger(Wide16 a, Wide16 b) { return {_mm512_max_ps(a.x, b.x)}; }
  static Mask above(Wide16 a, Wide16 b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ); }
  static Mask at_least(Wide16 a, Wide16 b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_GE_OQ); }
  static Wide16 choose(Mask m, Wide16 a, Wide16 b) { return {_mm512_mask_blend_ps(m, b.x, a.x)}; }
  static Bits bits(Mask m) { return m; }

  struct Number {
    __m512i n;
    static Number zero() { return {_mm512_setzero_si512()}; }
    static Number whole(Wide16 v) { return {_mm512_cvttps_epi32(v.x)}; }
    static Number count(Number v, Mask m) { return {_mm512_mask_add_epi32(v.n, m, v.n, _mm512_set1_epi32(1))}; }
    Wide16 floats() const { return {_mm512_cvtepi32_ps(n)}; }
    static Bits digit(Number v, int p) { return _mm512_test_epi32_mask(v.n, _mm512_set1_epi32(1 << p)); }
  };
  static Wide16 look_up(const float* table, const int* first, Number n) {
    const __m512i at = _mm512_loadu_si512(first);
    return {_mm512_i32gather_ps(_mm512_add_epi32(at, n.n), table, sizeof(float))};
  }
};

}  // namespace
}  // namespace unflip
