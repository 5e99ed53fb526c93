// Sizes that follow from a file's numbers. Sums and products stop at the largest number instead of overflowing, and a limit
// refuses that.
#pragma once

#include <cstdint>
#include <limits>

namespace unflip {

class Size {
 public:
  static constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

  constexpr Size(int64_t value = 0) : value_(value < 0 ? kMost : value) {}

  constexpr int64_t value() const { return value_; }

  friend Size operator+(Size a, Size b) {
    int64_t sum;
    return __builtin_add_overflow(a.value_, b.value_, &sum) ? Size(kMost) : Size(sum);
  }
  // Not inlined: where products of 128 bits are many instructions, it would be most of the code that computes sizes.
  friend __attribute__((noinline)) Size operator*(Size a, Size b) {
    int64_t product;
    return __builtin_mul_overflow(a.value_, b.value_, &product) ? Size(kMost) : Size(product);
  }
  friend Size operator/(Size a, int64_t b) { return a.value_ == kMost ? a : Size(a.value_ / b); }
  Size& operator+=(Size other) { return *this = *this + other; }
  friend bool operator<(Size a, Size b) { return a.value_ < b.value_; }

 private:
  int64_t value_;
};

inline Size largest(Size a, Size b) { return a < b ? b : a; }

// a / b, rounded up.
inline Size parts(int64_t a, int64_t b) { return Size((a + b - 1) / b); }

}  // namespace unflip
