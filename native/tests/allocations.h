// Counts the memory that operator new has handed out, for one program. Only on Linux, whose malloc says how large a block is.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <malloc.h>

namespace allocations {

inline std::atomic<int64_t> now{0}, most{0};

// The most memory that `action` held at the same time, beyond what was held before.
template <class Action>
int64_t peak_of(Action action) {
  const int64_t before = now;
  most = before;
  action();
  return most - before;
}

}  // namespace allocations

inline void* counted(void* block) {
  if (!block) throw std::bad_alloc();
  const int64_t held = allocations::now += static_cast<int64_t>(malloc_usable_size(block));
  for (int64_t most = allocations::most; held > most && !allocations::most.compare_exchange_weak(most, held);) {
  }
  return block;
}

void* operator new(std::size_t size) { return counted(std::malloc(size ? size : 1)); }

void* operator new(std::size_t size, std::align_val_t alignment) {
  const std::size_t unit = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(unit, (size + unit - 1) / unit * unit));
}

void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void operator delete(void* block) noexcept {
  if (block) allocations::now -= static_cast<int64_t>(malloc_usable_size(block));
  std::free(block);
}

void operator delete(void* block, std::size_t) noexcept { operator delete(block); }
void operator delete(void* block, std::align_val_t) noexcept { operator delete(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { operator delete(block); }

#else

namespace allocations {
template <class Action>
int64_t peak_of(Action action) {
  action();
  return 0;
}
}  // namespace allocations

#endif
