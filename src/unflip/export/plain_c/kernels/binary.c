/* A convolution of bits with signs.
 *
 * Bits of 32 pixels (128 with Helium) are one word per channel. Only the places where a filter has +1 are added: with
 * A = the sum of the bits there and P = the sum of all bits in the window,
 *
 *     sum of sign * bit = 2 A - P
 *
 * P is the same for all filters. A is counted for all pixels of a word at once: each binary digit of the counts is a
 * word, and carry-save adders add eight words at a time. So no CPU needs an instruction that counts bits. */
struct u_taps {
  u_tap first, last;
};

struct u_binary {
  struct u_image in, out;
  int kh, kw, sh, sw, dh, dw, top, left;
  int groups, bases, planes;
  int row_bytes;    /* of the input */
  int bytes;        /* of an output row's bits */
  int phase_rows;   /* rows of the padded input with the same remainder by sh */
  int channel_step; /* bytes of a channel, after u_prepare */
  int plane_step;   /* bytes of a plane, after u_prepare; its last channel is zeros */
  const uint8_t *signs;        /* [base][filter][tap][channel], bit by bit */
  const int32_t *multiples;    /* per plane */
  const struct u_term *terms;
  int term_count;
  const struct u_taps *row_taps, *column_taps; /* of each class of pixels: taps inside the image */
  const u_tap *row_class, *column_class;       /* per row and column of the output */
  int row_classes, column_classes;
  int first_row, last_row, first_column, last_column; /* whose windows are inside the image */
  int center;                                         /* the class of these */
};

U_UNUSED static uint32_t u_some_bits(const uint8_t *bits, uint32_t at, int count) {
  const uint8_t *from = bits + (at >> 3);
  const int shift = (int)(at & 7), bytes = (shift + count + 7) >> 3;
  uint32_t low = 0;
  int i;
  if (shift == 0 && count == 32) return u_word_at(from);
  for (i = 0; i < bytes && i < 4; i++) low |= (uint32_t)from[i] << (8 * i);
  low >>= shift;
  if (bytes > 4) low |= (uint32_t)from[4] << (32 - shift);
  return count == 32 ? low : low & ((1u << count) - 1);
}

U_INLINE uint32_t u_byte(const uint8_t *row, int at, int bytes) { return at >= 0 && at < bytes ? row[at] : 0; }

/* A row of bits, moved so that bit x of the result is column x * step + from of the input; 0 outside. */
U_ALONE void u_move_row(const uint8_t *row, int width, int from, int step, int columns, uint8_t *to) {
  const int bytes = (columns + 7) >> 3, row_bytes = (width + 7) >> 3;
  int j, k, x;
  if (step == 1 && from > -8 && from < 8 && bytes == row_bytes) {
    uint32_t both = 0; /* the byte before, and this one */
    if (from >= 0) {
      both = (uint32_t)row[0] << 8;
      for (j = 1; j < bytes; j++) {
        both = both >> 8 | (uint32_t)row[j] << 8;
        *to++ = (uint8_t)(both >> from);
      }
      *to = (uint8_t)(both >> 8 >> from);
    } else {
      for (j = 0; j < bytes; j++) {
        both = both >> 8 | (uint32_t)row[j] << 8;
        *to++ = (uint8_t)(both >> (8 + from));
      }
    }
    return;
  }
  if (step == 2) {
    int at = from >> 3;
    const int shift = from - 8 * at;
    for (j = 0; j < bytes; j++, at += 2) {
      uint32_t w = u_byte(row, at, row_bytes) | u_byte(row, at + 1, row_bytes) << 8 | u_byte(row, at + 2, row_bytes) << 16;
      w = w >> shift & 0x5555u; /* every second of 16 bits */
      w = (w | w >> 1) & 0x3333u;
      w = (w | w >> 2) & 0x0f0fu;
      *to++ = (uint8_t)(w | w >> 4);
    }
    return;
  }
  for (j = 0, x = from; j < columns; to++) {
    unsigned byte = 0;
    for (k = 0; k < 8 && j < columns; k++, j++, x += step)
      if (x >= 0 && x < width) byte |= (row[x >> 3] >> (x & 7) & 1u) << k;
    *to = (uint8_t)byte;
  }
}

