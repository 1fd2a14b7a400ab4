#include "check.h"

#include <atomic>
#include <new>

#include "parallel.h"

extern "C" int32_t attlas_elementary(const attlas::Elementary*, int32_t set);

using namespace attlas_test;

template <class T>
void compare(int32_t set, int32_t function, int32_t type, double (*expected)(double), double tolerance) {
  for (int64_t count : {0, 1, 3, 7, 8, 15, 16, 17, 33, 100}) {
    const std::vector<T> in = normal<T>(count, 1, 4.0);
    std::vector<T> out = blank<T>(count);
    const attlas::Elementary work{in.data(), out.data(), count, function, type};
    CHECK(attlas_elementary(&work, set) == attlas::DONE);
    for (int64_t i = 0; i < count; ++i) CHECK(out[i] == expected(in[i]) || close(out[i], expected(in[i]), tolerance));
  }
}

int main() {
  every_set_from_threads([](int32_t set) {
    compare<float>(set, attlas::EXP, attlas::FLOAT32, [](double x) { return std::exp(x); }, 1e-6);
    compare<double>(set, attlas::EXP, attlas::FLOAT64, [](double x) { return std::exp(x); }, 1e-14);
    compare<float>(set, attlas::LOG2, attlas::FLOAT32, [](double x) { return std::log2(std::max(x, 0.0)); }, 1e-6);
    compare<double>(set, attlas::LOG2, attlas::FLOAT64, [](double x) { return std::log2(std::max(x, 0.0)); }, 1e-14);
    compare<float>(set, attlas::TANH, attlas::FLOAT32, [](double x) { return std::tanh(x); }, 1e-6);
  });
  const attlas::Elementary none{nullptr, nullptr, 0, 99, attlas::FLOAT32};
  CHECK(attlas_elementary(&none, 0) == attlas::UNSUPPORTED);
  CHECK(attlas_elementary(nullptr, 0) == attlas::UNSUPPORTED);
  CHECK(attlas_elementary(&none, -1) == attlas::UNSUPPORTED);
  CHECK(attlas_elementary(&none, attlas_best() + 1) == attlas::UNSUPPORTED);

  // share(): every index once, and what a task throws comes out of the call, whichever thread ran it.
  std::vector<int> runs(1000, 0);
  attlas::share(runs.size(), 4, [&](size_t i, int) { ++runs[i]; });
  for (int times : runs) CHECK(times == 1);
  for (size_t thrower : {0, 500, 999}) {
    std::atomic<bool> caught{false};
    try {
      attlas::share(runs.size(), 4, [&](size_t i, int) {
        if (i == thrower) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      caught = true;
    }
    CHECK(caught);
  }
  std::puts("elementary: ok");
}
