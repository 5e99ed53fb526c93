// A task is one step of a run: an op with everything fused into it and its weights packed.
#pragma once

#include <cstdint>

#include "../graph.h"
#include "../kernels/kernels.h"
#include "../thread_pool.h"

namespace unflip {

// The memory layout of a value. Floats: row by row, pixel by pixel, `stride` floats per pixel. Codes: see CodeLayout. Whole
// numbers: one plane of a byte per channel, with a border of the numbers that stand for 0.
struct ValueInfo {
  Shape shape;
  int stride = 0;
  bool code = false;  // or whole numbers
  CodeLayout layout;
};

// The resources of a task while it runs. It has cache lines of its own, because all threads read it and one of them writes next to it.
struct alignas(64) RunContext {
  const Kernels* kernels = nullptr;
  ThreadPool* pool = nullptr;
  float* const* values = nullptr;   // by number
  uint8_t* const* codes = nullptr;  // by number
  const uint8_t* pixels = nullptr;  // the input if it is given as C x H x W pixels instead of floats
  uint8_t* scratch = nullptr;
  uint8_t* const* thread_scratch = nullptr;  // by number of the thread

  uint8_t* scratch_of(int thread) const { return thread_scratch[thread]; }
};

class Task {
 public:
  virtual ~Task() = default;
  virtual void run(const RunContext&) const = 0;
  int64_t scratch_bytes = 0;         // shared by the threads, undefined contents at the start of run()
  int64_t thread_scratch_bytes = 0;  // for each thread
};

// Work in cache lines of its own, as RunContext.
template <class Work>
struct alignas(64) SharedWork {
  const Work work;
  static void call(void* shared, int job, int thread) { static_cast<const SharedWork*>(shared)->work(job, thread); }
};

// Calls work(job, thread) for job = 0 .. jobs - 1, on all threads.
template <class Work>
void parallel(const RunContext& context, int jobs, const Work& work) {
  if (!context.pool || jobs <= 1) {
    for (int job = 0; job < jobs; job++) work(job, 0);
    return;
  }
  SharedWork<Work> shared{work};
  context.pool->run(jobs, SharedWork<Work>::call, &shared);
}

// Divides `items` into jobs of equal size, a multiple of `grain` (except the last).
struct Cut {
  int items = 0, size = 1, jobs = 0;

  Cut() = default;
  Cut(int items_, int wanted_jobs, int grain) : items(items_) {
    int grains = (items + grain - 1) / grain;
    if (wanted_jobs > grains) wanted_jobs = grains;
    if (wanted_jobs < 1) wanted_jobs = 1;
    size = (grains + wanted_jobs - 1) / wanted_jobs * grain;
    if (size < 1) size = 1;
    jobs = (items + size - 1) / size;
  }
  int first(int job) const { return job * size; }
  int last(int job) const { return items - job * size < size ? items : (job + 1) * size; }
};

// Tasks are divided into at least `jobs` parts, if they can be: enough to keep threads equally busy, few enough for little
// overhead. 1: the task is for one thread.
constexpr int kJobsPerThread = 6;

// Threads work on separate images if an arena is no larger than a core's cache, or all arenas than the cache that cores share. Larger
// ones compete for memory bandwidth, so all threads work on one image.
constexpr int64_t kCoreCache = int64_t{1} << 20, kSharedCache = int64_t{32} << 20;

inline bool separate_images(int64_t arena_bytes, int threads) {
  return arena_bytes <= kCoreCache || arena_bytes <= kSharedCache / threads;
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace unflip
