// The functions of the library: plain C functions, which Python calls through ctypes without holding its lock. This file is
// compiled for any processor; each function passes its work on to the kernels of one instruction set.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "abi.h"
#include "abi_additive.h"
#include "abi_cells.h"
#include "abi_distance.h"
#include "abi_transport.h"
#include "interrupt.h"
#include "parallel.h"

#if ATTLAS_SETS > 1
#include <cpuid.h>
#endif
#include <unistd.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#define ATTLAS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// In the order in which a wider one is preferred. CMake counts in ATTLAS_SETS how many of them were compiled.
enum Set : int32_t { BASELINE, AVX2, AVX512, AMX };

#if ATTLAS_SETS > 1

// Linux gives the tile registers to a process that asks for them, once and for all of its threads.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
  return false;
#endif
}

// The widest set that the processor can run. The compiler's functions also ask whether the operating system saves the
// registers when it changes threads.
Set widest() {
  // Not every compiler knows the names of F16C and of the tile unit, whose bits are AMX-BF16 and AMX-TILE.
  unsigned a, b, c, d;
  __builtin_cpu_init();
  const bool halves = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !halves) return BASELINE;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl"))
    return AVX2;
  const bool tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
  return tiles && __builtin_cpu_supports("avx512bf16") && ATTLAS_SETS > AMX && tiles_granted() ? AMX : AVX512;
}

#endif

Set best() {
#if ATTLAS_SETS > 1
  // A property of the machine, found out once: the question costs more than a small problem.
  static const Set found = std::min(widest(), Set(ATTLAS_SETS - 1));
  return found;
#else
  return BASELINE;
#endif
}

// One call: no exception leaves through a C function, and no instruction runs that the processor does not have.
template <class Structure>
int32_t enter(const Structure* work, int32_t set, int32_t (*const (&kernels)[4])(const Structure&)) {
  if (work == nullptr || set < BASELINE || set > best()) return attlas::UNSUPPORTED;
  try {
    return kernels[set](*work);
  } catch (const attlas::Interrupted&) {
    return attlas::INTERRUPTED;
  } catch (const std::bad_alloc&) {
    return attlas::NO_MEMORY;
  } catch (...) {
    return attlas::UNSUPPORTED;
  }
}

}  // namespace

// ATTLAS_FUNCTION(name, Structure, amx): attlas_name(const Structure*, set) runs run_name of the set, and `amx` says whose
// kernels run where the set is AMX. Where a set was not compiled, CMake defines ATTLAS_AVX2, ATTLAS_AVX512 or ATTLAS_AMX as
// the next narrower one. library.py compares attlas_name_size with the size of its own structure.
#define ATTLAS_DECLARE(set, name, Structure)    \
  namespace set {                               \
  int32_t run_##name(const attlas::Structure&); \
  }