/* The same for all rows of a channel at once, if words hold whole rows: 8, 16 or 32 columns. */
U_ALONE void u_move_words(const uint8_t *from, int words, int width, int shift, uint8_t *to) {
  const uint32_t all = width == 32 ? ~0u : (1u << width) - 1, ones = ~0u / all; /* the first column of each row */
  const uint32_t keep = ones * (shift >= 0 ? all >> shift : all & all << -shift);
  for (; words > 0; words--, from += 4, to += 4) {
    const uint32_t word = u_word_at(from), moved = (shift >= 0 ? word >> shift : word << -shift) & keep;
    u_copy(to, &moved, sizeof moved);
  }
}

/* One channel as one column of the kernel sees it: [phase][row][byte]. */
static void u_move_channel(const struct u_binary *b, const uint8_t *from, int shift, uint8_t *to) {
  const size_t bytes = (size_t)b->bytes;
  const int width = b->in.width, words = b->in.height * b->bytes >> 2;
  int phase, r, y;
  if (b->sw == 1 && b->sh == 1 && width == b->out.width && (width == 8 || width == 16 || width == 32) && shift > -8 &&
      shift < 8 && words << 2 == b->in.height * b->bytes && b->phase_rows >= b->top + b->in.height) {
    const int before = b->top * b->bytes, size = words << 2;
    u_zero(to, (size_t)before);
    u_move_words(from, words, width, shift, to + before);
    u_zero(to + before + size, (size_t)(b->channel_step - before - size));
    return;
  }
  for (phase = 0; phase < b->sh; phase++)
    for (r = 0, y = phase - b->top; r < b->phase_rows; r++, y += b->sh, to += bytes)
      if (y < 0 || y >= b->in.height)
        u_zero(to, bytes);
      else
        u_move_row(from + y * b->row_bytes, width, shift, b->sw, b->out.width, to);
}

/* [plane][column of the kernel][channel][phase][row][byte]: rows with the padding, as each column of the kernel sees them.
 * Rows that a step of sh visits one after another are adjacent. */
static void u_prepare(const struct u_binary *b, const uint8_t *code, uint8_t *to) {
  const size_t image = (size_t)(b->in.height * b->row_bytes), step = (size_t)b->channel_step;
  int plane, s, c;
  for (plane = 0; plane < b->planes; plane++) {
    for (s = 0; s < b->kw; s++)
      for (c = 0; c < b->in.channels; c++, to += step)
        u_move_channel(b, code + (size_t)(plane * b->in.channels + c) * image, s * b->dw - b->left, to);
    u_zero(to, step);
    to += step;
  }
  u_zero(to, U_SLACK);
}

U_INLINE uint32_t u_tap_offset(const struct u_binary *b, int tap, int channel) {
  const int r = tap / b->kw, s = tap - r * b->kw, row = r * b->dh;
  return (uint32_t)((s * b->in.channels + channel) * b->channel_step +
                    (row % b->sh * b->phase_rows + row / b->sh) * b->bytes);
}

/* Up to a multiple of eight. */
static int u_fill_list(const struct u_binary *b, u_offset *list, int count) {
  while (count & 7) list[count++] = (u_offset)(b->plane_step - b->channel_step);
  return count;
}

/* The places of a filter's +1, and how many there are per tap. */
U_ALONE int u_list_ones(const struct u_binary *b, int base, int filter, u_offset *list, int32_t *tap_ones) {
  const int channels = b->in.channels / b->groups, taps = b->kh * b->kw;
  const int first = filter / (b->out.channels / b->groups) * channels;
  uint32_t at = ((uint32_t)base * (uint32_t)b->out.channels + (uint32_t)filter) * (uint32_t)(taps * channels);
  u_offset *to = list;
  for (int tap = 0, c; tap < taps; tap++) {
    const u_offset *start = to;
    uint32_t offset = u_tap_offset(b, tap, first);
    for (c = 0; c < channels; c += 32) {
      const int count = channels - c < 32 ? channels - c : 32;
      uint32_t word = u_some_bits(b->signs, at, count);
      at += (uint32_t)count;
      while (word) {
        *to++ = (u_offset)(offset + (uint32_t)(u_lowest(word) * b->channel_step));
        word &= word - 1;
      }
      offset += (uint32_t)(32 * b->channel_step);
    }
    tap_ones[tap] = (int32_t)(to - start);
  }
  return u_fill_list(b, list, (int)(to - list));
}

