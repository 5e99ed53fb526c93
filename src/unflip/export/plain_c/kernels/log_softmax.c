/* Over the channels of each pixel. */
static void u_log_softmax(struct u_image in, const float *from, float *to) {
  const int size = in.height * in.width;
  int c, i;
  for (i = 0; i < size; i++) {
    const double largest = (double)u_largest(from + i, in.channels, size);
    double sum = 0, log_sum;
    for (c = i; c < in.channels * size; c += size) sum += (double)(float)u_exp_below_zero((double)from[c] - largest);
    log_sum = u_log_above_one(sum);
    for (c = i; c < in.channels * size; c += size) to[c] = (float)((double)from[c] - largest - log_sum);
  }
}
