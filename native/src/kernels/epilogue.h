// The epilogue, written once over a vector type V of 8 or 16 floats that each instruction set defines:
//
//   V::kWidth, V::Bits, V::Eight       8 or 16; as many bits; a type of 8 floats (V itself, or for a rest of 8 channels)
//   V::load(p) V::store(p) V::set(x)   a + b, a - b, a * b, a / b
//   V::from_counts(p)                  uint16 to floats
//   V::fused(a, b, c)                  a * b + c; used here only if the result is exact
//   V::above(a, b), V::at_least(a, b)  masks, false if either is NaN
//   V::choose(mask, a, b)              a where the mask is set, else b
//   V::larger(a, b)                    a > b ? a : b
//   V::bits(mask)                      Bits; lane 0 is the lowest
//   V::kTile                           how many vectors go through the steps together
//   V::kFixedSteps                     whether to compile the usual sequences of steps separately
//   V::kKeepsSteps                     whether these run pixel by pixel, with the parameters of one vector in registers
//   V::Number                          small integers: zero(), whole(a) = floor of floats >= 0;
//                                      count(n, mask), n.floats(), digit(n, p) = bit p of each, as Bits
//   V::look_up(table, first, n)        table[first[lane] + n], lane by lane
//
// V::kTile vectors go through the steps together, in registers: eight vectors of 8 floats are 32 channels of two pixels or 16
// channels of four. So parameters are loaded once for several pixels.
//
// One header of more than 400 lines, because compilers must inline all of it into one loop.
#pragma once

#include "kernels.h"
#include "register_tile.h"

namespace unflip {
namespace {

// The parameters of a call. They are copied, so that the compiler knows that no store changes them.
struct Job {
  EpilogueParams params;
  EpilogueTarget target;
};

// The position of the first vector.
struct Place {
  int64_t pixel;
  int channel;
  int64_t bits;  // byte of the code
};

// -------------------------------------------------------------------------------------------------------------------- steps

// A step and the value it reads, if any.
struct Bound {
  EpilogueStep step;
  const float* value = nullptr;

  Bound() = default;
  Bound(const EpilogueStep& s, const EpilogueTarget& target)
      : step(s), value(s.kind >= EpilogueKind::Add ? target.values[s.value] : nullptr) {}
};

template <class V>
UNFLIP_INLINE V group_factors(const float* value, const int* group) {
  if (group[0] == group[V::kWidth - 1]) return V::set(value[group[0]]);
  float factor[V::kWidth];
  for (int k = 0; k < V::kWidth; k++) factor[k] = value[group[k]];
  return V::load(factor);
}

template <class V, EpilogueKind kind, class All>
UNFLIP_INLINE void apply(All& all, const Bound& b, const Place& at) {
  const int64_t stride = b.step.value_stride;
  if constexpr (kind == EpilogueKind::Scale) {
    const float* scale = b.step.scale + at.channel;
    all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v = v * V::load(scale + c); });
  }
  if constexpr (kind == EpilogueKind::Shift) {
    const float* shift = b.step.shift + at.channel;
    all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v = v + V::load(shift + c); });
  }
  if constexpr (kind == EpilogueKind::ScaleShift) {
    const float *scale = b.step.scale + at.channel, *shift = b.step.shift + at.channel;
    all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v = v * V::load(scale + c) + V::load(shift + c); });
  }
  if constexpr (kind == EpilogueKind::Prelu) {
    const float* scale = b.step.scale + at.channel;
    const V zero = V::set(0);
    all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v = V::choose(V::at_least(v, zero), v, v * V::load(scale + c)); });
  }
  if constexpr (kind == EpilogueKind::Clamp) {
    const V low = V::set(b.step.low), high = V::set(b.step.high);
    all.each([=](V& v, int, int) UNFLIP_LAMBDA_INLINE {
      v = V::choose(V::above(low, v), low, v);
      v = V::choose(V::above(v, high), high, v);
    });
  }
  if constexpr (kind == EpilogueKind::Add) {
    const float* value = b.value + at.pixel * stride + at.channel;
    all.each([=](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v = v + V::load(value + p * stride + c); });
  }
  if constexpr (kind == EpilogueKind::MulChannels) {
    const float* value = b.value + at.channel;
    all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v = v * V::load(value + c); });
  }
  if constexpr (kind == EpilogueKind::MulGroups) {
    const float* value = b.value + at.pixel * stride;
    const int* group = b.step.group + at.channel;
    all.each([=](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v = v * group_factors<V>(value + p * stride, group + c); });
  }
}

