// Work shared by threads that live for one call: no pool, so nothing to fight with torch's, and no global state.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace attlas {

// Run task(index, thread) for each index below count; each thread takes the next index when it is free. What a task
// throws ends the work early and is thrown again here, once all threads are done.
template <class Task>
void share(std::size_t count, int threads, Task&& task) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex failing;
  auto work = [&](int thread) {
    try {
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i, thread);
    } catch (...) {
      next.store(count, std::memory_order_relaxed);
      const std::lock_guard<std::mutex> lock(failing);
      if (!failure) failure = std::current_exception();
    }
  };
  if (threads > 1 && std::size_t(threads) > count) threads = static_cast<int>(count);
  std::vector<std::thread> others;
  if (threads > 1) others.reserve(static_cast<std::size_t>(threads) - 1);
  for (int t = 1; t < threads; ++t) {
    try {
      others.emplace_back(work, t);
    } catch (...) {
      break;  // the system gives no more threads: the others do the work
    }
  }
  work(0);
  for (auto& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace attlas
