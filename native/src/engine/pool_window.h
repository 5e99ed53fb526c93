// The positions of a pool's windows on its input.
#pragma once

#include <algorithm>

#include "../graph.h"
#include "../kernels/kernels.h"

namespace unflip {

// A window along one side: positions first .. last - 1 are inside the image. `size` includes the padding, but not what ceil_mode
// adds at the end.
struct PoolSpan {
  int first, last, size;
  PoolSpan(int position, int kernel, int stride, int padding, int length) {
    first = position * stride - padding;
    last = std::min(first + kernel, length + padding);
    size = last - first;
    first = std::max(first, 0);
    last = std::max(first, std::min(last, length));
  }
};

class PoolWindow {
 public:
  // stride: floats from one pixel of the input to the next.
  PoolWindow(const Op& op, const Shape& in, int stride)
      : pool_(op.pool), max_(op.kind == OpKind::MaxPool), in_(in), stride_(stride) {}

  PoolSpan rows(int y) const { return {y, pool_.kernel.h, pool_.stride.h, pool_.padding.h, in_.height}; }

  // in: the input from row `first_row` on.
  PoolTile tile(const float* in, int first_row, int y, int x, float* out) const {
    const PoolSpan r = rows(y);
    const PoolSpan c(x, pool_.kernel.w, pool_.stride.w, pool_.padding.w, in_.width);
    PoolTile tile;
    tile.rows = r.last - r.first;
    tile.columns = c.last - c.first;
    tile.column_stride = stride_;
    tile.row_stride = int64_t{in_.width} * stride_;
    if (tile.rows && tile.columns) tile.input = in + (r.first - first_row) * tile.row_stride + c.first * tile.column_stride;
    tile.channels = padded(in_.channels);
    tile.max = max_;
    const int64_t count = pool_.count_padding ? int64_t{r.size} * c.size : int64_t{tile.rows} * tile.columns;
    tile.divisor = static_cast<float>(std::max<int64_t>(count, 1));
    tile.out = out;
    return tile;
  }

 private:
  Pool pool_;
  bool max_;
  Shape in_;
  int stride_;
};

}  // namespace unflip
