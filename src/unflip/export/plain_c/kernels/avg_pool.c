static void u_avg_pool(const struct u_pool *l, struct u_reader in, float *row, u_function *apply, const struct u_epilogue *e,
                       const struct u_run *run) {
  int c, y, x, r, s, image = 0;
  for (c = 0; c < l->in.channels; c++, image += l->in.height * l->in.width)
    for (y = 0; y < l->out.height; y++) {
      const struct u_span rows = u_span_of(y, l->kh, l->sh, l->ph, l->in.height);
      for (x = 0; x < l->out.width; x++) {
        const struct u_span columns = u_fast_span(x, l->kw, l->sw, l->pw, l->in.width);
        const int inside = (rows.last - rows.first) * (columns.last - columns.first);
        const int count = l->count_padding ? rows.size * columns.size : inside;
        float sum = 0;
        for (r = rows.first; r < rows.last; r++)
          for (s = columns.first; s < columns.last; s++) sum = sum + u_read(in, image + r * l->in.width + s);
        row[x] = sum / (float)(count > 1 ? count : 1);
      }
      apply(e, run, c, y * l->out.width, y * ((l->out.width + 7) >> 3), l->out.width, row);
    }
}
