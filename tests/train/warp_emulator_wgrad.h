// Just enough of CUDA to run sign_conv_wgrad.cu in one thread of a CPU: g++ -include this, and call emulate().
//
// Every thread of a block is a fiber. It runs until it meets the others: those of its warp in ldmatrix and mma,
// those of its block in __syncthreads. The last to arrive computes for all.
//
// Hardware leaves some orders open, and a kernel may be right by luck in one of them. So warps run forwards or
// backwards, and a copy (cp.async) lands at once or as late as it may: when its thread waits for it. Shared memory
// is full of NaN at first. What a device would punish, or should, is an error: addresses outside, lanes that
// meet in different instructions, bank conflicts.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp refuses to go to another stack
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

struct Words {
    unsigned of[4];
};
extern "C" void sign_conv_wgrad(const unsigned short *, const unsigned short *, float *, int);

// ---------------------------------------------------------------------------------------------- fibers

namespace emulator {

constexpr int LANES = 32;
constexpr int MOST_SHARED = 227 * 1024;
constexpr int STACK = 64 * 1024;

enum Instruction { NONE, LDMATRIX, MMA, BARRIER };

struct Copy {
    unsigned to;
    const void *from;
    bool exists;
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::unique_ptr<char[]> stack;
    bool started, done;
    Instruction waits_in;  // NONE: can run
    unsigned in[6];        // operands of the instruction that it waits in, and what it gives
    float sum[4];
    unsigned address;
    std::vector<Copy> copies;  // on their way
    size_t copied;             // in all
};

struct Span {
    const char *begin;
    size_t bytes;
};

static std::vector<std::unique_ptr<Fiber>> fibers;
static int count, current;  // threads of the block; the one that runs
static jmp_buf scheduler;
static bool late_copies;
static unsigned shared_bytes;
static Span readable[2];  // global memory
static char problem[200];
static long long ldmatrix_count, mma_count, wavefronts, copy_conflicts;
static std::vector<std::vector<unsigned>> copy_banks;  // of eight threads, for each of their copies
static const unsigned short *argument_g, *argument_x;
static float *argument_partial;
static int argument_images;
static int kind;  // of the inputs: a constant on a device, but here one compilation serves all (-DKIND=emulator::kind)

inline void fail(const char *what) {
    if (problem[0]) return;
    snprintf(problem, sizeof problem, "%s (block %u,%u thread %d)", what, blockIdx.x, blockIdx.y, current);
}

inline Fiber &self() { return *fibers[current]; }

inline void enter() {
    sign_conv_wgrad(argument_g, argument_x, argument_partial, argument_images);
    if (!self().copies.empty()) fail("a copy that nobody waited for");
    self().done = true;
    _longjmp(scheduler, 1);
}

inline void pause() {
    if (!_setjmp(self().at)) _longjmp(scheduler, 1);
}

inline void run(int thread) {
    current = thread;
    threadIdx.x = thread;
    Fiber &fiber = *fibers[thread];
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

// Waits until all of [first, first + size) are in the same instruction; the last one does the work for all.
template <typename Work>
inline void together(Instruction instruction, int first, int size, Work work) {
    self().waits_in = instruction;
    for (int i = first; i < first + size; ++i) {
        if (fibers[i]->done) return fail("a thread has ended that others wait for");
        if (fibers[i]->waits_in != instruction) return pause();
    }
    work(first);
    for (int i = first; i < first + size; ++i) fibers[i]->waits_in = NONE;
}

inline float value(unsigned half) {
    const unsigned exponent = half >> 10 & 31, mantissa = half & 1023;
    const float sign = half & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
    if (exponent == 0) return sign * __builtin_ldexpf((float)mantissa, -24);
    return sign * __builtin_ldexpf((float)(mantissa + 1024), (int)exponent - 25);
}

inline float value(unsigned word, int which) { return value(word >> 16 * which & 0xFFFF); }

}  // namespace emulator

// --------------------------------------------------------------------------------------- instructions

alignas(128) static unsigned char shared_memory[emulator::MOST_SHARED];

static inline unsigned shared_address(const void *at) {
    return (unsigned)((const unsigned char *)at - shared_memory) + 1024;  // as on devices, not 0
}

namespace emulator {

inline unsigned char *shared_at(unsigned address, unsigned bytes) {
    if (address % bytes) fail("an address in shared memory is not aligned");
    if (address < 1024 || address - 1024 + bytes > shared_bytes) {
        fail("an address outside shared memory");
        return shared_memory;
    }
    return shared_memory + (address - 1024);
}

// Eight rows of 16 bytes in one go, if no two of them share banks.
inline void count_wavefronts(int first) {
    for (int matrix = 0; matrix < 4; ++matrix) {
        int most = 0, hits[8] = {};
        for (int row = 0; row < 8; ++row) {
            int &banks = hits[fibers[first + matrix * 8 + row]->address / 16 % 8];
            if (++banks > most) most = banks;
        }
        wavefronts += most;
    }
}

// Lane l receives, of every matrix, column l / 4 of rows 2 (l % 4) and the next (.trans).
inline void ldmatrix(int first) {
    ++ldmatrix_count;
    count_wavefronts(first);
    unsigned short rows[4][8][8];
    for (int i = 0; i < LANES; ++i) memcpy(rows[i / 8][i % 8], shared_at(fibers[first + i]->address, 16), 16);
    for (int i = 0; i < LANES; ++i)
        for (int matrix = 0; matrix < 4; ++matrix) {
            const int row = i % 4 * 2, column = i / 4;
            fibers[first + i]->in[matrix] = rows[matrix][row][column] | (unsigned)rows[matrix][row + 1][column] << 16;
        }
}

// m16n8k16: the fragments of the PTX manual.
inline void multiply(int first) {
    ++mma_count;
    float a[16][16], b[16][8];
    for (int i = 0; i < LANES; ++i) {
        const unsigned *in = fibers[first + i]->in;
        const int group = i / 4, pair = i % 4 * 2;
        for (int j = 0; j < 4; ++j)
            for (int k = 0; k < 2; ++k) a[group + j % 2 * 8][pair + k + j / 2 * 8] = value(in[j], k);
        for (int j = 0; j < 2; ++j)
            for (int k = 0; k < 2; ++k) b[pair + k + j * 8][group] = value(in[4 + j], k);
    }
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) {
            const int row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
            float &sum = fibers[first + i]->sum[j];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
        }
}

// Eight threads write 128 bytes in one go, if no two of them share banks.
inline void count_copy_conflicts(unsigned to) {
    std::vector<unsigned> &banks = copy_banks[current / 8];
    const size_t number = self().copied++;
    if (banks.size() <= number) banks.resize(number + 1);
    const unsigned bit = 1u << to / 16 % 8;
    if (banks[number] & bit) ++copy_conflicts;
    banks[number] |= bit;
}

inline void land(const Copy &copy) {
    unsigned char *to = shared_at(copy.to, 16);
    const char *from = (const char *)copy.from;
    if (!copy.exists) {
        memset(to, 0, 16);
        return;
    }
    for (const Span &span : readable)
        if (from >= span.begin && from + 16 <= span.begin + span.bytes) {
            if ((from - span.begin) % 16) fail("a copy from an address that is not aligned");
            memcpy(to, from, 16);
            return;
        }
    fail("a copy from outside the tensors");
}

}  // namespace emulator