// The parameters of a step for one vector of channels, in registers.
template <class V, EpilogueKind kind>
struct KeptStep {
  V a, b;
  const float* value = nullptr;
  int64_t stride = 0;

  KeptStep(const Bound& bound, int channel) : a(V::set(0)), b(V::set(0)) {
    const EpilogueStep& step = bound.step;
    if constexpr (kind == EpilogueKind::ScaleShift || kind == EpilogueKind::Prelu) a = V::load(step.scale + channel);
    if constexpr (kind == EpilogueKind::ScaleShift || kind == EpilogueKind::Shift) b = V::load(step.shift + channel);
    if constexpr (kind == EpilogueKind::Add) value = bound.value + channel, stride = step.value_stride;
  }
  UNFLIP_INLINE V run(V v, int64_t pixel) const {
    static_assert(kind == EpilogueKind::ScaleShift || kind == EpilogueKind::Shift || kind == EpilogueKind::Prelu ||
                  kind == EpilogueKind::Add);
    if constexpr (kind == EpilogueKind::ScaleShift) return v * a + b;
    if constexpr (kind == EpilogueKind::Shift) return v + b;
    if constexpr (kind == EpilogueKind::Prelu) return V::choose(V::at_least(v, V::set(0)), v, v * a);
    return v + V::load(value + pixel * stride);
  }
};

template <class V, EpilogueKind... kinds>
struct KeptSteps {
  KeptSteps(const Bound*, int) {}
  UNFLIP_INLINE V run(V v, int64_t) const { return v; }
};

template <class V, EpilogueKind kind, EpilogueKind... kinds>
struct KeptSteps<V, kind, kinds...> {
  KeptStep<V, kind> first;
  KeptSteps<V, kinds...> rest;
  KeptSteps(const Bound* bound, int channel) : first(*bound, channel), rest(bound + 1, channel) {}
  UNFLIP_INLINE V run(V v, int64_t pixel) const { return rest.run(first.run(v, pixel), pixel); }
};

// Steps that are known at compile time.
template <EpilogueKind... kinds>
struct FixedSteps {
  static constexpr bool kFixed = true;
  Bound bound[sizeof...(kinds) + 1];

  explicit FixedSteps(const Job& job) {
    for (unsigned i = 0; i < sizeof...(kinds); i++) bound[i] = Bound(job.params.steps[i], job.target);
  }
  static bool are(const EpilogueParams& f) {
    if (f.step_count != static_cast<int>(sizeof...(kinds))) return false;
    const EpilogueKind wanted[] = {kinds..., EpilogueKind::Scale};
    for (int i = 0; i < f.step_count; i++)
      if (f.steps[i].kind != wanted[i]) return false;
    return true;
  }
  template <class V, class All>
  UNFLIP_INLINE void run(All& all, const Place& at) const {
    const Bound* b = bound;
    (apply<V, kinds>(all, *b++, at), ...);
    (void)b;
  }
  template <class V>
  KeptSteps<V, kinds...> keep(int channel) const {
    return KeptSteps<V, kinds...>(bound, channel);
  }
};

// Any steps, dispatched at run time.
struct AnySteps {
  static constexpr bool kFixed = false;
  const Job& job;

  explicit AnySteps(const Job& t) : job(t) {}

