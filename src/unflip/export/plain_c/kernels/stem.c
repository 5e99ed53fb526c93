/* A float convolution of 7 x 7 with stride 2, with half the multiplications: two by two outputs share products. Its order of
 * operations is that of the runtime (native/src/kernels/stem.h explains it). */
struct u_stem {
  struct u_image in, out;
  int top, left;
  const float *weights; /* [filter][100 * channels] */
};

static const uint8_t u_stem_first[5] = {0, 3, 4, 7, 10};

/* The ten terms of nine numbers, `step` apart: the left factors of the products. */
static void u_stem_terms(const float *v, int step, float *to, int to_step) {
  const float e0 = v[0], o0 = v[step], e1 = v[2 * step], o1 = v[3 * step], e2 = v[4 * step], o2 = v[5 * step],
              e3 = v[6 * step], o3 = v[7 * step], e4 = v[8 * step];
  to[0] = e1;
  to[to_step] = e3;
  to[2 * to_step] = o1 + o2;
  to[3 * to_step] = o2 - o1;
  to[4 * to_step] = e0 - e1;
  to[5 * to_step] = e2 - e3;
  to[6 * to_step] = o0 - o2;
  to[7 * to_step] = e2 - e1;
  to[8 * to_step] = e4 - e3;
  to[9 * to_step] = o3 - o1;
}

/* terms: [row term][column term][channel], of the tile at (y, x). */
static void u_stem_tile(const struct u_stem *l, const struct u_source *in, int y, int x, float *lines, float *terms) {
  const int channels = l->in.channels;
  int r, s, c, k;
  for (c = 0; c < channels; c++) {
    for (r = 0; r < 9; r++) {
      const int row = 4 * y + r - l->top;
      float v[9];
      for (s = 0; s < 9; s++) {
        const int column = 4 * x + s - l->left, at = row * l->in.width + column;
        if (row < 0 || row >= l->in.height || column < 0 || column >= l->in.width)
          v[s] = 0;
        else
          v[s] = in->floats ? in->floats[c * l->in.height * l->in.width + at] : in->levels[c * 256 + in->pixels[at * channels + c]];
      }
      u_stem_terms(v, 1, lines + r * 10, 1);
    }
    for (k = 0; k < 10; k++) u_stem_terms(lines + k, 10, terms + k * channels + c, 10 * channels);
  }
}

static float u_stem_sum(const float **w, const float *terms, int channels, int kind, int column_kind, float sum) {
  const int first = u_stem_first[column_kind] * channels, last = u_stem_first[column_kind + 1] * channels;
  int line, k;
  for (line = u_stem_first[kind]; line < u_stem_first[kind + 1]; line++)
    for (k = first; k < last; k++) sum = u_fma(terms[line * 10 * channels + k], *(*w)++, sum);
  return sum;
}

static void u_stem_conv(const struct u_stem *l, const struct u_source *in, float *scratch, float *rows, u_function *apply,
                        const struct u_epilogue *e, const struct u_run *run) {
  const int channels = l->in.channels, width = l->out.width;
  float *terms = scratch + 90;
  int y, x, f, kind, side;
  for (y = 0; 2 * y < l->out.height; y++) {
    for (x = 0; 2 * x < width; x++) {
      u_stem_tile(l, in, y, x, scratch, terms);
      for (f = 0; f < l->out.channels; f++) {
        const float *w = l->weights + (size_t)f * 100 * channels;
        float z[4][2];
        for (kind = 0; kind < 4; kind++) {
          const float q = u_stem_sum(&w, terms, channels, kind, 0, 0), r = u_stem_sum(&w, terms, channels, kind, 1, 0);
          z[kind][0] = u_stem_sum(&w, terms, channels, kind, 2, q + r);
          z[kind][1] = u_stem_sum(&w, terms, channels, kind, 3, q - r);
        }
        for (side = 0; side < 2 && 2 * x + side < width; side++) {
          rows[2 * f * width + 2 * x + side] = (z[0][side] + z[1][side]) + z[2][side];
          rows[(2 * f + 1) * width + 2 * x + side] = (z[0][side] - z[1][side]) + z[3][side];
        }
      }
    }
    for (side = 0; side < 2 && 2 * y + side < l->out.height; side++)
      for (f = 0; f < l->out.channels; f++)
        apply(e, run, f, (2 * y + side) * width, (2 * y + side) * ((width + 7) >> 3), width, rows + (2 * f + side) * width);
  }
}
