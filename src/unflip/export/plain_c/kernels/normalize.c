/* The square root of a positive normal number, rounded correctly: digit by digit, because not every CPU has one. */
static double u_root(double x) {
  uint64_t bits, digits, root = 0, rest = 0;
  int exponent, i;
  if (x != x) return x; /* NaN */
  u_copy(&bits, &x, sizeof bits);
  exponent = (int)(bits >> 52) - 1023;
  digits = (bits & (((uint64_t)1 << 52) - 1)) | (uint64_t)1 << 52;
  if (exponent & 1) digits <<= 1, exponent--;
  digits <<= 8; /* two binary digits per step, from the top of 62 bits */
  for (i = 0; i < 54; i++) {
    uint64_t next;
    rest = rest << 2 | (i < 31 ? digits >> (60 - 2 * i) & 3 : 0);
    next = root << 2 | 1;
    root <<= 1;
    if (rest >= next) rest -= next, root |= 1;
  }
  root = (root >> 1) + (root & 1); /* a tie is impossible */
  bits = ((uint64_t)(exponent / 2 + 1023) << 52) + (root - ((uint64_t)1 << 52));
  u_copy(&x, &bits, sizeof x);
  return x;
}

/* The runtime's order: sums of 64 channels at a time, each over all pixels. `minus` is subtracted, then squared if `square`. */
static double u_sum_group(const float *from, int channels, int size, double minus, int square) {
  double total = 0;
  int c, i;
  for (c = 0; c < channels; c++) {
    double sum = 0;
    for (i = 0; i < size; i++) {
      const double x = (double)from[c * size + i];
      sum += square ? (x - minus) * (x - minus) : x;
    }
    total += sum;
  }
  return total;
}

static void u_normalize(struct u_image in, int groups, float epsilon, const float *from, float *to) {
  const int channels = in.channels / groups, size = in.height * in.width, all = channels * size;
  int g, i;
  for (g = 0; g < groups; g++, from += all, to += all) {
    const double count = (double)size * channels;
    const double mean = u_sum_group(from, channels, size, 0, 0) / count;
    const double variance = u_sum_group(from, channels, size, mean, 1) / count;
    const double scale = 1 / u_root(variance + (double)epsilon);
    for (i = 0; i < all; i++) to[i] = (float)(((double)from[i] - mean) * scale);
  }
}
