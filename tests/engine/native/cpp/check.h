// What the C++ tests share. Each family of kernels has a program test_FAMILY.cpp here: it calls the functions of its family,
// for every instruction set of this processor, with small and odd sizes, from several threads. `make sanitize` builds
// these programs with AddressSanitizer and UndefinedBehaviorSanitizer, and again with ThreadSanitizer, and runs them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "abi.h"

extern "C" int32_t attlas_best();

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
      std::abort();                                                                 \
    }                                                                               \
  } while (false)

namespace attlas_test {

// Exactly as long as asked for, so that one step too far is seen; NaN at first, so that a cell that nobody wrote is.
template <class T>
std::vector<T> blank(int64_t count) {
  return std::vector<T>(size_t(count), T(NAN));
}

template <class T>
std::vector<T> normal(int64_t count, unsigned seed, double spread = 1.0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> draw(0.0, spread);
  std::vector<T> numbers(static_cast<size_t>(count));
  for (T& number : numbers) number = T(draw(random));
  return numbers;
}

template <class T>
bool close(T found, double expected, double tolerance) {
  return std::abs(double(found) - expected) <= tolerance * (1.0 + std::abs(expected));
}

// Calls test(set) for each instruction set, from several threads at once: the functions share nothing.
template <class Test>
void every_set_from_threads(Test test, int callers = 3) {
  for (int32_t set = 0; set <= attlas_best(); ++set) {
    std::vector<std::thread> threads;
    for (int t = 0; t < callers; ++t) threads.emplace_back([&] { test(set); });
    for (auto& thread : threads) thread.join();
  }
}

}  // namespace attlas_test
