static void u_pad(struct u_image in, struct u_image out, const int32_t *before, const float *from, float *to) {
  int c, y, x;
  for (c = 0; c < out.channels; c++)
    for (y = 0; y < out.height; y++)
      for (x = 0; x < out.width; x++) {
        const int ic = c - before[0], iy = y - before[1], ix = x - before[2];
        const int inside = ic >= 0 && ic < in.channels && iy >= 0 && iy < in.height && ix >= 0 && ix < in.width;
        *to++ = inside ? from[(ic * in.height + iy) * in.width + ix] : 0;
      }
}