  template <class V, class All>
  UNFLIP_INLINE void run(All& all, const Place& at) const {
    for (int i = 0; i < job.params.step_count; i++) {
      const Bound b(job.params.steps[i], job.target);
      switch (b.step.kind) {
        case EpilogueKind::Scale: apply<V, EpilogueKind::Scale>(all, b, at); break;
        case EpilogueKind::Shift: apply<V, EpilogueKind::Shift>(all, b, at); break;
        case EpilogueKind::ScaleShift: apply<V, EpilogueKind::ScaleShift>(all, b, at); break;
        case EpilogueKind::Prelu: apply<V, EpilogueKind::Prelu>(all, b, at); break;
        case EpilogueKind::Clamp: apply<V, EpilogueKind::Clamp>(all, b, at); break;
        case EpilogueKind::Add: apply<V, EpilogueKind::Add>(all, b, at); break;
        case EpilogueKind::MulChannels: apply<V, EpilogueKind::MulChannels>(all, b, at); break;
        case EpilogueKind::MulGroups: apply<V, EpilogueKind::MulGroups>(all, b, at); break;
      }
    }
  }
};

// ------------------------------------------------------------------------------------------------------------------ quantize

template <class Bits>
UNFLIP_INLINE void store_bits(uint8_t* to, Bits bits) {
  __builtin_memcpy(to, &bits, sizeof bits);  // all our CPUs are little-endian
}

// The number of thresholds that each channel of a vector reaches.
template <class V>
struct Level {
  static constexpr int kWidth = V::kWidth;
  typename V::Number n;
};

// P pixels by N vectors of floats, and the bits they become. They are passed in memory, so that the case of one threshold can
// keep its vectors in registers.
template <class V, int P, int N>
struct Quantization {
  const EpilogueParams f;
  const V unit;
  const float* x;
  uint8_t* bits;
  int channel;

  Quantization(const float* x_, const Job& job, const Place& at)
      : f(job.params), unit(V::set(f.unit < 0 ? 1.f : job.target.values[f.unit][0])), x(x_), bits(job.target.bits + at.bits),
        channel(at.channel) {}

  UNFLIP_INLINE V vector(int p, int c) const { return V::load(x + p * N * V::kWidth + c); }

  UNFLIP_INLINE void store(int plane, int p, int c, typename V::Bits of_vector) const {
    store_bits(bits + plane * f.code.plane_bytes + p * f.code.pixel_bytes + c / 8, of_vector);
  }

  // Calls reach(item, pixel, channel, mask of those that reach threshold s) for all items.
  template <class All, class Reach>
  UNFLIP_INLINE void compare(All& all, int s, const Reach& reach) const {
    const float* t = f.threshold + int64_t{s} * f.stride + channel;
    if (f.strict[s])
      all.each([&](auto& item, int p, int c)
                   UNFLIP_LAMBDA_INLINE { reach(item, p, c, V::above(vector(p, c), V::load(t + c) * unit)); });
    else
      all.each([&](auto& item, int p, int c)
                   UNFLIP_LAMBDA_INLINE { reach(item, p, c, V::at_least(vector(p, c), V::load(t + c) * unit)); });
  }

  void planes() const {
    RegisterTile<Level<V>, P, N> all;
    for (int s = 0; s < f.thresholds; s++)
      compare(all, s, [&](auto&, int p, int c, auto mask) UNFLIP_LAMBDA_INLINE { store(s, p, c, V::bits(mask)); });
  }

  void levels() const {
    RegisterTile<Level<V>, P, N> all;
    if (f.even.scale) {
      all.each([&](Level<V>& level, int p, int c) UNFLIP_LAMBDA_INLINE { level.n = even_level(vector(p, c), channel + c); });
    } else {
      all.each([](Level<V>& level, int, int) UNFLIP_LAMBDA_INLINE { level.n = V::Number::zero(); });
      for (int s = 0; s < f.thresholds; s++)
        compare(all, s,
                [](Level<V>& level, int, int, auto mask) UNFLIP_LAMBDA_INLINE { level.n = V::Number::count(level.n, mask); });
    }
    for (int d = 0; d < f.code.planes; d++)
      all.each([&](Level<V>& level, int p, int c) UNFLIP_LAMBDA_INLINE { store(d, p, c, V::Number::digit(level.n, d)); });
  }