static inline Words ldmatrix_x4_trans(unsigned at) {
    using namespace emulator;
    self().address = at;
    together(LDMATRIX, current / LANES * LANES, LANES, ldmatrix);
    Words words;
    memcpy(words.of, self().in, sizeof words.of);
    return words;
}

static inline void mma(float (&sum)[4], const Words &a, unsigned b0, unsigned b1) {
    using namespace emulator;
    Fiber &lane = self();
    memcpy(lane.in, a.of, sizeof a.of);
    lane.in[4] = b0;
    lane.in[5] = b1;
    memcpy(lane.sum, sum, sizeof sum);
    together(MMA, current / LANES * LANES, LANES, multiply);
    memcpy(sum, lane.sum, sizeof sum);
}

static inline void __syncthreads() {
    emulator::together(emulator::BARRIER, 0, emulator::count, [](int) {});
}

static inline void copy_async(unsigned to, const void *from, bool exists) {
    const emulator::Copy copy = {to, from, exists};
    emulator::count_copy_conflicts(to);
    emulator::self().copies.push_back(copy);
    if (!emulator::late_copies) emulator::land(copy);
}

static inline void wait_for_copies() {
    if (emulator::late_copies)
        for (const emulator::Copy &copy : emulator::self().copies) emulator::land(copy);
    emulator::self().copies.clear();
}

