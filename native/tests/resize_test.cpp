// The resize of native/pixels: all instruction sets give the bytes of a plain formula, and stay inside their arrays.
//
// tests/test_resize.py compares the same function with Pillow. Here arrays are exactly as large as they must be, so that
// AddressSanitizer finds each byte that is read or written outside of them.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using std::int32_t;
using std::int64_t;
using std::uint8_t;

extern "C" int unflip_resize_rgb(const uint8_t*, int64_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t,
                                 int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, uint8_t*, int64_t) noexcept;

namespace {

struct Case {
  int32_t width, height, left, top, right, bottom, out_width, out_height, window_left, window_top, window_width, window_height,
      flip, rows_first;
};

using Bytes = std::vector<uint8_t>;

void require(bool right, const char* what, const Case& c) {
  if (right) return;
  std::printf("%s: %d x %d, box %d %d %d %d to %d x %d, window %d %d %d %d, flip %d, rows first %d\n", what, c.width, c.height,
              c.left, c.top, c.right, c.bottom, c.out_width, c.out_height, c.window_left, c.window_top, c.window_width,
              c.window_height, c.flip, c.rows_first);
  std::exit(1);
}

// Output i of an axis: the sum of value(x) over the inputs x, with 22 fractional bits.
template <typename Value>
uint8_t weighted(int32_t in, int32_t out, int32_t i, Value value) {
  if (in == out) return value(i);
  const double scale = static_cast<double>(in) / out, reach = std::max(scale, 1.0), center = (i + 0.5) * scale;
  const int32_t low = std::max(0, static_cast<int32_t>(center - reach + 0.5));
  const int32_t high = std::min(in, static_cast<int32_t>(center + reach + 0.5));
  const auto weight = [&](int32_t x) { return std::max(0.0, 1 - std::abs((x - center + 0.5) * (1 / reach))); };
  double total = 0;
  for (int32_t x = low; x < high; ++x) total += weight(x);
  int64_t sum = 1 << 21;
  for (int32_t x = low; x < high; ++x) sum += static_cast<int64_t>(0.5 + weight(x) / total * (1 << 22)) * value(x);
  return static_cast<uint8_t>(std::min<int64_t>(sum >> 22, 255));
}

Bytes expected(const Bytes& pixels, const Case& c) {
  const int32_t width = c.right - c.left, height = c.bottom - c.top;
  const auto pixel = [&](int32_t x, int32_t y, int32_t channel) {
    return pixels[((c.top + y) * c.width + c.left + x) * 3 + channel];
  };
  Bytes found;
  for (int32_t i = 0; i < c.window_height; ++i) {
    for (int32_t j = 0; j < c.window_width; ++j) {
      const int32_t y = c.window_top + i, x = c.window_left + (c.flip ? c.window_width - 1 - j : j);
      for (int32_t channel = 0; channel < 3; ++channel) {
        found.push_back(c.rows_first ? weighted(width, c.out_width, x,
                                                [&](int32_t from_x) {
                                                  return weighted(height, c.out_height, y,
                                                                  [&](int32_t from_y) { return pixel(from_x, from_y, channel); });
                                                })
                                     : weighted(height, c.out_height, y, [&](int32_t from_y) {
                                         return weighted(width, c.out_width, x,
                                                         [&](int32_t from_x) { return pixel(from_x, from_y, channel); });
                                       }));
      }
    }
  }
  return found;
}

int call(const Bytes& pixels, const Case& c, int32_t instructions, Bytes& out) {
  return unflip_resize_rgb(pixels.data(), int64_t{c.width} * 3, c.width, c.height, c.left, c.top, c.right, c.bottom, c.out_width,
                           c.out_height, c.window_left, c.window_top, c.window_width, c.window_height, c.flip, c.rows_first,
                           instructions, out.data(), int64_t{c.window_width} * 3);
}

}  // namespace

int main() {
  std::mt19937 random(0);
  const auto from = [&](int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(random); };
  const auto part = [&](int32_t size, int32_t& begin, int32_t& length) {
    begin = from(0, size - 1);
    length = from(1, size - begin);
  };
  int sets = 0;
  for (int number = 0; number < 400; ++number) {
    Case c{};
    c.width = from(1, number % 10 ? 40 : 400);
    c.height = from(1, 40);
    int32_t width, height;
    part(c.width, c.left, width);
    part(c.height, c.top, height);
    c.right = c.left + width;
    c.bottom = c.top + height;
    c.out_width = number % 7 ? from(1, 40) : width;
    c.out_height = number % 11 ? from(1, 40) : height;
    part(c.out_width, c.window_left, c.window_width);
    part(c.out_height, c.window_top, c.window_height);
    c.flip = from(0, 1);
    c.rows_first = from(0, 1);
    Bytes pixels(static_cast<size_t>(c.width) * c.height * 3);
    for (uint8_t& value : pixels) value = static_cast<uint8_t>(number % 3 ? from(0, 255) : 255 * from(0, 1));
    const Bytes right = expected(pixels, c);
    for (int32_t instructions = 0; instructions <= 2; ++instructions) {
      Bytes out(right.size());
      const int status = call(pixels, c, instructions, out);
      if (instructions == 2 && status == 1) continue;  // not on this CPU
      require(status == 0, "refused", c);
      require(out == right, "other bytes", c);
      sets = std::max(sets, instructions);
    }
  }
  const Case whole{4, 4, 0, 0, 4, 4, 8, 8, 0, 0, 8, 8, 0, 0};
  Bytes pixels(48), out(192);
  require(call(pixels, whole, 0, out) == 0, "refused", whole);
  for (int32_t Case::* field : {&Case::width, &Case::height, &Case::right, &Case::bottom, &Case::out_width, &Case::out_height,
                                &Case::window_width, &Case::window_height}) {
    for (const int32_t value : {0, -1, INT32_MIN}) {
      Case wrong = whole;
      wrong.*field = value;
      require(call(pixels, wrong, 0, out) == 1, "not refused", wrong);
    }
  }
  for (int32_t Case::* field : {&Case::left, &Case::top, &Case::right, &Case::bottom, &Case::window_left, &Case::window_top,
                                &Case::window_width, &Case::window_height}) {
    for (const int32_t value : {9, INT32_MAX, -1}) {
      Case wrong = whole;
      wrong.*field = value;
      require(call(pixels, wrong, 0, out) == 1, "not refused", wrong);
    }
  }
  std::printf("all right, %d instruction sets\n", sets);
}