  // See EvenSteps: compares with a threshold only if a channel is within rounding error of it.
  UNFLIP_INLINE typename V::Number even_level(V v, int c) const {
    const V most = V::set(f.even.most);
    V at = v * V::load(f.even.scale + c) + V::load(f.even.shift + c);
    at = V::larger(at, V::set(0));  // 0 also for NaN, which reaches no threshold
    at = V::choose(V::above(at, most), most, at);
    const typename V::Number n = V::Number::whole(at);
    const V rest = at - n.floats();
    const typename V::Mask after = V::above(rest, V::set(f.even.high));
    const typename V::Mask before = V::above(V::set(f.even.low), rest);
    if (static_cast<typename V::Bits>(~(V::bits(after) | V::bits(before))) == 0) return V::Number::count(n, after);
    const V t = V::look_up(f.even.threshold, f.even.first + c, n);
    return V::Number::count(n, f.strict[0] ? V::above(v, t) : V::at_least(v, t));
  }
};

template <class V, int P, int N>
__attribute__((noinline)) void quantize_any(const float* x, const Job& job, const Place& at) {
  const Quantization<V, P, N> q(x, job, at);
  if (q.f.levels)
    q.levels();
  else
    q.planes();
}

// One threshold and >=: pixels Pixel .. P - 1, one store per pixel.
template <class V, int Pixel, int P, int N>
UNFLIP_INLINE void quantize_one(const RegisterTile<V, P, N>& all, const float* threshold, uint8_t* bits, int64_t pixel_bytes) {
  const uint32_t word = all.template bits<Pixel>(
      [=](const V& v, int c) UNFLIP_LAMBDA_INLINE { return V::bits(V::at_least(v, V::load(threshold + c))); });
  __builtin_memcpy(bits, &word, N * V::kWidth / 8);
  if constexpr (Pixel + 1 < P) quantize_one<V, Pixel + 1>(all, threshold, bits + pixel_bytes, pixel_bytes);
}

template <class V, int P, int N>
UNFLIP_INLINE void quantize(RegisterTile<V, P, N>& all, const Job& job, const Place& at) {
  if (job.params.one_at_least) {  // by far the most common case
    quantize_one<V, 0>(all, job.params.threshold + at.channel, job.target.bits + at.bits, job.params.code.pixel_bytes);
    return;
  }
  float x[P * N * V::kWidth];
  all.each([&](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v.store(x + p * N * V::kWidth + c); });
  quantize_any<V, P, N>(x, job, at);
}

// --------------------------------------------------------------------------------------------------------------- whole pixels

// The source of the vectors: channel c of pixel p, counted from the first of a call.
struct FloatSource {
  const float* data;
  int64_t stride;
  template <class V>
  UNFLIP_INLINE V get(int64_t p, int c) const {
    return V::load(data + p * stride + c);
  }
  template <class V>
  struct Kept {
    const float* data;
    int64_t stride;
    UNFLIP_INLINE V get(int64_t p) const { return V::load(data + p * stride); }
  };
  template <class V>
  Kept<V> keep(int64_t channel) const {
    return {data + channel, stride};
  }
};

