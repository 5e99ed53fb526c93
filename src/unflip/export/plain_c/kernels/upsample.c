static void u_upsample(struct u_image in, int high, int wide, const float *from, float *to) {
  int c, y, x;
  for (c = 0; c < in.channels; c++, from += in.height * in.width)
    for (y = 0; y < in.height * high; y++)
      for (x = 0; x < in.width * wide; x++) *to++ = from[y / high * in.width + x / wide];
}
