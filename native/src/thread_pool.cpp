#include "thread_pool.h"

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace unflip {
namespace {

using Clock = std::chrono::steady_clock;

// A layer takes 50 to 200 us, and waking a sleeping thread takes nearly as long. So threads stay awake between layers.
constexpr auto kSpin = std::chrono::microseconds(200);
constexpr int kPausesPerLook = 32;  // reading the clock costs as much as several pauses

// The overhead is measured after some questions, twice as many each time: the first measurements may be wrong, because the threads
// are yet to wake up. It is measured least often if they did not wake up in time: other programs need the cores. The first trial
// wakes the threads, which may take much longer than a trial.
constexpr auto kTrial = std::chrono::microseconds(2), kMostWaking = std::chrono::microseconds(300);
constexpr int kTrials = 4;
constexpr int kFirstQuestions = 8, kMostQuestions = 256, kMostAsleep = 2048;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads do not survive a fork: in the child, the parent's pool has no threads, and its condition variable would wait forever.
// This counts the forks between the first process and this one.
std::atomic<unsigned> forks{0};

unsigned watch_forks() {
#if !defined(_WIN32)  // which has no fork
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
#endif
  return forks.load(std::memory_order_relaxed);
}

}  // namespace

// Each thread has its own share of the jobs: neighbouring ones, the same in every run of as many jobs. So a thread finds in its cache
// what it wrote in the layer before. Cores that are far apart need 100 ns or more to pass a cache line, so all that a thread waits for
// is in one line, and it counts in another one. A thread without jobs takes the last ones of others.
struct alignas(128) Share {        // two lines, because CPUs fetch them in pairs
  std::atomic<uint64_t> range{0};  // the first job that is left, and the end in the upper half
  void (*work)(void*, int, int) = nullptr;
  void* context = nullptr;
  alignas(64) std::atomic<uint64_t> done{0};  // jobs of all runs; only the thread itself writes it

  bool empty(std::memory_order order) const {
    const uint64_t now = range.load(order);
    return static_cast<uint32_t>(now) >= now >> 32;
  }

  // The first job, or the last one; -1 if none is left. Only a thread that has taken a job may read work and context. These change
  // only when every job that was taken is done, so there is no race.
  int take(bool last) {
    uint64_t now = range.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t first = static_cast<uint32_t>(now), end = now >> 32;
      if (first >= end) return -1;
      const uint64_t next = last ? (end - 1) << 32 | first : end << 32 | (first + 1);
      if (range.compare_exchange_weak(now, next, std::memory_order_acquire, std::memory_order_relaxed))
        return static_cast<int>(last ? end - 1 : first);
    }
  }
};

struct ThreadPool::State {
  explicit State(int count) : threads(count), shares(static_cast<size_t>(count)) {}

  const int threads;
  bool may_spin = true;
  unsigned born = watch_forks();
  std::vector<std::thread> workers;

  std::vector<Share> shares;  // one for each thread
  uint64_t all_done = 0;      // jobs of all runs, this one included
  std::atomic<bool> busy{false};

  std::atomic<int> questions{0};                   // before the next measurement
  std::atomic<int> interval{kFirstQuestions / 2};  // questions between the last two
  std::atomic<int> overhead{0};

