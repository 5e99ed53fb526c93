/* A float convolution. Each sum adds the products tap by tap, all channels of a tap one after another, by fused
 * multiply-adds. Padding is added too, as zeros. */
struct u_conv {
  struct u_image in, out;
  int kh, kw, sh, sw, dh, dw, top, left, groups;
  const float *weights; /* [group]: blocks of eight filters [place][8], then single filters [place] */
};

/* The rows of the input that one row of the output needs, with the padding: [row of the kernel][column][channel]. */
static void u_gather(const struct u_conv *l, const struct u_source *in, int y, int group, int columns, float *to) {
  const int channels = l->in.channels / l->groups, size = l->in.height * l->in.width, first = group * channels;
  int r, c, k, row = y * l->sh - l->top;
  for (r = 0; r < l->kh; r++, row += l->dh)
    for (k = 0; k < columns; k++) {
      const int column = k - l->left;
      if (row < 0 || row >= l->in.height || column < 0 || column >= l->in.width) {
        for (c = 0; c < channels; c++) *to++ = 0;
      } else if (in->floats) {
        const float *from = in->floats + (size_t)first * (size_t)size + row * l->in.width + column;
        for (c = 0; c < channels; c++, from += size) *to++ = *from;
      } else {
        const uint8_t *from = in->pixels + (row * l->in.width + column) * l->in.channels + first;
        const float *levels = in->levels + 256 * first;
        for (c = 0; c < channels; c++, levels += 256) *to++ = levels[*from++];
      }
    }
}

/* A window is `segments` pieces of `length` numbers, `across` or (after a row of the kernel) `down` apart. */
struct u_window {
  int rows, segments, length, across, down;
};

/* Eight filters; results are `step` apart. Returns the next weights. */
static const float *u_eight_filters(struct u_window shape, const float *window, const float *w, float *out, int step) {
  float a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
  int r, s, k;
  for (r = 0; r < shape.rows; r++)
    for (s = 0; s < shape.segments; s++) {
      const float *from = window + r * shape.down + s * shape.across;
      for (k = 0; k < shape.length; k++, w += 8) {
        const float v = from[k];
        a = u_fma(v, w[0], a);
        b = u_fma(v, w[1], b);
        c = u_fma(v, w[2], c);
        d = u_fma(v, w[3], d);
        e = u_fma(v, w[4], e);
        f = u_fma(v, w[5], f);
        g = u_fma(v, w[6], g);
        h = u_fma(v, w[7], h);
      }
    }
  out[0] = a;
  out[1 * step] = b;
  out[2 * step] = c;
  out[3 * step] = d;
  out[4 * step] = e;
  out[5 * step] = f;
  out[6 * step] = g;
  out[7 * step] = h;
  return w;
}

static const float *u_one_filter(struct u_window shape, const float *window, const float *w, float *out) {
  float sum = 0;
  int r, s, k;
  for (r = 0; r < shape.rows; r++)
    for (s = 0; s < shape.segments; s++) {
      const float *from = window + r * shape.down + s * shape.across;
      for (k = 0; k < shape.length; k++) sum = u_fma(from[k], *w++, sum);
    }
  *out = sum;
  return w;
}

static void u_float_conv(const struct u_conv *l, const struct u_source *in, float *lines, float *row, u_function *apply,
                         const struct u_epilogue *e, const struct u_run *run) {
  const int channels = l->in.channels / l->groups, filters = l->out.channels / l->groups, width = l->out.width;
  const int columns = (width - 1) * l->sw + (l->kw - 1) * l->dw + 1, bytes = (width + 7) >> 3;
  struct u_window shape;
  int y, x, group, f;
  shape.rows = l->kh;
  shape.segments = l->dw == 1 ? 1 : l->kw;
  shape.length = l->dw == 1 ? l->kw * channels : channels;
  shape.across = l->dw * channels;
  shape.down = columns * channels;
  for (y = 0; y < l->out.height; y++) {
    const float *group_weights = l->weights;
    for (group = 0; group < l->groups; group++, group_weights += (size_t)filters * l->kh * l->kw * channels) {
      u_gather(l, in, y, group, columns, lines);
      for (x = 0; x < width; x++) {
        const float *window = lines + x * l->sw * channels, *w = group_weights;
        float *to = row + group * filters * width + x;
        for (f = 0; f + 8 <= filters; f += 8, to += 8 * width) w = u_eight_filters(shape, window, w, to, width);
        for (; f < filters; f++, to += width) w = u_one_filter(shape, window, w, to);
      }
    }
    for (f = 0; f < l->out.channels; f++) apply(e, run, f, y * width, y * bytes, width, row + f * width);
  }
}
