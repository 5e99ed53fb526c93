// The positions of a pool's windows on its input.
#pragma once

#include <algorithm>
#include <vector>

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

// Adjacent windows of a row that have the same number of columns, `stride.w` apart.
struct PoolRun {
  int window, count;      // the first one, and how many
  int first, last, size;  // columns of the first window, as in PoolSpan
};

class PoolWindow {
 public:
  // stride: floats from one pixel of the input to the next.
  PoolWindow(const Op& op, const Shape& in, int stride)
      : pool_(op.pool), max_(op.kind == OpKind::MaxPool), in_(in), stride_(stride) {
    for (int x = 0; x < op.shape.width; x++) {
      const PoolSpan c(x, pool_.kernel.w, pool_.stride.w, pool_.padding.w, in_.width);
      if (!runs_.empty()) {
        PoolRun& run = runs_.back();
        const int moved = run.count * pool_.stride.w;
        if (c.first == run.first + moved && c.last == run.last + moved && c.size == run.size) {
          run.count++;
          continue;
        }
      }
      runs_.push_back({x, 1, c.first, c.last, c.size});
    }
  }

  PoolSpan rows(int y) const { return {y, pool_.kernel.h, pool_.stride.h, pool_.padding.h, in_.height}; }

  // Pools rows first .. last - 1 of the input, which begin at `in`, for the windows of row y. Other rows of these windows are
  // pooled by calls before or after. out: [window][padded channels].
  void pool(const Kernels& kernels, const float* in, int first, int last, int y, float* out) const {
    const PoolSpan own = rows(y);
    PoolTile tile;
    tile.rows = last - first;
    tile.column_stride = stride_;
    tile.row_stride = int64_t{in_.width} * stride_;
    tile.window_stride = int64_t{pool_.stride.w} * stride_;
    tile.channels = padded(in_.channels);
    tile.max = max_;
    tile.begins = first == own.first;
    tile.ends = last == own.last;
    for (const PoolRun& run : runs_) {
      tile.windows = run.count;
      tile.columns = run.last - run.first;
      tile.input = in + (tile.columns ? int64_t{run.first} * stride_ : 0);
      const int64_t inside = int64_t{own.last - own.first} * tile.columns;
      tile.divisor = static_cast<float>(std::max<int64_t>(pool_.count_padding ? int64_t{own.size} * run.size : inside, 1));
      tile.out = out + int64_t{run.window} * tile.channels;
      kernels.pool(tile);
    }
  }

 private:
  Pool pool_;
  bool max_;
  Shape in_;
  int stride_;
  std::vector<PoolRun> runs_;
};

}  // namespace unflip
