/* Element by element. */
static void u_map(struct u_image image, const float *in, u_function *apply, const struct u_epilogue *e,
                  const struct u_run *run) {
  const int size = image.height * image.width, bytes = (image.width + 7) >> 3;
  int c, y;
  for (c = 0; c < image.channels; c++) {
    if (image.width % 8 == 0) {
      apply(e, run, c, 0, 0, size, in + c * size);
      continue;
    }
    for (y = 0; y < image.height; y++)
      apply(e, run, c, y * image.width, y * bytes, image.width, in + c * size + y * image.width);
  }
}
