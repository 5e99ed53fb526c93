// A tile of vectors that stay in registers.
#pragma once

#include "kernels.h"

#define UNFLIP_INLINE inline __attribute__((always_inline))
#define UNFLIP_LAMBDA_INLINE __attribute__((always_inline))

namespace unflip {
namespace {

// P pixels by N vectors of channels. A chain of structures instead of an array, because compilers keep arrays of vectors in
// memory.
template <class V, int P, int N, int I = P * N>
struct RegisterTile : RegisterTile<V, P, N, I - 1> {
  V v;
  // Calls f(vector, its pixel, its first channel) for each vector.
  template <class F>
  UNFLIP_INLINE void each(const F& f) {
    RegisterTile<V, P, N, I - 1>::each(f);
    f(v, (I - 1) / N, (I - 1) % N * V::kWidth);
  }
  // The bits f(vector, its first channel) of one pixel's vectors, in order.
  template <int Pixel, class F>
  UNFLIP_INLINE uint32_t bits(const F& f) const {
    const uint32_t before = RegisterTile<V, P, N, I - 1>::template bits<Pixel>(f);
    constexpr int c = (I - 1) % N * V::kWidth;
    return (I - 1) / N == Pixel ? before | static_cast<uint32_t>(f(v, c)) << c : before;
  }
};

template <class V, int P, int N>
struct RegisterTile<V, P, N, 0> {
  template <class F>
  UNFLIP_INLINE void each(const F&) {}
  template <int, class F>
  UNFLIP_INLINE uint32_t bits(const F&) const {
    return 0;
  }
};

}  // namespace
}  // namespace unflip