template <typename T>
static inline void settle(T &) {}

static inline unsigned add_zero(unsigned x) {
    if ((x & 0xFFFF) == 0x8000) x &= 0xFFFF0000;
    if (x >> 16 == 0x8000) x &= 0xFFFF;
    return x;
}

static inline unsigned above_half(unsigned x) {
    unsigned result = 0;
    for (int which = 0; which < 2; ++which) {
        const float scaled = emulator::value(x, which) * 2048 - 1024;
        if (scaled >= 1) result |= 0x3C00u << 16 * which;
        if (scaled > 0 && scaled < 1) emulator::fail("1[x > 1/2] is neither 0 nor 1");
    }
    return result;
}

// ---------------------------------------------------------------------------------------------- launch

namespace emulator {

inline void begin_block(int threads) {
    count = threads;
    copy_banks.assign(threads / 8, {});
    memset(shared_memory, 0x7F, sizeof shared_memory);  // NaN
    while ((int)fibers.size() < threads) {
        fibers.emplace_back(new Fiber());
        fibers.back()->stack.reset(new char[STACK]);
    }
    for (int i = 0; i < threads; ++i) {
        Fiber &fiber = *fibers[i];
        fiber.started = fiber.done = false;
        fiber.waits_in = NONE;
        fiber.copies.clear();
        fiber.copied = 0;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get();
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, enter, 0);
    }
}

inline void run_block(bool backwards) {
    for (bool moved = true; moved && !problem[0];) {
        moved = false;
        for (int i = 0; i < count; ++i) {
            const int warp = backwards ? count / LANES - 1 - i / LANES : i / LANES;
            const int thread = warp * LANES + i % LANES;
            if (fibers[thread]->done || fibers[thread]->waits_in != NONE) continue;
            run(thread);
            moved = true;
        }
    }
    for (int i = 0; i < count; ++i)
        if (!fibers[i]->done) fail("threads wait for each other in different instructions");
}

}  // namespace emulator

// Runs the grid. `counts` receives ldmatrix and mma instructions, the wavefronts of the former, and bank conflicts of
// copies. Returns the first problem, or an empty string.
extern "C" const char *emulate(unsigned chunks, unsigned tiles, int threads, unsigned shared, int late, int backwards,
                               int inputs, const unsigned short *g, const unsigned short *x, size_t bytes,
                               float *partial, int images, long long *counts) {
    using namespace emulator;
    kind = inputs;
    problem[0] = 0;
    ldmatrix_count = mma_count = wavefronts = copy_conflicts = 0;
    if (shared > MOST_SHARED) return "more shared memory than a block can have";
    shared_bytes = shared;
    late_copies = late;
    readable[0] = {(const char *)g, bytes};
    readable[1] = {(const char *)x, bytes};
    argument_g = g, argument_x = x, argument_partial = partial, argument_images = images;
    gridDim = {chunks, tiles, 1};
    for (unsigned block = 0; block < chunks * tiles && !problem[0]; ++block) {
        blockIdx = {block % chunks, block / chunks, 0};
        begin_block(threads);
        run_block(backwards);
    }
    counts[0] = ldmatrix_count, counts[1] = mma_count, counts[2] = wavefronts, counts[3] = copy_conflicts;
    return problem;
}
