/* The caller's pixels, as numbers: [channel][256]. */
U_UNUSED static void u_make_levels(const float *mean, const float *std, int channels, float *levels) {
  int c, i;
  for (c = 0; c < channels; c++)
    for (i = 0; i < 256; i++) {
      const float share = (float)i / 255.0f;
      *levels++ = mean ? (share - mean[c]) / std[c] : share;
    }
}

struct u_source {
  const float *floats;   /* [channel][row][column], or null: */
  const uint8_t *pixels; /* [row][column][channel] */
  const float *levels;
};
