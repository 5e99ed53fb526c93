// Runs the kernels of src/unflip/train/*.cu on a CPU: enough of CUDA to check their indices, without a GPU.
//
// Every thread of a block is a fiber. One runs until it has to wait for others, at a barrier or at an instruction of
// the whole warp; then the next one does, in one thread of the operating system. What the compiler for GPUs emits as an
// instruction is a function here: for mma.m16n8k16, the matrices are put together from the lanes' registers, where the
// manual of PTX says that they are.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define INLINE static inline
#define __global__
#define SHARED_MEMORY(name) uint4* name = shared_memory
#define __launch_bounds__(...)

using std::max;
using std::min;

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static struct { unsigned x; } threadIdx, blockIdx;
static uint4 shared_memory[6144];  // 96 KB

// ------------------------------------------------------------------------------------------- fibers

struct Meeting {
    int arrived = 0, number = 0;
};

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    unsigned a[4], b[2];
    float* sum;
};

static std::vector<Lane> lanes;
static std::vector<Meeting> warps;
static Meeting block;
static ucontext_t scheduler;
static std::function<void()> kernel_call;
static int progress;

static void wait_for_others(Meeting& meeting, int size, const std::function<void()>& once_all_are_here)
{
    const int number = meeting.number;
    if (++meeting.arrived == size) {
        once_all_are_here();
        meeting.arrived = 0;
        ++meeting.number;
        ++progress;
    }
    const unsigned self = threadIdx.x;
    while (meeting.number == number) swapcontext(&lanes[self].context, &scheduler);
}

static void run_lane()
{
    kernel_call();
    lanes[threadIdx.x].done = true;
    ++progress;
}

static void start_lane(Lane& lane)
{
    constexpr size_t STACK = 1 << 16;
    lane.stack.reset(new char[STACK]);
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = STACK;
    lane.context.uc_link = &scheduler;
    makecontext(&lane.context, run_lane, 0);
}

static bool run_block(int threads)
{
    lanes = std::vector<Lane>(threads);
    warps.assign(threads / 32, Meeting());
    block = Meeting();
    std::memset(shared_memory, 0xFF, sizeof shared_memory);  // NaN: what was not written must not be used
    for (Lane& lane : lanes) start_lane(lane);
    for (int before = -1; before != progress;) {
        before = progress;
        for (int i = 0; i < threads; ++i) {
            threadIdx.x = i;
            if (!lanes[i].done) swapcontext(&scheduler, &lanes[i].context);
        }
    }
    return std::all_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.done; });
}

// Whether all threads came to the end: some may wait for others forever.
static bool emulate(int blocks, int threads, const std::function<void()>& call)
{
    kernel_call = call;
    for (int i = 0; i < blocks; ++i) {
        blockIdx.x = i;
        if (!run_block(threads)) return false;
    }
    return true;
}

INLINE void __syncthreads()
{
    wait_for_others(block, static_cast<int>(lanes.size()), [] {});
}

// --------------------------------------------------------------------------------------- instructions

INLINE float number_of(unsigned half)  // the float16 in the low 16 bits
{
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                                 : exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return half & 0x8000 ? -value : value;
}

INLINE unsigned half_of(float value)  // to the nearest, ties to even
{
    const unsigned sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) return 0x7FFF;
    if (size >= 65520.0f) return sign | 0x7C00;
    int exponent = -14;
    if (size >= std::ldexp(1.0f, -14)) exponent = std::ilogb(size);
    const unsigned fraction = static_cast<unsigned>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return sign | (fraction + (exponent + 14) * 1024);  // a fraction of 1024 or more carries into the exponent
}

INLINE unsigned two_halves(float low, float high)
{
    return half_of(low) | half_of(high) << 16;
}

template <class Function>
INLINE unsigned of_each_half(unsigned a, unsigned b, Function function)
{
    return function(number_of(a & 0xFFFF), number_of(b & 0xFFFF)) | function(number_of(a >> 16), number_of(b >> 16)) << 16;
}

INLINE unsigned add_zero(unsigned halves)
{
    return of_each_half(halves, 0, [](float a, float b) { return half_of(a + b); });
}

INLINE unsigned ones_above_half(unsigned halves)
{
    return of_each_half(halves, 0, [](float a, float) { return a > 0.5f ? 0x3C00u : 0u; });
}

INLINE unsigned mask_at_most(unsigned a, unsigned b)
{
    return of_each_half(a, b, [](float a, float b) { return a <= b ? 0xFFFFu : 0u; });
}

static void multiply_warp(Lane* warp)
{
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int e = 0; e < 2; ++e) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + e] = number_of(warp[lane].a[i] >> 16 * e & 0xFFFF);
            for (int i = 0; i < 2; ++i) b[2 * t + i * 8 + e][g] = number_of(warp[lane].b[i] >> 16 * e & 0xFFFF);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (int k = 0; k < 16; ++k) warp[lane].sum[i] += a[row][k] * b[k][column];
        }
    }
}

INLINE void mma_16x8x16(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1)
{
    const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    Lane& lane = lanes[threadIdx.x];
    std::copy(a, a + 4, lane.a);
    std::copy(b, b + 2, lane.b);
    lane.sum = sum;
    const int warp = threadIdx.x / 32;
    wait_for_others(warps[warp], 32, [warp] { multiply_warp(&lanes[32 * warp]); });
}