struct CountSource {
  const Counts counts;
  int first;
  template <class V>
  UNFLIP_INLINE V get(int64_t p, int c) const {
    const float* base = counts.bases + counts.class_of[first + p] * counts.base_stride;
    const V count = V::from_counts(counts.count + p * counts.count_stride + c);
    return V::load(counts.scale + c) * V::fused(V::set(-counts.multiple), count, V::load(base + c));
  }
  template <class V>
  struct Kept {
    const uint16_t *count, *class_of;
    int64_t stride;
    const float* bases;
    int64_t base_stride;
    V multiple, scale;
    UNFLIP_INLINE V get(int64_t p) const {
      return scale * V::fused(multiple, V::from_counts(count + p * stride), V::load(bases + class_of[p] * base_stride));
    }
  };
  template <class V>
  Kept<V> keep(int64_t channel) const {
    return {counts.count + channel,         counts.class_of + first, counts.count_stride,
            counts.bases + channel,         counts.base_stride,      V::set(-counts.multiple),
            V::load(counts.scale + channel)};
  }
};

// Consecutive pixels of one row of the image.
struct Run {
  int64_t source;  // the number of the first pixel in the source
  int64_t pixel;   // and in the image
  int count;
  int64_t bits;  // byte of the first pixel at the first channel of the source
  int channel;   // channel of the value for the first channel of the source
};

template <class V, int P, int N, class Steps, class Source>
UNFLIP_INLINE void epilogue_vectors(const Job& job, const Steps& steps, const Source& source, int64_t pixel, int channel,
                                    const Place& at) {
  RegisterTile<V, P, N> all;
  all.each([&](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v = source.template get<V>(pixel + p, channel + c); });
  steps.template run<V>(all, at);
  if (job.target.out) {
    const int64_t stride = job.params.stride;
    float* out = job.target.out + at.pixel * stride + at.channel;
    all.each([=](V& v, int p, int c) UNFLIP_LAMBDA_INLINE { v.store(out + p * stride + c); });
  }
  if (job.params.thresholds) quantize<V>(all, job, at);
}

// N vectors of channels from the source's `channel` on, of all pixels, P pixels at a time.
template <class V, int P, int N, class Steps, class Source>
UNFLIP_INLINE void epilogue_channels(const Job& job, const Steps& steps, const Source& source, const Run& r, int channel) {
  Place at{r.pixel, r.channel + channel, r.bits + channel / 8};
  int i = 0;
  for (; i + P <= r.count; i += P) {
    epilogue_vectors<V, P, N>(job, steps, source, r.source + i, channel, at);
    at.pixel += P;
    at.bits += P * job.params.code.pixel_bytes;
  }
  if (P == 1) return;
  for (; i < r.count; i++) {
    epilogue_vectors<V, 1, N>(job, steps, source, r.source + i, channel, at);
    at.pixel++;
    at.bits += job.params.code.pixel_bytes;
  }
}

// One vector of channels, pixel by pixel. No bits, or those of a single threshold.
template <class V, bool kFloats, bool kBits, class Steps, class Source>
UNFLIP_INLINE void epilogue_pixels(const Job& job, const Steps& steps, const Source& source, const Run& r, int channel) {
  const EpilogueParams& f = job.params;
  const int at = r.channel + channel;
  const auto kept = steps.template keep<V>(at);
  const auto from = source.template keep<V>(channel);
  const V threshold = kBits ? V::load(f.threshold + at) : V::set(0);
  float* out = kFloats ? job.target.out + r.pixel * f.stride + at : nullptr;
  uint8_t* bits = kBits ? job.target.bits + r.bits + channel / 8 : nullptr;
  const int64_t stride = f.stride, pixel_bytes = f.code.pixel_bytes;
  for (int i = 0; i < r.count; i++) {
    const V v = kept.run(from.get(r.source + i), r.pixel + i);
    if (kFloats) v.store(out + i * stride);
    if (kBits) store_bits(bits + i * pixel_bytes, V::bits(V::at_least(v, threshold)));
  }
}

template <class V, class Steps, class Source>
UNFLIP_INLINE void epilogue_column(const Job& job, const Steps& steps, const Source& source, const Run& r, int channel) {
  const bool bits = job.params.thresholds > 0;
  if (!bits)
    epilogue_pixels<V, true, false>(job, steps, source, r, channel);
  else if (job.target.out)
    epilogue_pixels<V, true, true>(job, steps, source, r, channel);
  else
    epilogue_pixels<V, false, true>(job, steps, source, r, channel);
}

