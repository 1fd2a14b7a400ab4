// The functions of the library: plain C functions, which Python calls through ctypes without holding its lock. This file is
// compiled for any processor; each function passes its work on to the kernels of one instruction set.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "abi.h"
#include "abi_additive.h"
#include "abi_distance.h"
#include "parallel.h"

#if defined(ATTLAS_SET_AVX2)
#include <cpuid.h>
#endif
#include <unistd.h>
#if defined(ATTLAS_SET_AMX) && defined(__linux__)
#include <sys/syscall.h>
#endif

#define ATTLAS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// In the order in which a wider one is preferred.
enum Set : int32_t { BASELINE = 0, AVX2 = 1, AVX512 = 2, AMX = 3 };

#if defined(ATTLAS_SET_AVX2)

struct Registers {
  unsigned a, b, c, d;
};

Registers cpuid(unsigned leaf, unsigned part) {
  Registers r{0, 0, 0, 0};
  __get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool bit(uint64_t word, int place) { return word >> place & 1; }

// Which registers the operating system saves when it changes threads; without that an instruction set cannot be used.
uint64_t saved_registers() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Linux gives the tile registers to a process that asks for them, once and for all of its threads.
bool tiles_granted() {
#if defined(ATTLAS_SET_AMX) && defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
  return false;
#endif
}

Set widest() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
  const bool fma = bit(one.c, 12), osxsave = bit(one.c, 27), avx = bit(one.c, 28), f16c = bit(one.c, 29);
  if (!(osxsave && avx && fma && f16c && bit(seven.b, 5))) return BASELINE;
  const uint64_t saved = saved_registers();
  if ((saved & 0x6) != 0x6) return BASELINE;  // xmm and ymm
  const bool wide = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31);  // f, dq, bw, vl
  if (!wide || (saved & 0xe6) != 0xe6) return AVX2;  // masks and zmm
  const bool tiles = bit(seven.d, 22) && bit(seven.d, 24) && bit(more.a, 5);  // amx-bf16, amx-tile, avx512-bf16
  if (!tiles || (saved & 0x60000) != 0x60000 || !tiles_granted()) return AVX512;
  return AMX;
}

#endif

Set compiled() {
#if defined(ATTLAS_SET_AMX)
  return AMX;
#elif defined(ATTLAS_SET_AVX512)
  return AVX512;
#elif defined(ATTLAS_SET_AVX2)
  return AVX2;
#else
  return BASELINE;
#endif
}

Set best() {
#if defined(ATTLAS_SET_AVX2)
  // A property of the machine, found out once: the question costs more than a small problem.
  static const Set found = std::min(widest(), compiled());
  return found;
#else
  return BASELINE;
#endif
}

template <class Structure>
using Kernel = int32_t (*)(const Structure&);

// One call: no exception leaves through a C function, and no instruction runs that the processor does not have.
template <class Structure>
int32_t enter(const Structure* work, int32_t set, const Kernel<Structure> (&kernels)[4]) {
  if (work == nullptr || set < BASELINE || set > best()) return attlas::UNSUPPORTED;
  try {
    return kernels[set](*work);
  } catch (const std::bad_alloc&) {
    return attlas::NO_MEMORY;
  } catch (...) {
    return attlas::UNSUPPORTED;
  }
}

}  // namespace

// ATTLAS_FUNCTION(name, Structure): attlas_name(const Structure*, set) runs run_name of the set. Its kernels for AMX are
// those for AVX-512; ATTLAS_FUNCTION_WITH_AMX has some of its own. attlas_name_size is what library.py checks.
#define ATTLAS_DECLARE(set, name, Structure)    \
  namespace set {                               \
  int32_t run_##name(const attlas::Structure&); \
  }

