// Random numbers for mutations. The sizes are mostly small, and sometimes next to a power of two or a limit of the format.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace fuzz {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  size_t below(size_t limit) { return limit == 0 ? 0 : engine_() % limit; }
  bool chance(int percent) { return below(100) < static_cast<size_t>(percent); }
  int in(int least, int most) { return least + static_cast<int>(below(static_cast<size_t>(most - least) + 1)); }

  template <class T>
  const T& of(const std::vector<T>& items) {
    return items[below(items.size())];
  }
  template <class T>
  T pick(std::initializer_list<T> items) {
    return items.begin()[below(items.size())];
  }

  // 1 .. limit, rarely one more.
  int size(int limit) {
    const size_t kind = below(100);
    if (kind < 60) return std::min(limit, in(1, 9));
    if (kind < 80) return std::min(limit, in(1, 70));
    if (kind < 90) return std::min(limit, std::max(1, (1 << below(17)) + in(-1, 1)));
    if (kind < 97) return std::min(limit, static_cast<int>(std::exp(unit() * std::log(static_cast<double>(limit)))) + 1);
    return limit + in(-1, 1);
  }

  double unit() { return static_cast<double>(engine_() % 1000003) / 1000003; }  // 0 .. 1

  // A float, of one of several kinds: ordinary, whole, zero, tiny, huge.
  float value() {
    const float ordinary = static_cast<float>(unit() * 4 - 2);
    switch (below(16)) {
      case 0: return 0.f;
      case 1: return -0.f;
      case 2: return static_cast<float>(in(-3, 3));
      case 3: return ordinary * pick({1e-45f, 1e-40f, 1e-30f, 1e30f, 1e37f});
      case 4: return pick({0.5f, -0.5f, 1.f, -1.f, 2.f, 3.4028235e38f, -3.4028235e38f, 1.17549435e-38f, 1e-45f});
      default: return ordinary;
    }
  }

 private:
  std::minstd_rand engine_;
};

}  // namespace fuzz
