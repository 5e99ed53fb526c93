/* Pixels [row][column][channel] to numbers [channel][row][column]. */
U_UNUSED static void u_convert(struct u_image in, const float *mean, const float *std, const uint8_t *pixels, float *to) {
  const int size = in.height * in.width;
  int c, i;
  for (c = 0; c < in.channels; c++)
    for (i = 0; i < size; i++) {
      const float share = (float)pixels[i * in.channels + c] / 255.0f;
      *to++ = mean ? (share - mean[c]) / std[c] : share;
    }
}
