// Work shared by threads.
//
// Threads come from the pool that PyTorch's OpenMP keeps: threads of our own would be started beside it at every call,
// which costs milliseconds while its threads still spin. The runtime is found in the process when it is first needed,
// and nothing is linked. Where there is none of the kind known here, threads live for one call.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace attlas {

// Run body(data) on so many threads of a pool, or fewer, this one among them; false where there is no pool. In api.cpp.
// All threads that PyTorch uses are asked for, also where there is less to do: a pool ends those that it does not need.
bool run_on_pool(void (*body)(void*), void* data, int threads);

// Run task(index, thread) for each index below count; each thread takes the next index when it is free. What a task
// throws ends the work early and is thrown again here, once all threads are done.
template <class Task>
void share(std::size_t count, int threads, Task&& task) {
  struct Work {
    std::atomic<std::size_t> next{0};
    std::atomic<int> threads{0};
    std::size_t count;
    Task& task;
    std::exception_ptr failure;
    std::mutex failing;

    void operator()() {
      // A pool may give fewer threads than it was asked for: each takes the next number, and the tasks decide.
      const int thread = threads.fetch_add(1, std::memory_order_relaxed);
      try {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i, thread);
      } catch (...) {
        next.store(count, std::memory_order_relaxed);
        const std::lock_guard<std::mutex> lock(failing);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  Work work{{}, {}, count, task, {}, {}};
  if (threads <= 1 || count <= 1) {
    work();
  } else if (!run_on_pool([](void* data) { (*static_cast<Work*>(data))(); }, &work, threads)) {
    if (std::size_t(threads) > count) threads = static_cast<int>(count);
    std::vector<std::thread> others;
    others.reserve(static_cast<std::size_t>(threads) - 1);
    for (int t = 1; t < threads; ++t) {
      try {
        others.emplace_back([&work] { work(); });
      } catch (...) {
        break;  // the system gives no more threads: the others do the work
      }
    }
    work();
    for (auto& other : others) other.join();
  }
  if (work.failure) std::rethrow_exception(work.failure);
}

}  // namespace attlas
