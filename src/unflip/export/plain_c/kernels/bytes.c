/* A convolution of whole numbers with 8-bit weights. Sums of 65,536 products, the most of a filter, fit 32 bits. */
#if defined(__ARM_FEATURE_SIMD32) && defined(__GNUC__)
#include <arm_acle.h>
#define U_PAIRS 1 /* the CPU adds two products at a time */
#endif

struct u_bytes {
  struct u_image in, out;
  int kh, kw, sh, sw, dh, dw, top, left, groups;
  int fours;             /* of a window: its numbers, then up to three others with weight 0 */
  int step;              /* 0: all channels have the same scale, shift and zero; else 1 */
  const int8_t *weights; /* [group]: blocks of four filters [four][filter][4], then single filters [four][4] */
  const float *scale, *shift;
  const uint8_t *zero;
};

/* x * scale + shift, rounded to a whole number from 0 to 255. Adding 2^23 rounds; ties go to the even number. */
U_INLINE int u_byte_of(float x, float scale, float shift) {
  x = x * scale + shift;
  x = x > 0 ? x : 0; /* also for NaN */
  x = x < 255.0f ? x : 255.0f;
  return (int)((x + 8388608.0f) - 8388608.0f);
}

/* The rows of the input that one row of the output needs, with the padding: [row of the kernel][column][channel]. They are whole
 * numbers minus the one that stands for 0. */
static void u_byte_lines(const struct u_bytes *l, const struct u_source *in, int y, int group, int columns, int16_t *to) {
  const int channels = l->in.channels / l->groups, size = l->in.height * l->in.width, first = group * channels;
  const int step = l->step;
  int r, k, c, row = y * l->sh - l->top;
  for (r = 0; r < l->kh; r++, row += l->dh)
    for (k = 0; k < columns; k++) {
      const int column = k - l->left, at = row * l->in.width + column;
      const uint8_t *zero = l->zero + first * step;
      if (row < 0 || row >= l->in.height || column < 0 || column >= l->in.width) {
        for (c = 0; c < channels; c++) *to++ = 0;
      } else if (in->floats) {
        const float *from = in->floats + (size_t)first * (size_t)size + at;
        const float *scale = l->scale + first * step, *shift = l->shift + first * step;
        for (c = 0; c < channels; c++, from += size, scale += step, shift += step, zero += step)
          *to++ = (int16_t)(u_byte_of(*from, *scale, *shift) - *zero);
      } else {
        const uint8_t *from = in->pixels + at * l->in.channels + first;
        for (c = 0; c < channels; c++, zero += step) *to++ = (int16_t)(*from++ - *zero);
      }
    }
}

/* A window is `segments` pieces of `length` numbers, `across` apart, in each of some rows that are `down` apart. */
struct u_pieces {
  int rows, segments, length, across, down;
};

/* Copies a window, unless it is one piece. What follows it is multiplied by 0. */
U_INLINE const int16_t *u_byte_window(struct u_pieces p, const int16_t *from, int16_t *window) {
  int16_t *to = window;
  int r, s, k;
  if (p.rows * p.segments == 1) return from;
  for (r = 0; r < p.rows; r++)
    for (s = 0; s < p.segments; s++) {
      const int16_t *piece = from + r * p.down + s * p.across;
      for (k = 0; k < p.length; k++) *to++ = piece[k];
    }
  return window;
}

/* Weights 0 2 1 3 of four places, times their numbers. */
U_INLINE int32_t u_four(const int8_t *w, const int16_t *v, int32_t sum) {
#if defined(U_PAIRS)
  int32_t all, odd, first, second;
  u_copy(&all, w, sizeof all);
  u_copy(&first, v, sizeof first);
  u_copy(&second, v + 2, sizeof second);
  __asm__("sxtb16 %0, %1, ror #8" : "=r"(odd) : "r"(all));
  return __smlad(odd, second, __smlad(__sxtb16(all), first, sum));
#else
  return sum + w[0] * v[0] + w[1] * v[2] + w[2] * v[1] + w[3] * v[3];
#endif
}

/* Results are `step` apart. Returns the next weights. */
static const int8_t *u_four_filters(int fours, const int16_t *v, const int8_t *w, int32_t *out, int step) {
  int32_t a = 0, b = 0, c = 0, d = 0;
  int k;
  for (k = 0; k < fours; k++, v += 4, w += 16) {
    a = u_four(w, v, a);
    b = u_four(w + 4, v, b);
    c = u_four(w + 8, v, c);
    d = u_four(w + 12, v, d);
  }
  out[0] = a;
  out[1 * step] = b;
  out[2 * step] = c;
  out[3 * step] = d;
  return w;
}

static const int8_t *u_byte_filter(int fours, const int16_t *v, const int8_t *w, int32_t *out) {
  int32_t sum = 0;
  int k;
  for (k = 0; k < fours; k++, v += 4, w += 4) sum = u_four(w, v, sum);
  *out = sum;
  return w;
}

static void u_byte_conv(const struct u_bytes *l, const struct u_source *in, int16_t *lines, int16_t *window, int32_t *row,
                        u_function *apply, const struct u_epilogue *e, const struct u_run *run) {
  const int channels = l->in.channels / l->groups, filters = l->out.channels / l->groups, width = l->out.width;
  const int columns = (width - 1) * l->sw + (l->kw - 1) * l->dw + 1, bytes = (width + 7) >> 3;
  struct u_pieces pieces;
  int y, x, group, f;
  pieces.rows = l->kh;
  pieces.segments = l->dw == 1 ? 1 : l->kw;
  pieces.length = l->dw == 1 ? l->kw * channels : channels;
  pieces.across = l->dw * channels;
  pieces.down = columns * channels;
  for (y = 0; y < l->out.height; y++) {
    const int8_t *weights = l->weights, *w = weights;
    for (group = 0; group < l->groups; group++, weights = w) {
      u_byte_lines(l, in, y, group, columns, lines);
      for (x = 0; x < width; x++) {
        const int16_t *v = u_byte_window(pieces, lines + x * l->sw * channels, window);
        int32_t *to = row + group * filters * width + x;
        w = weights;
        for (f = 0; f + 4 <= filters; f += 4, to += 4 * width) w = u_four_filters(l->fours, v, w, to, width);
        for (; f < filters; f++, to += width) w = u_byte_filter(l->fours, v, w, to);
      }
    }
    for (f = 0; f < l->out.channels; f++) apply(e, run, f, y * width, y * bytes, width, row + f * width);
  }
}
