// The positions of a convolution's windows on its input.
#pragma once

#include <algorithm>

#include "../graph.h"

namespace unflip {

// Taps first .. last - 1 of a kernel's row or column are inside the image. The others are in the padding.
struct Taps {
  int first = 0, last = 0;
  bool operator==(const Taps& o) const { return first == o.first && last == o.last; }
};

struct Window {
  Pair kernel, stride, dilation;
  int top = 0, left = 0;
  Shape in, out;

  Window(const Convolution& conv, const Shape& in_, const Shape& out_)
      : kernel(conv.kernel), stride(conv.stride), dilation(conv.dilation), top(conv.top), left(conv.left), in(in_), out(out_) {}

  // Input row and column of the window's first tap; may be in the padding.
  int row(int y) const { return y * stride.h - top; }
  int column(int x) const { return x * stride.w - left; }

  // Rows and columns of the padded input that some window reads.
  int64_t rows() const { return int64_t{out.height - 1} * stride.h + int64_t{kernel.h - 1} * dilation.h + 1; }
  int64_t columns() const { return int64_t{out.width - 1} * stride.w + int64_t{kernel.w - 1} * dilation.w + 1; }

  bool has_border() const { return top || left || rows() > in.height || columns() > in.width; }

  // Whether the padded input is not much larger than input and output together.
  bool padding_is_moderate() const {
    int64_t image = int64_t{in.height} * in.width + int64_t{out.height} * out.width;
    return rows() * columns() <= 8 * image + 4096;
  }

  Taps row_taps(int y) const { return taps(row(y), dilation.h, kernel.h, in.height); }
  Taps column_taps(int x) const { return taps(column(x), dilation.w, kernel.w, in.width); }

 private:
  static Taps taps(int start, int dilation, int kernel, int size) {
    Taps t;
    if (start < 0) t.first = (-start + dilation - 1) / dilation;
    if (t.first > kernel) t.first = kernel;
    t.last = start >= size ? 0 : (size - 1 - start) / dilation + 1;
    if (t.last > kernel) t.last = kernel;
    if (t.last < t.first) t.last = t.first;
    return t;
  }
};

// Copies row y of an image, whose pixels are `stride` floats apart, after a border of `left` columns: `columns` pixels of
// `channels` floats. Outside the image, and from there up to `floats` floats, it writes zeros.
inline void copy_padded_row(const float* image, const Shape& shape, int64_t stride, int y, int channels, int left,
                            int64_t columns, int64_t floats, float* to) {
  if (y < 0 || y >= shape.height) {
    std::fill(to, to + floats, 0.f);
    return;
  }
  const float* from = image + int64_t{y} * shape.width * stride;
  const int64_t first = std::min<int64_t>(left, columns), last = std::min(columns, first + shape.width);
  std::fill(to, to + first * channels, 0.f);
  if (stride == channels)
    std::copy(from, from + (last - first) * channels, to + first * channels);
  else
    for (int64_t x = first; x < last; x++)
      std::copy(from + (x - first) * stride, from + (x - first) * stride + channels, to + x * channels);
  std::fill(to + last * channels, to + floats, 0.f);
}

}  // namespace unflip
