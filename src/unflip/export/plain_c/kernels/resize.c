/* Bilinear. The position in the input is a quotient of whole numbers. */
struct u_spot {
  int first, second; /* pixels of the input */
  float share;       /* of the second */
};

static struct u_spot u_spot_of(int32_t i, int32_t in, int32_t out, int corners) {
  const int64_t divisor = corners ? (out > 1 ? out - 1 : 1) : 2 * (int64_t)out;
  int64_t position = corners ? (out > 1 ? (int64_t)i * (in - 1) : 0) : (2 * (int64_t)i + 1) * in - out;
  struct u_spot s;
  if (position < 0) position = 0;
  s.first = (int)(position / divisor < in - 1 ? position / divisor : in - 1);
  s.second = s.first + 1 < in ? s.first + 1 : in - 1;
  s.share = (float)((double)(position % divisor) / (double)divisor);
  return s;
}

static void u_resize(struct u_image in, struct u_image out, int corners, const float *from, float *to) {
  int c, y, x;
  for (c = 0; c < in.channels; c++, from += in.height * in.width)
    for (y = 0; y < out.height; y++) {
      const struct u_spot row = u_spot_of(y, in.height, out.height, corners);
      const float *upper = from + row.first * in.width, *lower = from + row.second * in.width;
      for (x = 0; x < out.width; x++) {
        const struct u_spot column = u_spot_of(x, in.width, out.width, corners);
        const float above = upper[column.first] + (upper[column.second] - upper[column.first]) * column.share;
        const float below = lower[column.first] + (lower[column.second] - lower[column.first]) * column.share;
        *to++ = above + (below - above) * row.share;
      }
    }
}