/* The places of all channels of a group. */
static int u_list_all(const struct u_binary *b, int group, u_offset *list) {
  const int channels = b->in.channels / b->groups, taps = b->kh * b->kw;
  int tap, c, count = 0;
  for (tap = 0; tap < taps; tap++)
    for (c = 0; c < channels; c++) list[count++] = (u_offset)u_tap_offset(b, tap, group * channels + c);
  return u_fill_list(b, list, count);
}

#define U_DIGITS 16
#define U_FIRST_DIGITS 4 /* those that are kept in registers */

struct u_digits {
  u_word ones, twos, fours;
};

/* Adds eight words. Returns what is to be added to the eights. */
U_INLINE u_word u_add_eight(struct u_digits *d, const uint8_t *from, const u_offset *list) {
  u_word two_a, two_b, four_a, four_b;
  two_a = u_carry(&d->ones, u_load(from + list[0]), u_load(from + list[1]));
  two_b = u_carry(&d->ones, u_load(from + list[2]), u_load(from + list[3]));
  four_a = u_carry(&d->twos, two_a, two_b);
  two_a = u_carry(&d->ones, u_load(from + list[4]), u_load(from + list[5]));
  two_b = u_carry(&d->ones, u_load(from + list[6]), u_load(from + list[7]));
  four_b = u_carry(&d->twos, two_a, two_b);
  return u_carry(&d->fours, four_a, four_b);
}

/* Adds the words at all places of a list: digits[d][lane], binary digit d of the counts. */
U_ALONE void u_count(const uint8_t *from, const u_offset *list, int count, int digit_count, uint32_t *digits) {
  const u_offset *end = list + count;
  struct u_digits low;
  u_word eights = u_none(), more[U_DIGITS - U_FIRST_DIGITS];
  u_word *d, *last = more + digit_count - U_FIRST_DIGITS;
  low.ones = low.twos = low.fours = u_none();
  for (d = more; d < last; d++) *d = u_none();
  while (list < end) {
    u_word carry, other = u_add_eight(&low, from, list);
    list += 8;
    if (list < end) {
      carry = u_add_eight(&low, from, list);
      list += 8;
      carry = u_carry(&eights, other, carry);
    } else {
      carry = u_and(eights, other);
      eights = u_xor(eights, other);
    }
    for (d = more; d < last; d++) {
      const u_word digit = *d;
      *d = u_xor(digit, carry);
      carry = u_and(digit, carry);
    }
  }
  u_copy(digits, &low.ones, sizeof low.ones);
  u_copy(digits + U_LANES, &low.twos, sizeof low.twos);
  u_copy(digits + 2 * U_LANES, &low.fours, sizeof low.fours);
  u_copy(digits + 3 * U_LANES, &eights, sizeof eights);
  for (d = more; d < last; d++) u_copy(digits + (d - more + U_FIRST_DIGITS) * U_LANES, d, sizeof *d);
}

/* The digits of counts 0 .. count. */
static int u_digits_of(int count) {
  int digits = U_FIRST_DIGITS;
  while (count >> digits) digits++;
  return digits;
}

