/* Over the channels of each pixel. */
static void u_softmax(struct u_image in, const float *from, float *to) {
  const int size = in.height * in.width;
  int c, i;
  for (i = 0; i < size; i++) {
    const double largest = (double)u_largest(from + i, in.channels, size);
    double sum = 0;
    for (c = i; c < in.channels * size; c += size) sum += (double)(to[c] = (float)u_exp_below_zero((double)from[c] - largest));
    for (c = i; c < in.channels * size; c += size) to[c] = (float)((double)to[c] / sum);
  }
}
