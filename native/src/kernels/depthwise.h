// Depthwise float convolution: one filter per channel.
//
// Channels are adjacent in memory, in the input and in the weights ([tap][channel]), so vectors of both are multiplied. Several
// pixels are processed together, so that a vector of weights is loaded once for all of them. In the middle of a row of the image
// the pixels are adjacent, and their taps are one step apart:
//
//     taps[k]               + pixel_step          + 2 pixel_step              weights of tap k
//        c c c c ... c         c c c c ... c         c c c c ... c               c c c c ... c
//
// Near the ends of a row, where some taps are outside the image, every tap of every pixel has its own address. Taps outside the
// image point to a row of zeros, and so do whole rows of taps above or below the image. No border is written.
#pragma once

#include "kernels.h"
#include "register_tile.h"

namespace unflip {
namespace {

// The addresses of the taps and results of adjacent pixels.
struct DepthwiseRow {
  const DepthwiseTile& t;
  int64_t first;  // pixel

  struct Tap {
    const float* in;
    int64_t step;
    UNFLIP_INLINE const float* of(int p) const { return in + p * step; }
  };
  struct Out {
    float* out;
    int64_t step;
    UNFLIP_INLINE float* of(int p) const { return out + p * step; }
  };

  UNFLIP_INLINE Tap tap(int k, int channel) const { return {t.taps[k] + (first * t.pixel_step + channel), t.pixel_step}; }
  UNFLIP_INLINE Out out(int channel) const { return {t.out + (first * t.channels + channel), t.channels}; }
};

// The same for separate pixels.
struct DepthwiseApart {
  const DepthwiseTile& t;

  struct Tap {
    const float* const* in;
    int channel;
    UNFLIP_INLINE const float* of(int p) const { return in[p] + channel; }
  };
  struct Out {
    float* out;
    const int* columns;
    int64_t step;
    UNFLIP_INLINE float* of(int p) const { return out + columns[p] * step; }
  };

  UNFLIP_INLINE Tap tap(int k, int channel) const { return {t.taps + k * t.pixels, channel}; }
  UNFLIP_INLINE Out out(int channel) const { return {t.out + channel, t.columns, t.channels}; }
};

// P pixels by N vectors V of channels (see epilogue.h; V::fused must round once). The sums stay in registers.
template <class V, int P, int N, class Pixels>
UNFLIP_INLINE void depthwise_sums(const DepthwiseTile& t, const Pixels& pixels, int channel) {
  RegisterTile<V, P, N> sums;
  sums.each([](V& v, int, int) UNFLIP_LAMBDA_INLINE { v = V::set(0); });
  const float* w = t.weights + channel;
  const int count = t.tap_count, step = t.channels;
  for (int k = 0; k < count; k++, w += step) {
    const auto tap = pixels.tap(k, channel);
    sums.each([=](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v = V::fused(V::load(tap.of(p) + c), V::load(w + c), v); });
  }
  const auto out = pixels.out(channel);
  sums.each([=](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v.store(out.of(p) + c); });
}

template <class V, int N, class Pixels>
UNFLIP_INLINE void depthwise_pixels(const DepthwiseTile& t, const Pixels pixels, int count, int channel) {
  switch (count) {
    case 1: return depthwise_sums<V, 1, N>(t, pixels, channel);
    case 2: return depthwise_sums<V, 2, N>(t, pixels, channel);
    case 3: return depthwise_sums<V, 3, N>(t, pixels, channel);
    case 4: return depthwise_sums<V, 4, N>(t, pixels, channel);
    case 5: return depthwise_sums<V, 5, N>(t, pixels, channel);
    default: return depthwise_sums<V, kDepthwisePixels, N>(t, pixels, channel);
  }
}

// All pixels by N vectors.
template <class V, int N>
void depthwise_vectors(const DepthwiseTile& t, int channel) {
  if (t.columns) return depthwise_pixels<V, N>(t, DepthwiseApart{t}, t.pixels, channel);
  const int64_t calls = (t.pixels + kDepthwisePixels - 1) / kDepthwisePixels;
  for (int64_t i = 0; i < calls; i++) {  // in equal parts, because calls with few pixels are slow
    const int64_t first = t.pixels * i / calls, last = t.pixels * (i + 1) / calls;
    depthwise_pixels<V, N>(t, DepthwiseRow{t, first}, static_cast<int>(last - first), channel);
  }
}

// N vectors at a time, then single ones.
template <class V, int N>
void depthwise_tile(const DepthwiseTile& t) {
  constexpr int kWidth = V::kWidth;
  int c = 0;
  for (; c + N * kWidth <= t.channels; c += N * kWidth) depthwise_vectors<V, N>(t, c);
  for (; c + kWidth <= t.channels; c += kWidth) depthwise_vectors<V, 1>(t, c);
  if (c < t.channels) depthwise_vectors<typename V::Eight, 1>(t, c);
}

}  // namespace
}  // namespace unflip