// All channels of a run, one vector after another. A few pixels at a time, so that the first vector does not drive cache lines away
// that the next ones need: with many channels, pixels are far apart. Returns false if this is not supported.
template <class V, class Steps, class Source>
UNFLIP_INLINE bool epilogue_columns(const Job& job, const Steps& steps, const Source& source, const Run& all, int channels) {
  if constexpr (V::kKeepsSteps && Steps::kFixed) {
    const EpilogueParams& f = job.params;
    if (f.thresholds > 0 ? !f.one_at_least : !job.target.out) return false;
    constexpr int kPixels = 8;
    for (int i = 0; i < all.count; i += kPixels) {
      const int count = all.count - i < kPixels ? all.count - i : kPixels;
      const Run r{all.source + i, all.pixel + i, count, all.bits + int64_t{i} * f.code.pixel_bytes, all.channel};
      int c = 0;
      for (; c + V::kWidth <= channels; c += V::kWidth) epilogue_column<V>(job, steps, source, r, c);
      if (c < channels) epilogue_column<typename V::Eight>(job, steps, source, r, c);
    }
    return true;
  }
  return false;
}

template <class V, class Steps, class Source>
void epilogue_rows(const Job& job_, const Steps& steps_, const Source& source_, int first, int last, int channel, int channels) {
  const Job job = job_;  // local copies, for the same reason as in Job
  const Steps steps = steps_;
  const Source source = source_;
  const EpilogueParams& f = job.params;
  int count;
  for (int pixel = first; pixel < last; pixel += count) {
    const int y = pixel / f.width, x = pixel - y * f.width;
    count = f.width - x < last - pixel ? f.width - x : last - pixel;
    const int64_t bits = f.code.at(y, x) + channel / 8;
    const Run r{pixel - first, pixel, count, bits, channel};
    if (epilogue_columns<V>(job, steps, source, r, channels)) continue;
    int c = 0;
    constexpr int W = V::kWidth;
    for (; c + 32 <= channels; c += 32) epilogue_channels<V, V::kTile * W / 32, 32 / W>(job, steps, source, r, c);
    if (channels & 16) epilogue_channels<V, V::kTile * W / 16, 16 / W>(job, steps, source, r, c), c += 16;
    if (channels & 8) epilogue_channels<typename V::Eight, V::kTile, 1>(job, steps, source, r, c);
  }
}

// Calls use(steps). The usual sequences of steps in binary networks are compiled as a whole, others run step by step.
template <class V, class Use>
UNFLIP_INLINE void with_steps(const Job& job, const Use& use) {
  constexpr EpilogueKind Shift = EpilogueKind::Shift, Both = EpilogueKind::ScaleShift, Add = EpilogueKind::Add,
                         Prelu = EpilogueKind::Prelu;
  if constexpr (V::kFixedSteps) {
    const EpilogueParams& f = job.params;
    if (FixedSteps<>::are(f)) return use(FixedSteps<>(job));
    if (FixedSteps<Both>::are(f)) return use(FixedSteps<Both>(job));
    if (FixedSteps<Shift>::are(f)) return use(FixedSteps<Shift>(job));
    if (FixedSteps<Shift, Add>::are(f)) return use(FixedSteps<Shift, Add>(job));
    if (FixedSteps<Shift, Add, Prelu>::are(f)) return use(FixedSteps<Shift, Add, Prelu>(job));
    if (FixedSteps<Prelu, Both, Add>::are(f)) return use(FixedSteps<Prelu, Both, Add>(job));
  }
  use(AnySteps(job));
}

template <class V, class Source>
UNFLIP_INLINE void epilogue_all(const EpilogueParams& f, const EpilogueTarget& target, const Source& source, int first, int last,
                                int channel, int channels) {
  const Job job{f, target};
  with_steps<V>(job, [&](const auto& steps) { epilogue_rows<V>(job, steps, source, first, last, channel, channels); });
}

