// A vector whose elements begin at a cache line: loads of whole vectors that cross two lines take twice as long.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace unflip {

template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}

  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* data, size_t) { ::operator delete(data, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};

template <class T>
using AlignedVector = std::vector<T, LineAllocator<T>>;

}  // namespace unflip
