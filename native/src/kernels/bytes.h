// Whole numbers 0 .. 255: conversion from floats, and the plain 8-bit convolution that defines what byte_tile computes.
#pragma once

#include "kernels.h"
#include "register_tile.h"

namespace unflip {
namespace {

// The compiler vectorizes this loop. Adding 2^23 rounds to a whole number, and clamping first gives the same result.
inline void to_bytes(const float* from, int64_t count, const float* scale, const float* shift, uint8_t* to) {
  constexpr float kWhole = 8388608.f;
  for (int64_t i = 0; i < count; i++) {
    float x = from[i] * scale[i] + shift[i];
    x = x > 0.f ? x : 0.f;  // also for NaN
    x = x < 255.f ? x : 255.f;
    to[i] = static_cast<uint8_t>(static_cast<int32_t>((x + kWhole) - kWhole));
  }
}

inline void interleave_bytes(const uint8_t* from, int64_t plane, int64_t count, int channels, uint8_t* to) {
  if (channels == 3) {
    const uint8_t *a = from, *b = from + plane, *c = from + 2 * plane;
    for (int64_t i = 0; i < count; i++) {
      to[3 * i] = a[i];
      to[3 * i + 1] = b[i];
      to[3 * i + 2] = c[i];
    }
    return;
  }
  for (int c = 0; c < channels; c++)
    for (int64_t i = 0; i < count; i++) to[channels * i + c] = from[c * plane + i];
}

inline int32_t byte_sum(const ByteTile& t, int pixel, int filter) {
  constexpr int kStep = kFloatBlock * kByteGroup;
  const int64_t block = int64_t{t.step_count + t.rest_count} * kStep;
  const int8_t* w = t.weights + filter / kFloatBlock * block + filter % kFloatBlock * kByteGroup;
  int64_t sum = -int64_t{t.minus[filter]};
  for (int s = 0; s < t.step_count; s++, w += kStep)
    for (int i = 0; i < kByteGroup; i++) sum += t.input[pixel][t.steps[s] + i] * w[i];
  for (int s = 0; s < t.rest_count; s++, w += kStep)
    for (int i = 0; i < kByteGroup; i++) sum += t.rest[s * t.rest_stride + pixel * kByteGroup + i] * w[i];
  return static_cast<int32_t>(sum);
}

inline void plain_byte_tile(const ByteTile& t) {
  for (int p = 0; p < t.pixels; p++)
    for (int f = 0; f < t.filters; f++) t.out[p][f] = static_cast<float>(byte_sum(t, p, f)) * t.scale[f];
}

}  // namespace
}  // namespace unflip
