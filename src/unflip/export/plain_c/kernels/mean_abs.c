/* Sums of absolute values in double precision, in the runtime's order: 8 sums, or 4 times 8 while there are 32 numbers. */
struct u_sums {
  double sum[4][8];
};

/* `count` numbers: channels [first, first + channels) of one pixel after another. */
static double u_sum_abs(const float *from, int size, int channels, int count) {
  struct u_sums s;
  const int most = count / 32 * 32;
  double *a = s.sum[0];
  int i, k, c = 0, x = 0;
  for (k = 0; k < 4; k++)
    for (i = 0; i < 8; i++) s.sum[k][i] = 0;
  for (i = 0; i < count; i++) {
    const float v = from[c * size + x];
    if (i == most && most)
      for (k = 0; k < 8; k++) a[k] = (a[k] + s.sum[1][k]) + (s.sum[2][k] + s.sum[3][k]);
    s.sum[i < most ? i / 8 % 4 : 0][i % 8] += (double)(v < 0 ? -v : v);
    if (++c == channels) c = 0, x++;
  }
  if (count == most && most)
    for (k = 0; k < 8; k++) a[k] = (a[k] + s.sum[1][k]) + (s.sum[2][k] + s.sum[3][k]);
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

U_UNUSED static void u_mean_abs_channels(struct u_image in, int groups, const float *from, float *to) {
  const int size = in.height * in.width, channels = in.channels / groups;
  int g, i;
  for (g = 0; g < groups; g++)
    for (i = 0; i < size; i++) *to++ = (float)(u_sum_abs(from + g * channels * size + i, size, channels, channels) / channels);
}

/* whole: a row is one sum; otherwise each pixel is one. */
U_UNUSED static void u_mean_abs_sample(struct u_image in, int whole, const float *from, float *to) {
  const int size = in.height * in.width;
  double sum = 0;
  int y, x;
  for (y = 0; y < in.height; y++) {
    double row = 0;
    if (whole) row += u_sum_abs(from + y * in.width, size, in.channels, in.channels * in.width);
    for (x = 0; x < in.width && !whole; x++) row += u_sum_abs(from + y * in.width + x, size, in.channels, in.channels);
    sum += row;
  }
  *to = (float)(sum / ((double)in.channels * size));
}