#if defined(ATTLAS_SET_AVX512)
#define ATTLAS_FUNCTION(name, Structure)          \
  ATTLAS_DECLARE(baseline, name, Structure)   \
  ATTLAS_DECLARE(avx2, name, Structure)       \
  ATTLAS_DECLARE(avx512, name, Structure)     \
  ATTLAS_ENTER(name, Structure, baseline::run_##name, avx2::run_##name, avx512::run_##name, avx512::run_##name)
#elif defined(ATTLAS_SET_AVX2)
#define ATTLAS_FUNCTION(name, Structure)          \
  ATTLAS_DECLARE(baseline, name, Structure)   \
  ATTLAS_DECLARE(avx2, name, Structure)       \
  ATTLAS_ENTER(name, Structure, baseline::run_##name, avx2::run_##name, avx2::run_##name, avx2::run_##name)
#else
#define ATTLAS_FUNCTION(name, Structure)          \
  ATTLAS_DECLARE(baseline, name, Structure)   \
  ATTLAS_ENTER(name, Structure, baseline::run_##name, baseline::run_##name, baseline::run_##name, baseline::run_##name)
#endif

#if defined(ATTLAS_SET_AMX)
#define ATTLAS_FUNCTION_WITH_AMX(name, Structure) \
  ATTLAS_DECLARE(baseline, name, Structure)   \
  ATTLAS_DECLARE(avx2, name, Structure)       \
  ATTLAS_DECLARE(avx512, name, Structure)     \
  ATTLAS_DECLARE(amx, name, Structure)        \
  ATTLAS_ENTER(name, Structure, baseline::run_##name, avx2::run_##name, avx512::run_##name, amx::run_##name)
#else
#define ATTLAS_FUNCTION_WITH_AMX(name, Structure) ATTLAS_FUNCTION(name, Structure)
#endif

#define ATTLAS_ENTER(name, Structure, a, b, c, d)                                         \
  extern "C" __attribute__((visibility("default"))) const int32_t attlas_##name##_size;   \
  const int32_t attlas_##name##_size = sizeof(attlas::Structure);                         \
  ATTLAS_EXPORT int32_t attlas_##name(const attlas::Structure* work, int32_t set) { \
    static constexpr Kernel<attlas::Structure> kernels[4] = {a, b, c, d};                 \
    return enter(work, set, kernels);                                                     \
  }

#if defined(ATTLAS_FAMILY_ELEMENTARY)
ATTLAS_FUNCTION(elementary, Elementary)
#endif
#if defined(ATTLAS_FAMILY_DOT)
ATTLAS_FUNCTION_WITH_AMX(dot, AttentionParams)
#endif
#if defined(ATTLAS_FAMILY_DOT_BACKWARD)
ATTLAS_FUNCTION_WITH_AMX(dot_backward, AttentionBackwardParams)
#endif
#if defined(ATTLAS_FAMILY_ADDITIVE)
ATTLAS_FUNCTION(additive, Additive)
ATTLAS_FUNCTION(additive_statistics, AdditiveStatistics)
ATTLAS_FUNCTION(additive_backward, AdditiveBackward)
#endif
#if defined(ATTLAS_FAMILY_DISTANCE)
ATTLAS_FUNCTION(distance, Distance)
ATTLAS_FUNCTION(distance_statistics, DistanceStatistics)
ATTLAS_FUNCTION(distance_backward, DistanceBackward)
#endif

namespace {

// GOMP_parallel(body, data, threads, flags), as GNU's and LLVM's OpenMP have it, and the process that it was found in.
// Set once, when the library is loaded.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<Parallel> pool{nullptr};
std::atomic<pid_t> pool_owner{0};

}  // namespace

// The threads of a pool do not live on in a child process, and GNU's waits for them for ever.
bool attlas::run_on_pool(void (*body)(void*), void* data, int threads) {
  const Parallel parallel = pool.load(std::memory_order_acquire);
  if (parallel == nullptr || pool_owner.load(std::memory_order_relaxed) != getpid()) return false;
  parallel(body, data, unsigned(threads), 0);
  return true;
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

// The widest set that was compiled, and the widest that this processor and system can run.
ATTLAS_EXPORT int32_t attlas_sets() { return compiled(); }
ATTLAS_EXPORT int32_t attlas_best() { return best(); }
