// A fixed set of threads that work on numbered jobs. No allocation after construction.
#pragma once

#include <memory>

namespace unflip {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // the calling thread is one of them: threads - 1 are started
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Nanoseconds that it takes until all threads work on their first job, and until the caller knows that they are done. It is
  // measured now and then, because it differs by a factor of ten: with cores that share a cache or not, and with idle or busy ones.
  int overhead();

  // Calls work(context, job, thread) once for each job = 0 .. jobs - 1 and returns when all are done. thread < threads().
  // If another caller is using the pool, this thread does all jobs (as thread 0). work must not throw.
  void run(int jobs, void (*work)(void* context, int job, int thread), void* context);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace unflip
