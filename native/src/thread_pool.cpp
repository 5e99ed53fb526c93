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

// A thread takes a job by decrementing `left`. Only a thread that has taken a job may read work and context. These change only
// when every job that was taken is done, so there is no race.
struct ThreadPool::State {
  int threads = 1;
  bool may_spin = true;
  unsigned born = watch_forks();
  std::vector<std::thread> workers;

  void (*work)(void*, int, int) = nullptr;
  void* context = nullptr;
  int jobs = 0;
  alignas(64) std::atomic<int> left{0};
  alignas(64) std::atomic<int> done{0};
  std::atomic<bool> busy{false};

  alignas(64) std::atomic<int> asleep{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake;

  bool from_the_parent() const { return forks.load(std::memory_order_relaxed) != born; }

  bool do_one(int thread) {
    int now = left.load(std::memory_order_relaxed);
    do {
      if (now <= 0) return false;
    } while (!left.compare_exchange_weak(now, now - 1, std::memory_order_acquire, std::memory_order_relaxed));
    work(context, jobs - now, thread);
    done.fetch_add(1, std::memory_order_release);
    return true;
  }

  bool something() const { return left.load(std::memory_order_relaxed) > 0 || stop.load(std::memory_order_relaxed); }

  void worker(int thread) {
    while (!stop.load(std::memory_order_relaxed)) {
      while (do_one(thread)) {
      }
      if (!spin()) sleep();
    }
  }

  bool spin() const {
    if (!may_spin) return something();
    const auto end = Clock::now() + kSpin;
    do {
      for (int i = 0; i < kPausesPerLook; ++i) {
        if (something()) return true;
        pause();
      }
    } while (Clock::now() < end);
    return false;
  }

  // A thread raises `asleep` before it reads `left`, and run() sets `left` before it reads `asleep`. So at least one of them sees
  // the other's change.
  void sleep() {
    std::unique_lock<std::mutex> lock(mutex);
    asleep.fetch_add(1, std::memory_order_seq_cst);
    wake.wait(lock, [this] { return left.load(std::memory_order_seq_cst) > 0 || stop.load(std::memory_order_seq_cst); });
    asleep.fetch_sub(1, std::memory_order_relaxed);
  }

  void wake_all() {
    {
      std::lock_guard<std::mutex> lock(mutex);
    }
    wake.notify_all();
  }

  void wait_for(int jobs_done) const {
    for (int looks = 0; done.load(std::memory_order_acquire) != jobs_done; ++looks) {
      if (may_spin && looks < 1 << 14) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(new State) {
  state_->threads = std::max(threads, 1);
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

void ThreadPool::run(int jobs, void (*work)(void* context, int job, int thread), void* context) {
  State& s = *state_;
  const bool alone = s.threads == 1 || jobs <= 1 || s.from_the_parent() || s.busy.exchange(true, std::memory_order_acquire);
  if (alone) {
    for (int job = 0; job < jobs; ++job) work(context, job, 0);
    return;
  }
  s.work = work, s.context = context, s.jobs = jobs;
  s.done.store(0, std::memory_order_relaxed);
  s.left.store(jobs, std::memory_order_seq_cst);
  if (s.asleep.load(std::memory_order_seq_cst) > 0) s.wake_all();
  while (s.do_one(0)) {
  }
  s.wait_for(jobs);
  s.busy.store(false, std::memory_order_release);
}

}  // namespace unflip
