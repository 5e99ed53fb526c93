/* A binary layer on one pixel: bits of the channels are packed, and its sums are counted filter by filter. */
struct u_packed {
  int filters, words; /* words of 32 channels */
  int bases, planes;
  int32_t inside;           /* channels */
  const uint8_t *signs;     /* [base][filter][word] */
  const int32_t *multiples; /* per plane */
  const struct u_term *terms;
  int term_count;
};

/* The number of places where both have a 1. */
static int32_t u_both(const uint8_t *a, const uint8_t *b, int words) {
  int32_t count = 0;
#if !defined(U_POPCOUNT)
  uint32_t ones = 0, twos = 0, fours = 0;
#define U_BOTH(k) (u_word_at(a + 4 * (k)) & u_word_at(b + 4 * (k)))
#define U_ADD(sum, x, y, carry)                                                                                         \
  do {                                                                                                                  \
    const uint32_t half = sum ^ (x), other = (y);                                                                       \
    carry = (sum & (x)) | (half & other);                                                                               \
    sum = half ^ other;                                                                                                 \
  } while (0)
  for (; words >= 8; words -= 8, a += 32, b += 32) {
    uint32_t two_a, two_b, four_a, four_b, eight;
    U_ADD(ones, U_BOTH(0), U_BOTH(1), two_a);
    U_ADD(ones, U_BOTH(2), U_BOTH(3), two_b);
    U_ADD(twos, two_a, two_b, four_a);
    U_ADD(ones, U_BOTH(4), U_BOTH(5), two_a);
    U_ADD(ones, U_BOTH(6), U_BOTH(7), two_b);
    U_ADD(twos, two_a, two_b, four_b);
    U_ADD(fours, four_a, four_b, eight);
    count += 8 * u_ones(eight);
  }
  count += 4 * u_ones(fours) + 2 * u_ones(twos) + u_ones(ones);
#undef U_BOTH
#undef U_ADD
#endif
  for (; words > 0; words--, a += 4, b += 4) count += u_ones(u_word_at(a) & u_word_at(b));
  return count;
}

/* Of one term, for one filter. */
static int32_t u_packed_number(const struct u_packed *l, const struct u_term *t, const uint8_t *code, int filter) {
  const uint8_t *signs = l->signs + ((size_t)t->base * l->filters + filter) * l->words * 4;
  const int32_t inside = t->of_window ? l->inside : 2 * u_both(signs, signs, l->words) - l->inside;
  int32_t number = t->signs_times ? t->signs_times * inside : 0;
  int plane;
  for (plane = t->first_plane; plane < t->first_plane + t->planes; plane++) {
    const uint8_t *bits = code + (size_t)plane * l->words * 4;
    const int32_t all = u_both(bits, bits, l->words);
    number += l->multiples[plane] * (t->of_window ? all : 2 * u_both(signs, bits, l->words) - all);
  }
  return number;
}

static void u_packed_layer(const struct u_packed *l, const uint8_t *code, int one_term, u_function *apply,
                           const struct u_epilogue *e, const struct u_run *run) {
  int filter, t;
  for (filter = 0; filter < l->filters; filter++) {
    int32_t number = u_packed_number(l, l->terms, code, filter);
    float sum;
    if (one_term) {
      apply(e, run, filter, 0, 0, 1, &number);
      continue;
    }
    sum = l->terms[0].scale[filter] * (float)number;
    for (t = 1; t < l->term_count; t++) {
      number = u_packed_number(l, l->terms + t, code, filter);
      sum = sum + l->terms[t].scale[filter] * (float)number;
    }
    apply(e, run, filter, 0, 0, 1, &sum);
  }
}