/* Digits 0 .. count - 1, at most eight, to bytes: byte k of four[j] is the count of pixel j + 8 k. */
U_ALONE void u_spread(const uint32_t *digits, int count, uint32_t *four) {
  const uint32_t m = 0x01010101u;
  const uint32_t d0 = digits[0], d1 = count > 1 ? digits[U_LANES] : 0, d2 = count > 2 ? digits[2 * U_LANES] : 0;
  const uint32_t d3 = count > 3 ? digits[3 * U_LANES] : 0, d4 = count > 4 ? digits[4 * U_LANES] : 0;
  const uint32_t d5 = count > 5 ? digits[5 * U_LANES] : 0, d6 = count > 6 ? digits[6 * U_LANES] : 0;
  const uint32_t d7 = count > 7 ? digits[7 * U_LANES] : 0;
#define U_FOUR(j)                                    \
  do {                                               \
    uint32_t sum = d7 >> j & m;                      \
    sum = (sum << 1) + (d6 >> j & m);                \
    sum = (sum << 1) + (d5 >> j & m);                \
    sum = (sum << 1) + (d4 >> j & m);                \
    sum = (sum << 1) + (d3 >> j & m);                \
    sum = (sum << 1) + (d2 >> j & m);                \
    sum = (sum << 1) + (d1 >> j & m);                \
    four[j] = (sum << 1) + (d0 >> j & m);            \
  } while (0)
  U_FOUR(0);
  U_FOUR(1);
  U_FOUR(2);
  U_FOUR(3);
  U_FOUR(4);
  U_FOUR(5);
  U_FOUR(6);
  U_FOUR(7);
#undef U_FOUR
}

/* number[i] = start + times * A[i] - minus * P[i], for 32 pixels. */
U_ALONE void u_numbers(const uint32_t *digits, int count, int32_t start, int32_t times, int32_t minus, const uint16_t *p,
                      int32_t *number) {
  uint32_t four[8];
  int j;
  u_spread(digits, count < 8 ? count : 8, four);
  for (j = 0; j < 8; j++) {
    const uint32_t a = four[j];
    number[j] = start + times * (int32_t)(a & 255) - minus * (int32_t)p[j];
    number[j + 8] = start + times * (int32_t)(a >> 8 & 255) - minus * (int32_t)p[j + 8];
    number[j + 16] = start + times * (int32_t)(a >> 16 & 255) - minus * (int32_t)p[j + 16];
    number[j + 24] = start + times * (int32_t)(a >> 24) - minus * (int32_t)p[j + 24];
  }
  if (count <= 8) return;
  u_spread(digits + 8 * U_LANES, count - 8, four);
  times *= 256;
  for (j = 0; j < 8; j++) {
    const uint32_t a = four[j];
    number[j] += times * (int32_t)(a & 255);
    number[j + 8] += times * (int32_t)(a >> 8 & 255);
    number[j + 16] += times * (int32_t)(a >> 16 & 255);
    number[j + 24] += times * (int32_t)(a >> 24);
  }
}

/* P of all pixels, for one group: p[plane][pixel], rows of whole bytes. */
static void u_count_windows(const struct u_binary *b, int group, const uint8_t *ready, u_offset *list, uint16_t *p,
                            int pixels) {
  const int count = u_list_all(b, group, list), digit_count = u_digits_of(count);
  uint32_t digits[U_DIGITS * U_LANES];
  uint16_t none[32];
  int32_t number[32];
  int plane, at, lane, i;
  u_zero(none, sizeof none);
  for (plane = 0; plane < b->planes; plane++, p += pixels)
    for (at = 0; at < pixels; at += U_BITS) {
      u_count(ready + plane * b->plane_step + (at >> 3), list, count, digit_count, digits);
      for (lane = 0; lane < U_LANES && at + 32 * lane < pixels; lane++) {
        u_numbers(digits + lane, digit_count, 0, 1, 0, none, number);
        for (i = 0; i < 32; i++) p[at + 32 * lane + i] = (uint16_t)number[i];
      }
    }
}

/* The sum of a filter's signs over the taps inside the image, for each class of pixels. `tap_ones` becomes sums over all taps
 * above and to the left of a tap, and the tap. */
