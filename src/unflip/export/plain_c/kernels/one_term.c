/* One base, one plane and no offset of the filters: the epilogue gets whole numbers. */
static void u_binary_conv(const struct u_binary *b, const uint8_t *ready, uint8_t *scratch, u_function *apply,
                          const struct u_epilogue *e, const struct u_run *run) {
  const struct u_parts s = u_cut(b, scratch);
  const int row_bits = 8 * b->bytes, all = b->out.height * row_bits, per_group = b->out.channels / b->groups;
  const int32_t multiple = b->multiples[0], times = b->terms[0].signs_times;
  int filter, at, lane;
  for (filter = 0; filter < b->out.channels; filter++) {
    int count, digit_count;
    if (filter % per_group == 0) u_count_windows(b, filter / per_group, ready, s.lists, s.p, s.pixels);
    count = u_list_ones(b, 0, filter, s.lists, s.tap_ones);
    digit_count = u_digits_of(count);
    u_sum_signs(b, s.tap_ones, s.sums);
    for (at = 0; at < all; at += U_BITS) {
      uint32_t digits[U_DIGITS * U_LANES];
      int32_t number[U_BITS];
      u_count(ready + (at >> 3), s.lists, count, digit_count, digits);
      for (lane = 0; lane < U_LANES && at + 32 * lane < s.pixels; lane++)
        u_numbers(digits + lane, digit_count, times * s.sums[b->center], 2 * multiple, multiple, s.p + at + 32 * lane,
                  number + 32 * lane);
      if (times) u_fix_border(b, s.sums, times, at / row_bits, at % row_bits, number);
      u_apply(b, apply, e, run, filter, at, number);
    }
  }
}
