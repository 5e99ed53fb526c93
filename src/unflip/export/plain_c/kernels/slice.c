static void u_slice(struct u_image in, struct u_image out, const int32_t *start, const int32_t *step, const float *from, float *to) {
  int c, y, x;
  for (c = 0; c < out.channels; c++)
    for (y = 0; y < out.height; y++)
      for (x = 0; x < out.width; x++)
        *to++ = from[((start[0] + c * step[0]) * in.height + start[1] + y * step[1]) * in.width + start[2] + x * step[2]];
}