U_ALONE void u_sum_signs(const struct u_binary *b, int32_t *tap_ones, int32_t *sums) {
  const int channels = b->in.channels / b->groups, kw = b->kw;
  int row, column, r, s;
  for (r = 0; r < b->kh; r++) {
    int32_t before = 0;
    for (s = 0; s < kw; s++) {
      before += 2 * tap_ones[r * kw + s] - channels;
      tap_ones[r * kw + s] = before + (r ? tap_ones[(r - 1) * kw + s] : 0);
    }
  }
  for (row = 0; row < b->row_classes; row++) {
    const int top = (b->row_taps[row].first - 1) * kw - 1, bottom = (b->row_taps[row].last - 1) * kw - 1;
    for (column = 0; column < b->column_classes; column++, sums++) {
      const int first = b->column_taps[column].first, last = b->column_taps[column].last;
      int32_t sum = 0;
      if (first < last && top < bottom) {
        sum = tap_ones[bottom + last] - (first ? tap_ones[bottom + first] : 0);
        if (b->row_taps[row].first) sum -= tap_ones[top + last] - (first ? tap_ones[top + first] : 0);
      }
      *sums = sum;
    }
  }
}

/* Adds times * (sum - sum of the center) to pixels whose windows are partly outside. Compilers see that x >= 0 if it is unsigned. */
U_INLINE void u_fix_row(const struct u_binary *b, const int32_t *sums, int32_t times, int y, int first, int last,
                      int32_t *number) {
  const int32_t *row = sums + b->row_class[y] * b->column_classes;
  const int32_t center = sums[b->center];
  int x = first;
  if (y >= b->first_row && y < b->last_row) {
    for (; x < last && (unsigned)x < (unsigned)b->first_column; x++) number[x - first] += times * (row[b->column_class[x]] - center);
    if (x < b->last_column) x = b->last_column;
  }
  for (; x < last; x++) number[x - first] += times * (row[b->column_class[x]] - center);
}

/* The same for the pixels of a word; (y, x) is the first. */
U_ALONE void u_fix_border(const struct u_binary *b, const int32_t *sums, int32_t times, int y, int x, int32_t *number) {
  const int row_bits = 8 * b->bytes;
  int from;
  for (from = 0; from < U_BITS && y < b->out.height; from += row_bits - x, x = 0, y++) {
    const int room = U_BITS - from, last = b->out.width - x < room ? b->out.width : x + room;
    if (x < last) u_fix_row(b, sums, times, y, x, last, number + from);
  }
}

/* Applies the epilogue to the pixels of a word. */
static void u_apply(const struct u_binary *b, u_function *apply, const struct u_epilogue *e, const struct u_run *run,
                    int filter, int at, const void *source) {
  const int row_bits = 8 * b->bytes, all = b->out.height * row_bits;
  int y = at / row_bits, x = at - y * row_bits, from, step;
  if (b->out.width == row_bits) {
    apply(e, run, filter, at, at >> 3, all - at < U_BITS ? all - at : U_BITS, source);
    return;
  }
  for (from = 0; from < U_BITS && y < b->out.height; from += step, x = 0, y++) {
    const int width = b->out.width - x;
    step = row_bits - x < U_BITS - from ? row_bits - x : U_BITS - from;
    if (width > 0)
      apply(e, run, filter, y * b->out.width + x, y * b->bytes + (x >> 3), width < step ? width : step,
            (const uint8_t *)source + 4 * (size_t)from);
  }
}

/* Parts of a layer's scratch. */
struct u_parts {
  int pixels;    /* of an image with rows of whole bytes, in whole words of 32 */
  int list_step; /* from one base's list to the next */
  int classes;
  int32_t *sums; /* [base][class] */
  int32_t *tap_ones;
  uint16_t *p;
  u_offset *lists;
};

static struct u_parts u_cut(const struct u_binary *b, uint8_t *scratch) {
  struct u_parts s;
  const int taps = b->kh * b->kw;
  s.pixels = (b->out.height * b->bytes + 3) / 4 * 32;
  s.list_step = taps * (b->in.channels / b->groups) + 8;
  s.classes = b->row_classes * b->column_classes;
  s.sums = (int32_t *)(void *)scratch;
  s.tap_ones = s.sums + b->bases * s.classes;
  s.lists = (u_offset *)(s.tap_ones + taps);
  s.p = (uint16_t *)(s.lists + b->bases * s.list_step);
  return s;
}