template <class V>
void epilogue(const EpilogueParams& f, const EpilogueTarget& target, const float* source, int64_t source_stride, int first,
              int last, int channel, int channels) {
  epilogue_all<V>(f, target, FloatSource{source, source_stride}, first, last, channel, channels);
}

template <class V>
void epilogue_counts(const EpilogueParams& f, const EpilogueTarget& target, const Counts& counts, int first, int last,
                     int channel, int channels) {
  epilogue_all<V>(f, target, CountSource{counts, first}, first, last, channel, channels);
}

// ------------------------------------------------------------------------------------------------------------ sums of counts

template <class V>
UNFLIP_INLINE V term_number(const CountTerm& term, const CountSums& s, int pixel, int channel) {
  if (term.window) return V::set(term.window[pixel]);
  V number = V::load(term.bases + s.class_of[pixel] * term.base_stride + channel);
  const uint16_t* count = term.count + pixel * s.pixel_stride + channel;
  for (int p = 0; p < term.planes; p++, count += s.plane_stride)
    number = V::fused(V::set(-term.multiple[p]), V::from_counts(count), number);
  return number;
}

template <class V>
UNFLIP_INLINE void sum_channels(const CountSums& s, int channel) {
  for (int pixel = 0; pixel < s.pixels; pixel++) {
    V sum = V::load(s.terms[0].scale + channel) * term_number<V>(s.terms[0], s, pixel, channel);
    for (int t = 1; t < s.term_count; t++)
      sum = sum + V::load(s.terms[t].scale + channel) * term_number<V>(s.terms[t], s, pixel, channel);
    sum.store(s.sums + int64_t{pixel} * s.channels + channel);
  }
}

template <class V>
void sum_counts(const CountSums& s) {
  int c = 0;
  for (; c + V::kWidth <= s.channels; c += V::kWidth) sum_channels<V>(s, c);
  if (c < s.channels) sum_channels<typename V::Eight>(s, c);
}

// ------------------------------------------------------------------------------------------------------------------- pooling

template <class V, int N>
UNFLIP_INLINE void pool_window(const PoolTile& t, const float* window, float* out) {
  RegisterTile<V, 1, N> all;
  const V start = V::set(t.max ? -__builtin_inff() : 0.f), divisor = V::set(t.divisor);
  if (t.begins)
    all.each([=](V& v, int, int) UNFLIP_LAMBDA_INLINE { v = start; });
  else
    all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v = V::load(out + c); });
  for (int r = 0; r < t.rows; r++)
    for (int k = 0; k < t.columns; k++) {
      const float* p = window + r * t.row_stride + k * t.column_stride;
      if (t.max)
        all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v = V::larger(V::load(p + c), v); });
      else
        all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v = v + V::load(p + c); });
    }
  if (!t.max && t.ends) all.each([=](V& v, int, int) UNFLIP_LAMBDA_INLINE { v = v / divisor; });
  all.each([=](V& v, int, int c) UNFLIP_LAMBDA_INLINE { v.store(out + c); });
}

template <class V, int N>
UNFLIP_INLINE void pool_windows(const PoolTile& t, int channel) {
  const float* window = t.input + channel;
  float* out = t.out + channel;
  for (int i = 0; i < t.windows; i++, window += t.window_stride, out += t.channels) pool_window<V, N>(t, window, out);
}

template <class V>
void pool(const PoolTile& tile) {
  const PoolTile t = tile;  // a local copy, for the same reason as in Job
  int c = 0;
  for (; c + 64 <= t.channels; c += 64) pool_windows<V, 64 / V::kWidth>(t, c);
  for (; c < t.channels; c += kLanes) pool_windows<typename V::Eight, 1>(t, c);
}

}  // namespace
}  // namespace unflip
