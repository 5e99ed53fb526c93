/* Several planes or bases, or filters with an offset: the epilogue gets the float sum of the terms. */
struct u_filter {
  int number;
  int count[U_BASES]; /* of each base's list */
};

/* Places inside the image, over the channels of a group. */
static int32_t u_inside(const struct u_binary *b, int y, int x) {
  const struct u_taps rows = b->row_taps[b->row_class[y]], columns = b->column_taps[b->column_class[x]];
  return b->in.channels / b->groups * (rows.last - rows.first) * (columns.last - columns.first);
}

static void u_window_numbers(const struct u_binary *b, const struct u_term *t, const struct u_parts *s, int at,
                             int32_t *number) {
  const int row_bits = 8 * b->bytes;
  int plane, i;
  for (i = 0; i < U_BITS; i++) {
    const int y = (at + i) / row_bits, x = (at + i) % row_bits;
    number[i] = 0;
    if (y >= b->out.height || x >= b->out.width) continue;
    number[i] = t->signs_times ? t->signs_times * u_inside(b, y, x) : 0;
    for (plane = t->first_plane; plane < t->first_plane + t->planes; plane++)
      number[i] += b->multiples[plane] * (int32_t)s->p[plane * s->pixels + at + i];
  }
}

static void u_sign_numbers(const struct u_binary *b, const struct u_term *t, const struct u_filter *f, const struct u_parts *s,
                           const uint8_t *ready, int at, int32_t *number) {
  const int32_t *sums = s->sums + t->base * s->classes;
  const int row_bits = 8 * b->bytes, count = f->count[t->base], digit_count = u_digits_of(count);
  int plane, lane, i;
  for (i = 0; i < U_BITS; i++) number[i] = t->signs_times * sums[b->center];
  for (plane = t->first_plane; plane < t->first_plane + t->planes; plane++) {
    const int32_t multiple = b->multiples[plane];
    uint32_t digits[U_DIGITS * U_LANES];
    u_count(ready + (size_t)plane * b->plane_step + (at >> 3), s->lists + t->base * s->list_step, count, digit_count, digits);
    for (lane = 0; lane < U_LANES && at + 32 * lane < s->pixels; lane++) {
      int32_t more[32];
      u_numbers(digits + lane, digit_count, 0, 2 * multiple, multiple, s->p + plane * s->pixels + at + 32 * lane, more);
      for (i = 0; i < 32; i++) number[32 * lane + i] += more[i];
    }
  }
  if (t->signs_times) u_fix_border(b, sums, t->signs_times, at / row_bits, at % row_bits, number);
}

static void u_binary_terms(const struct u_binary *b, const uint8_t *ready, uint8_t *scratch, u_function *apply,
                           const struct u_epilogue *e, const struct u_run *run) {
  const struct u_parts s = u_cut(b, scratch);
  const int all = 8 * b->bytes * b->out.height, per_group = b->out.channels / b->groups;
  struct u_filter f;
  int base, at, t, i;
  u_zero(&f, sizeof f);
  for (f.number = 0; f.number < b->out.channels; f.number++) {
    if (f.number % per_group == 0) u_count_windows(b, f.number / per_group, ready, s.lists, s.p, s.pixels);
    for (base = 0; base < b->bases; base++) {
      f.count[base] = u_list_ones(b, base, f.number, s.lists + base * s.list_step, s.tap_ones);
      u_sum_signs(b, s.tap_ones, s.sums + base * s.classes);
    }
    for (at = 0; at < all; at += U_BITS) {
      float sum[U_BITS];
      for (t = 0; t < b->term_count; t++) {
        const float scale = b->terms[t].scale[f.number];
        int32_t number[U_BITS];
        if (b->terms[t].of_window)
          u_window_numbers(b, b->terms + t, &s, at, number);
        else
          u_sign_numbers(b, b->terms + t, &f, &s, ready, at, number);
        for (i = 0; i < U_BITS; i++) sum[i] = t ? sum[i] + scale * (float)number[i] : scale * (float)number[i];
      }
      u_apply(b, apply, e, run, f.number, at, sum);
    }
  }
}