  alignas(64) std::atomic<int> asleep{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake;

  bool from_the_parent() const { return forks.load(std::memory_order_relaxed) != born; }

  void share_out(int jobs, void (*work)(void*, int, int), void* context) {
    for (int t = 0; t < threads; ++t) {
      const auto first = static_cast<uint64_t>(jobs) * t / threads, end = static_cast<uint64_t>(jobs) * (t + 1) / threads;
      shares[t].work = work, shares[t].context = context;
      shares[t].range.store(end << 32 | first, std::memory_order_release);
    }
  }

  bool do_one(int thread, int owner) {
    Share& share = shares[owner];
    const int job = share.take(owner != thread);
    if (job < 0) return false;
    share.work(share.context, job, thread);
    std::atomic<uint64_t>& done = shares[thread].done;
    done.store(done.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    return true;
  }

  void do_all(int thread) {
    for (int other = 0; other < threads; ++other)
      while (do_one(thread, (thread + other) % threads)) {
      }
  }

  bool something(int thread, std::memory_order order) const { return !shares[thread].empty(order) || stop.load(order); }

  void worker(int thread) {
    while (!stop.load(std::memory_order_relaxed)) {
      do_all(thread);
      if (!spin(thread)) sleep(thread);
    }
  }

  bool spin(int thread) const {
    if (!may_spin) return something(thread, std::memory_order_relaxed);
    const auto end = Clock::now() + kSpin;
    do {
      for (int i = 0; i < kPausesPerLook; ++i) {
        if (something(thread, std::memory_order_relaxed)) return true;
        pause();
      }
    } while (Clock::now() < end);
    return false;
  }

  // A thread raises `asleep` before it reads its range, and run() sets the ranges before it adds 0 to `asleep`. One of the two changes
  // is first: the thread sees its range, or run() sees the thread.
  void sleep(int thread) {
    std::unique_lock<std::mutex> lock(mutex);
    asleep.fetch_add(1, std::memory_order_acq_rel);
    if (!something(thread, std::memory_order_acquire)) wake.wait(lock);
    asleep.fetch_sub(1, std::memory_order_relaxed);
  }

  void wake_all() {
    {
      std::lock_guard<std::mutex> lock(mutex);
    }
    wake.notify_all();
  }

  uint64_t done() const {
    uint64_t sum = 0;
    for (const Share& share : shares) sum += share.done.load(std::memory_order_acquire);
    return sum;
  }

  void wait() const {
    for (int looks = 0; done() != all_done; ++looks) {
      if (may_spin && looks < 1 << 14) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  // Returns false, without having done a job, if the threads cannot help.
  bool run(int jobs, void (*work)(void*, int, int), void* context) {
    if (threads == 1 || jobs <= 1 || from_the_parent() || busy.exchange(true, std::memory_order_acquire)) return false;
    all_done += static_cast<uint64_t>(jobs);
    share_out(jobs, work, context);
    if (asleep.load(std::memory_order_relaxed) > 0) wake_all();
    do_one(0, 0);  // while the ranges reach the other cores: the addition waits for them
    if (asleep.fetch_add(0, std::memory_order_acq_rel) > 0) wake_all();  // those that fell asleep in the meantime
    do_all(0);
    wait();
    busy.store(false, std::memory_order_release);
    return true;
  }

  // The least overhead of some trials. While a thread sleeps, another one does its work, so a trial takes twice as long.
  void measure() {
    auto work = [](void*, int, int) {
      for (const auto end = Clock::now() + kTrial; Clock::now() < end;) {
      }
    };
    auto least = Clock::duration::max();
    const auto begin = Clock::now();
    auto start = begin;
    for (int i = 0; i < kTrials || (may_spin && least >= 2 * kTrial && start < begin + kMostWaking); ++i) {
      if (!run(threads, work, nullptr)) break;
      const auto end = Clock::now();
      least = std::min(least, end - start);
      start = end;
    }
    const bool awake = least < 2 * kTrial || least == Clock::duration::max();
    const int next = std::min(2 * interval.load(std::memory_order_relaxed), awake ? kMostQuestions : kMostAsleep);
    interval.store(next, std::memory_order_relaxed);
    questions.store(next, std::memory_order_relaxed);
    if (least == Clock::duration::max()) return;  // another caller uses the threads
    const auto more = std::chrono::duration_cast<std::chrono::nanoseconds>(least - kTrial).count();
    overhead.store(static_cast<int>(std::clamp<int64_t>(more, 0, 1'000'000)), std::memory_order_relaxed);
  }
};

ThreadPool::ThreadPool(int threads) : state_(new State(std::max(threads, 1))) {
  // With more threads than cores, a spinning thread would block one that has work.
  state_->may_spin = static_cast<unsigned>(state_->threads) <= std::max(std::thread::hardware_concurrency(), 1u);
  state_->workers.reserve(static_cast<size_t>(state_->threads - 1));
  try {
    for (int i = 1; i < state_->threads; ++i) state_->workers.emplace_back([state = state_.get(), i] { state->worker(i); });
  } catch (...) {  // the system refuses more threads: stop those that run before their state is destroyed
    state_->stop = true;
    state_->wake_all();
    for (std::thread& worker : state_->workers) worker.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (state_->from_the_parent()) {  // there are no threads to join
    (void)state_.release();
    return;
  }
  state_->stop.store(true, std::memory_order_seq_cst);
  state_->wake_all();
  for (std::thread& worker : state_->workers) worker.join();
}

int ThreadPool::threads() const { return state_->threads; }

int ThreadPool::overhead() {
  State& s = *state_;
  if (s.threads == 1) return 0;
  if (s.questions.fetch_sub(1, std::memory_order_relaxed) == 0) s.measure();
  return s.overhead.load(std::memory_order_relaxed);
}

void ThreadPool::run(int jobs, void (*work)(void* context, int job, int thread), void* context) {
  if (state_->run(jobs, work, context)) return;
  for (int job = 0; job < jobs; ++job) work(context, job, 0);
}

}  // namespace unflip
