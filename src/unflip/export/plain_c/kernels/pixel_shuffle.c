static void u_pixel_shuffle(struct u_image in, int high, int wide, const float *from, float *to) {
  int c, y, x;
  for (c = 0; c < in.channels / (high * wide); c++)
    for (y = 0; y < in.height * high; y++)
      for (x = 0; x < in.width * wide; x++) {
        const int channel = (c * high + y % high) * wide + x % wide;
        *to++ = from[(channel * in.height + y / high) * in.width + x / wide];
      }
}
