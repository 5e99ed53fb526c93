static void u_channel_shuffle(struct u_image in, int groups, const float *from, float *to) {
  const int size = in.height * in.width, channels = in.channels / groups;
  int c, g;
  for (c = 0; c < channels; c++)
    for (g = 0; g < groups; g++, to += size) u_copy(to, from + (g * channels + c) * size, sizeof(float) * (size_t)size);
}
