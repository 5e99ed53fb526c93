/* Sums must be rounded as in unflip's runtime: products and sums are not contracted to fused multiply-adds. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off", "no-tree-loop-distribute-patterns")
#endif
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "floats must be computed as floats: on 32-bit x86, compile with -msse2 -mfpmath=sse"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "this code is for little-endian CPUs"
#endif
#if defined(__GNUC__)
#define u_copy __builtin_memcpy
#define U_INLINE static inline __attribute__((always_inline, unused))
#define U_UNUSED __attribute__((unused))
#define U_ALONE static __attribute__((noinline))
#else
#include <string.h>
#define u_copy memcpy
#define U_INLINE static inline
#define U_UNUSED
#define U_ALONE static
#endif

/* Where a task finds its values: the arena, or the caller's input (pixels or floats). */
struct u_run {
  uint8_t *arena;
  const uint8_t *pixels;
  const float *floats;
};

struct u_epilogue;

/* Applies the steps of a layer to `count` pixels of channel c, from pixel `at` on; `byte` is the place of their bits. */
typedef void u_function(const struct u_epilogue *e, const struct u_run *run, int c, int at, int byte, int count,
                        const void *source);

struct u_image {
  int channels, height, width;
};

U_UNUSED static void u_zero(void *to, size_t bytes) {
  uint8_t *p = (uint8_t *)to;
  size_t i;
  for (i = 0; i < bytes; i++) p[i] = 0;
}

U_INLINE float u_float_of(uint32_t bits) {
  float x;
  u_copy(&x, &bits, sizeof x);
  return x;
}

/* a * b + c, rounded once. */
U_INLINE float u_fma(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  /* The product is exact. The sum is rounded to an odd number, so that the second rounding is the only one. */
  const double product = (double)a * (double)b, sum = product + (double)c;
  const double added = sum - product, error = (product - (sum - added)) + ((double)c - added);
  uint64_t bits;
  double odd;
  u_copy(&bits, &sum, sizeof bits);
  /* NaN is the error of an infinite sum, which stays. */
  if ((error > 0 || error < 0) && !(bits & 1)) bits += (error > 0) == (sum > 0) ? (uint64_t)1 : ~(uint64_t)0;
  u_copy(&odd, &bits, sizeof odd);
  return (float)odd;
#endif
}

/* Numbers in the arena: floats, or 16-bit integers with a scale. */
struct u_reader {
  const void *data;
  float scale; /* 0: floats */
};

U_INLINE float u_read(struct u_reader from, int i) {
#if U_SHORTS
  if (from.scale != 0) return (float)((const int16_t *)from.data)[i] * from.scale;
#endif
  return ((const float *)from.data)[i];
}

/* Rounded; out of range, the nearest one, and for NaN the least one. */
U_INLINE int16_t u_short(float v) {
  v = v < 0 ? v - 0.5f : v + 0.5f;
  v = v > 32767.0f ? 32767.0f : v;
  return (int16_t)(v > -32767.0f ? v : -32767.0f);
}
