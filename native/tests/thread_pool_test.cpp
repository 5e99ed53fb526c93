// Every job runs once, for any caller and number of calls. Sleeping threads wake up. A child process after a fork does its own
// work.
#include "thread_pool.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

using unflip::ThreadPool;

namespace {

struct Count {
  std::vector<std::atomic<int>> done;
  int threads;
  std::atomic<bool> strange{false};
  Count(int jobs, int most) : done(static_cast<size_t>(jobs)), threads(most) {}
};

void work(void* context, int job, int thread) {
  Count& count = *static_cast<Count*>(context);
  if (job < 0 || job >= static_cast<int>(count.done.size()) || thread < 0 || thread >= count.threads) {
    count.strange = true;
    return;
  }
  ++count.done[static_cast<size_t>(job)];
}

bool once(ThreadPool& pool, int jobs) {
  Count count(jobs, pool.threads());
  pool.run(jobs, work, &count);
  for (const auto& times : count.done)
    if (times != 1) return false;
  return !count.strange;
}

bool many_sizes() {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    if (pool.threads() != threads) return false;
    for (int round = 0; round < 200; ++round)
      for (int jobs : {0, 1, 2, 7, 50})
        if (!once(pool, jobs)) return false;
  }
  return true;
}

bool after_sleep() {
  ThreadPool pool(4);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds(round * 60));
    if (!once(pool, 16)) return false;
  }
  return true;
}

bool many_callers() {
  ThreadPool pool(3);
  std::atomic<bool> right{true};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 8; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round)
        if (!once(pool, 9)) right = false;
    });
  for (std::thread& caller : callers) caller.join();
  return right;
}

bool short_lives() {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(1 + round % 4);
    if (round % 2 == 0 && !once(pool, 5)) return false;
  }
  return true;
}

// Also while another thread uses the pool: then it does all jobs itself.
bool overhead_is_measured() {
  ThreadPool one(1), pool(2);
  if (one.overhead() != 0) return false;
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) once(pool, 9);
  });
  bool right = true;
  for (int i = 0; i < 2000; i++) right = right && pool.overhead() >= 0;
  stop = true;
  other.join();
  return right && pool.overhead() <= 1'000'000;
}

// Whether other programs run now. Linux counts running threads; elsewhere the mean of the last minute must do.
bool machine_is_busy() {
  int running = 0;
  if (std::FILE* file = std::fopen("/proc/loadavg", "r")) {
    if (std::fscanf(file, "%*s %*s %*s %d", &running) != 1) running = 0;
    std::fclose(file);
  }
  double load = 0;
  return running > 2 || (getloadavg(&load, 1) == 1 && load > 1.5);  // the two threads of a pool may run
}

// Threads sleep deeply while the caller works alone for longer. The overhead is that of threads that are awake: far below the two
// microseconds that one thread needs in place of another. One of many attempts is enough, because the machine may be busy; if it
// is very busy, none may succeed.
bool overhead_is_that_of_awake_threads() {
  if (std::thread::hardware_concurrency() < 2) return true;
  int busy = 0;
  for (int attempt = 0; attempt < 50; ++attempt) {
    busy += machine_is_busy();
    ThreadPool pool(2);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(15);
    while (std::chrono::steady_clock::now() < end) {
    }
    if (pool.overhead() < 1500) return true;  // the first question is measured
  }
  return busy > 10;
}

bool after_fork() {
  auto* pool = new ThreadPool(3);
  once(*pool, 5);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // so that its threads sleep
  const pid_t child = fork();
  if (child == 0) {
    bool right = true;
    for (int round = 0; round < 5; ++round) right = once(*pool, 7) && right;
    delete pool;
    _exit(right ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  const bool right = once(*pool, 7);
  delete pool;
  return right && status == 0;
}

}  // namespace

int main() {
  const struct {
    const char* name;
    bool (*check)();
  } checks[] = {{"many sizes", many_sizes},         {"after sleep", after_sleep},
                {"many callers", many_callers},     {"short lives", short_lives},
                {"overhead", overhead_is_measured}, {"overhead of awake threads", overhead_is_that_of_awake_threads},
                {"after a fork", after_fork}};
  for (const auto& [name, check] : checks) {
    if (check()) continue;
    std::printf("wrong: %s\n", name);
    return 1;
  }
  std::printf("all right\n");
  return 0;
}
