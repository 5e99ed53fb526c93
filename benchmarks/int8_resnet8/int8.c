/* Convolutions as in good int8 libraries for Cortex-M4: windows are copied as 16-bit numbers, then two filters by two pixels are
 * computed together, two products per instruction (SMLAD). With -DPLAIN, one product at a time in plain C. */
#include "int8.h"

#include "weights.h" /* struct layer, layers[], made by compare.py */

#if defined(__ARM_FEATURE_DSP) && !defined(PLAIN)
#include <arm_acle.h>
#define PAIRS 1
static inline int32_t rotated(int32_t v) { return (int32_t)((uint32_t)v >> 8 | (uint32_t)v << 24); }
#else
#define PAIRS 0
#endif

static int8_t requantized(int32_t sum, const struct layer *l, int f) {
  int32_t v = (int32_t)(((int64_t)sum * l->factor[f] + ((int64_t)1 << (l->shift - 1))) >> l->shift);
  if (v < l->low) v = l->low;
  return (int8_t)(v > 127 ? 127 : v);
}

/* Weights of four places are stored in the order 0 2 1 3, so that sign extension gives adjacent pairs. */
static void two_by_two(const struct layer *l, int f, int depth, const int16_t *a, const int16_t *b, int32_t *sum) {
  const int8_t *w0 = l->weights + f * depth, *w1 = w0 + depth;
  int32_t s00 = l->bias[f], s01 = s00, s10 = l->bias[f + 1], s11 = s10;
  int k = 0;
#if PAIRS
  for (; k + 4 <= depth; k += 4) {
    int32_t v0, v1, a0, a1, b0, b1;
    __builtin_memcpy(&v0, w0 + k, 4);
    __builtin_memcpy(&v1, w1 + k, 4);
    __builtin_memcpy(&a0, a + k, 4);
    __builtin_memcpy(&a1, a + k + 2, 4);
    __builtin_memcpy(&b0, b + k, 4);
    __builtin_memcpy(&b1, b + k + 2, 4);
    const int32_t x0 = __sxtb16(v0), x1 = __sxtb16(rotated(v0));
    const int32_t y0 = __sxtb16(v1), y1 = __sxtb16(rotated(v1));
    s00 = __smlad(x0, a0, s00);
    s00 = __smlad(x1, a1, s00);
    s01 = __smlad(x0, b0, s01);
    s01 = __smlad(x1, b1, s01);
    s10 = __smlad(y0, a0, s10);
    s10 = __smlad(y1, a1, s10);
    s11 = __smlad(y0, b0, s11);
    s11 = __smlad(y1, b1, s11);
  }
#else
  for (; k + 4 <= depth; k += 4) {
    static const uint8_t place[4] = {0, 2, 1, 3};
    int i;
    for (i = 0; i < 4; i++) {
      const int32_t v0 = w0[k + i], v1 = w1[k + i], x = a[k + place[i]], y = b[k + place[i]];
      s00 += v0 * x;
      s01 += v0 * y;
      s10 += v1 * x;
      s11 += v1 * y;
    }
  }
#endif
  for (; k < depth; k++) {
    s00 += w0[k] * a[k];
    s01 += w0[k] * b[k];
    s10 += w1[k] * a[k];
    s11 += w1[k] * b[k];
  }
  sum[0] = s00, sum[1] = s01, sum[2] = s10, sum[3] = s11;
}

static void gather(const struct layer *l, const int8_t *in, int y, int x, int16_t *to) {
  int r, s, c;
  for (r = 0; r < l->kernel; r++)
    for (s = 0; s < l->kernel; s++) {
      const int row = y * l->stride - l->pad + r, column = x * l->stride - l->pad + s;
      const int8_t *from = in + (row * l->size + column) * l->channels;
      if (row < 0 || row >= l->size || column < 0 || column >= l->size)
        for (c = 0; c < l->channels; c++) *to++ = 0;
      else
        for (c = 0; c < l->channels; c++) *to++ = from[c];
    }
}

/* [row][column][channel]; the number of output pixels and filters is even. */
static void conv(const struct layer *l, const int8_t *in, int8_t *out, int16_t *windows) {
  const int depth = l->kernel * l->kernel * l->channels, size = l->size / l->stride;
  int p, f;
  for (p = 0; p < size * size; p += 2, out += 2 * l->filters) {
    gather(l, in, p / size, p % size, windows);
    gather(l, in, (p + 1) / size, (p + 1) % size, windows + depth);
    for (f = 0; f < l->filters; f += 2) {
      int32_t sum[4];
      two_by_two(l, f, depth, windows, windows + depth, sum);
      out[f] = requantized(sum[0], l, f);
      out[l->filters + f] = requantized(sum[1], l, f);
      out[f + 1] = requantized(sum[2], l, f + 1);
      out[l->filters + f + 1] = requantized(sum[3], l, f + 1);
    }
  }
}

/* relu(a * p + b * q), each with its own scale. */
static void add(int8_t *a, const int8_t *b, int count) {
  int i;
  for (i = 0; i < count; i++) {
    int32_t v = (a[i] * 23170 + b[i] * 30000 + (1 << 14)) >> 15;
    a[i] = (int8_t)(v < 0 ? 0 : v > 127 ? 127 : v);
  }
}

int int8_run(const uint8_t *pixels, float *scores, void *arena) {
  int8_t *a = (int8_t *)arena, *b = a + 16384, *c = b + 16384;
  int16_t *windows = (int16_t *)(void *)(c + 16384);
  int i, f;
  for (i = 0; i < 32 * 32 * 3; i++) c[i] = (int8_t)(pixels[i] - 128);
  conv(layers + 0, c, a, windows);
  conv(layers + 1, a, b, windows);
  conv(layers + 2, b, c, windows);
  add(a, c, 16384);
  conv(layers + 3, a, b, windows);
  conv(layers + 4, b, c, windows);
  conv(layers + 5, a, b, windows);
  add(c, b, 8192);
  conv(layers + 6, c, a, windows);
  conv(layers + 7, a, b, windows);
  conv(layers + 8, c, a, windows);
  add(b, a, 4096);
  for (f = 0; f < 64; f++) {
    int32_t sum = 0;
    for (i = 0; i < 64; i++) sum += b[64 * i + f];
    windows[f] = (int16_t)((sum + 32) >> 6);
  }
  for (f = 0; f < 10; f++) {
    int32_t sum = layers[9].bias[f];
    for (i = 0; i < 64; i++) sum += layers[9].weights[64 * f + i] * windows[i];
    scores[f] = (float)sum;
  }
  return 0;
}
