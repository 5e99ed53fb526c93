// Float convolution of every channel by itself: one filter a channel.
//
// Neighbours in memory are channels, and so are those of the weights, [tap][channel]: a vector of one times a vector of the other.
// Of a row of the image, pixels next to each other go together, so that a vector of weights is loaded once for all of them:
//
//     tap k of pixel   first      first + 1   ...              weights of tap k
//                      c c c c    c c c c                      c c c c
//     taps[k] + ---->  <- pixel_step ->
//
// The taps may lie anywhere, those outside the image in a row of zeros: there is no border here.
#pragma once

#include "kernels.h"
#include "several.h"

namespace unflip {
namespace {

// P pixels by N vectors V of channels (see finish.h; V::fused has to round once), whose sums are in registers.
template <class V, int P, int N>
void depthwise_sums(const DepthwiseTile& t, int pixel, int channel) {
  Several<V, P, N> sums;
  sums.each([](V& v, int, int) UNFLIP_LAMBDA_INLINE { v = V::set(0); });
  const int64_t step = t.pixel_step, at = pixel * step + channel;
  const float* w = t.weights + channel;
  for (int k = 0; k < t.tap_count; k++, w += t.channels) {
    const float* in = t.taps[k] + at;
    sums.each([=](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v = V::fused(V::load(in + p * step + c), V::load(w + c), v); });
  }
  const int64_t out_step = t.channels;
  float* out = t.out + pixel * out_step + channel;
  sums.each([=](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v.store(out + p * out_step + c); });
}

// All pixels by N vectors.
template <class V, int N>
void depthwise_vectors(const DepthwiseTile& t, int channel) {
  const int64_t calls = (t.pixels + 5) / 6;
  for (int64_t i = 0; i < calls; i++) {  // shared out equally: few pixels at a time are slow
    const int first = static_cast<int>(t.pixels * i / calls), last = static_cast<int>(t.pixels * (i + 1) / calls);
    switch (last - first) {
      case 1: depthwise_sums<V, 1, N>(t, first, channel); break;
      case 2: depthwise_sums<V, 2, N>(t, first, channel); break;
      case 3: depthwise_sums<V, 3, N>(t, first, channel); break;
      case 4: depthwise_sums<V, 4, N>(t, first, channel); break;
      case 5: depthwise_sums<V, 5, N>(t, first, channel); break;
      default: depthwise_sums<V, 6, N>(t, first, channel); break;
    }
  }
}

// N vectors at a time, then single ones. One pixel has registers for four times as many, and waits for itself with fewer.
template <class V, int N>
void depthwise_tile(const DepthwiseTile& t) {
  constexpr int kWidth = V::kWidth;
  int c = 0;
  if (t.pixels == 1)
    for (; c + 4 * N * kWidth <= t.channels; c += 4 * N * kWidth) depthwise_sums<V, 1, 4 * N>(t, 0, c);
  for (; c + N * kWidth <= t.channels; c += N * kWidth) depthwise_vectors<V, N>(t, c);
  for (; c + kWidth <= t.channels; c += kWidth) depthwise_vectors<V, 1>(t, c);
  if (c < t.channels) depthwise_vectors<typename V::Eight, 1>(t, c);
}

}  // namespace
}  // namespace unflip
