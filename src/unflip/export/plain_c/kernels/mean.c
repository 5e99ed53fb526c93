static void u_mean(struct u_image in, struct u_reader from, float *to) {
  const int size = in.height * in.width;
  int c, i, at = 0;
  for (c = 0; c < in.channels; c++) {
    double sum = 0;
    for (i = 0; i < size; i++) sum += (double)u_read(from, at++);
    *to++ = (float)(sum / (double)size);
  }
}
