struct u_pool {
  struct u_image in, out;
  int kh, kw, sh, sw, ph, pw;
  int count_padding;
};

/* Positions first .. last - 1 of a window are inside the image. `size` includes the padding, but not what rounding up adds. */
struct u_span {
  int first, last, size;
};

U_ALONE struct u_span u_span_of(int position, int kernel, int stride, int padding, int length) {
  struct u_span s;
  s.first = position * stride - padding;
  s.last = s.first + kernel < length + padding ? s.first + kernel : length + padding;
  s.size = s.last - s.first;
  if (s.first < 0) s.first = 0;
  if (s.last > length) s.last = length;
  if (s.last < s.first) s.last = s.first;
  return s;
}

/* Most windows are inside the image: no division of cases for them. */
U_INLINE struct u_span u_fast_span(int position, int kernel, int stride, int padding, int length) {
  const int first = position * stride - padding;
  if (first >= 0 && first + kernel <= length) {
    const struct u_span inside = {first, first + kernel, kernel};
    return inside;
  }
  return u_span_of(position, kernel, stride, padding, length);
}