#define ATTLAS_FUNCTION(name, Structure, amx)                                                                          \
  ATTLAS_DECLARE(baseline, name, Structure)                                                                            \
  ATTLAS_DECLARE(ATTLAS_AVX2, name, Structure)                                                                         \
  ATTLAS_DECLARE(ATTLAS_AVX512, name, Structure)                                                                       \
  ATTLAS_DECLARE(amx, name, Structure)                                                                                 \
  extern "C" __attribute__((visibility("default"))) const int32_t attlas_##name##_size;                                \
  const int32_t attlas_##name##_size = sizeof(attlas::Structure);                                                      \
  ATTLAS_EXPORT int32_t attlas_##name(const attlas::Structure* work, int32_t set) {                                    \
    return enter(work, set, {baseline::run_##name, ATTLAS_AVX2::run_##name, ATTLAS_AVX512::run_##name, amx::run_##name}); \
  }

#if defined(ATTLAS_FAMILY_ELEMENTARY)
ATTLAS_FUNCTION(elementary, Elementary, ATTLAS_AVX512)
#endif
#if defined(ATTLAS_FAMILY_DOT)
ATTLAS_FUNCTION(dot, AttentionParams, ATTLAS_AMX)
#endif
#if defined(ATTLAS_FAMILY_DOT_BACKWARD)
ATTLAS_FUNCTION(dot_backward, AttentionBackwardParams, ATTLAS_AMX)
#endif
#if defined(ATTLAS_FAMILY_ADDITIVE)
ATTLAS_FUNCTION(additive, Additive, ATTLAS_AVX512)
ATTLAS_FUNCTION(additive_backward, AdditiveBackward, ATTLAS_AVX512)
#endif
#if defined(ATTLAS_FAMILY_DISTANCE)
ATTLAS_FUNCTION(distance, Distance, ATTLAS_AVX512)
ATTLAS_FUNCTION(distance_backward, DistanceBackward, ATTLAS_AVX512)
#endif
#if defined(ATTLAS_FAMILY_CELLS)
ATTLAS_FUNCTION(cell_sums, CellSums, ATTLAS_AVX512)
#endif
#if defined(ATTLAS_FAMILY_TRANSPORT)
ATTLAS_FUNCTION(transport_rows, TransportRows, ATTLAS_AVX512)
#endif

namespace {

// GOMP_parallel(body, data, threads, flags), as GNU's and LLVM's OpenMP have it, and the process that it was found in.
// Set once, when the library is loaded.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<Parallel> pool{nullptr};
std::atomic<pid_t> pool_owner{0};

// Functions of Python's C interface, set once when the library is loaded: nothing of Python is linked.
struct Python {
  void* (*release_lock)();     // PyEval_SaveThread
  void (*take_lock)(void*);    // PyEval_RestoreThread
  int (*run_handlers)();       // PyErr_CheckSignals: -1 where a handler has raised
};
Python python_functions{};
std::atomic<int64_t> nanoseconds_between_looks{100'000'000};

// How numbers are rounded and whether small ones are flushed, for the thread that runs.
#if defined(__SSE2__)
unsigned rounding() { return _mm_getcsr(); }
void set_rounding(unsigned state) { _mm_setcsr(state); }
#else
unsigned rounding() { return 0; }
void set_rounding(unsigned) {}
#endif

// One call from Python's main thread.
class Call {
  using Clock = std::chrono::steady_clock;
  const Python python_;
  void* state_;  // of the main thread in Python, while it does not hold the lock
  const unsigned rounding_ = ::rounding();
  Clock::time_point last_ = Clock::now();
  std::atomic<bool> interrupted_{false};

 public:
  explicit Call(const Python& python) : python_(python), state_(python.release_lock()) {}
  ~Call() { python_.take_lock(state_); }
  Call(const Call&) = delete;

  void stop_if_interrupted() const {
    if (interrupted_.load(std::memory_order_relaxed)) throw attlas::Interrupted();
  }

  // On the main thread alone. A handler may call the kernels in its turn.
  void look() {
    if ((Clock::now() - last_).count() < nanoseconds_between_looks.load(std::memory_order_relaxed)) return;
    const unsigned ours = ::rounding();
    set_rounding(rounding_);
    python_.take_lock(state_);
    if (python_.run_handlers() != 0) interrupted_.store(true, std::memory_order_relaxed);
    state_ = python_.release_lock();
    set_rounding(ours);
    last_ = Clock::now();
    stop_if_interrupted();
  }
};

// The call that this thread works for, and whether it is the main thread, which made it.
struct Here {
  Call* call;
  bool looks;
  unsigned passed;  // checkpoints
};
thread_local constinit Here here{nullptr, false, 0};

// Sets `here` for as long as it lives.
class Within {
  const Here before_ = here;

 public:
  Within(Call* call, bool looks) { here = {call, looks, 0}; }
  ~Within() { here = before_; }
  Within(const Within&) = delete;
};

// The tasks of one call of share(), which several threads take one after another.
struct Work {
  const size_t count;
  const attlas::Task& task;
  Call* const call = here.call;
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<size_t> next{0};
  std::atomic<int> threads{0};
  std::exception_ptr failure{};
  std::mutex failing{};

  void run() {
    // A pool may give fewer threads than it was asked for: each takes the next number, and the tasks decide.
    const int thread = threads.fetch_add(1, std::memory_order_relaxed);
    const Within within(call, call != nullptr && std::this_thread::get_id() == caller);
    try {
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        if (call != nullptr) call->stop_if_interrupted();
        if (here.looks) call->look();
        task(i, thread);
      }
    } catch (...) {
      next.store(count, std::memory_order_relaxed);
      const std::lock_guard<std::mutex> lock(failing);
      if (!failure) failure = std::current_exception();
    }
  }
};

// Runs the work on so many threads of the pool, or fewer, this one among them; false where there is no pool. The threads of a
// pool do not live on in a child process, and GNU's waits for them for ever.
bool run_on_pool(Work& work, int threads) {
  const Parallel parallel = pool.load(std::memory_order_acquire);
  if (parallel == nullptr || pool_owner.load(std::memory_order_relaxed) != getpid()) return false;
  parallel([](void* data) { static_cast<Work*>(data)->run(); }, &work, unsigned(threads), 0);
  return true;
}

}  // namespace

void attlas::share(size_t count, int threads, const Task& task) {
  Work work{.count = count, .task = task};
  if (threads <= 1 || count <= 1) {
    work.run();
  } else if (!run_on_pool(work, threads)) {
    std::vector<std::thread> others;
    others.reserve(size_t(threads));
    try {
      while (others.size() + 1 < std::min(size_t(threads), count)) others.emplace_back(&Work::run, &work);
    } catch (...) {
      // The system gives no more threads: those that there are do the work.
    }
    work.run();
    for (auto& other : others) other.join();
  }
  if (work.failure) std::rethrow_exception(work.failure);
}

void attlas::stop_if_interrupted() {
  if (here.call != nullptr) here.call->stop_if_interrupted();
}

void attlas::checkpoint() {
  if (here.call == nullptr) return;
  here.call->stop_if_interrupted();
  // Asking for the time takes as long as the shortest tiles.
  if (here.looks && ++here.passed % 8 == 0) here.call->look();
}

// Runs one of the functions above for Python's main thread, which holds Python's lock and gets it back.
ATTLAS_EXPORT int32_t attlas_from_main_thread(int32_t (*function)(const void*, int32_t), const void* work, int32_t set) {
  Call call(python_functions);
  const Within within(&call, true);
  return function(work, set);
}

ATTLAS_EXPORT void attlas_python(void* (*release_lock)(), void (*take_lock)(void*), int (*run_handlers)()) {
  python_functions = {release_lock, take_lock, run_handlers};
}

// For tests: looks at signals as often as this.
ATTLAS_EXPORT void attlas_look_every(int64_t nanoseconds) {
  nanoseconds_between_looks.store(nanoseconds, std::memory_order_relaxed);
}

ATTLAS_EXPORT void attlas_pool(void* parallel) {
  pool_owner.store(getpid(), std::memory_order_relaxed);
  pool.store(reinterpret_cast<Parallel>(parallel), std::memory_order_release);
}

// The text of abi.h, from which library.py makes its structures.
ATTLAS_EXPORT const char* attlas_abi() {
  static const char text[] =
#include "abi_text.h"
      ;
  return text;
}

// The widest set that was compiled and that this processor and system can run.
ATTLAS_EXPORT int32_t attlas_best() { return best(); }
