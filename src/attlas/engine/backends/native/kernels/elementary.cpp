// exp, tanh and log2 of simd.h over an array. The kernels call them inline; this function is for the tests, which compare
// them with numpy for every instruction set and the whole range of numbers.
#include "abi.h"
#include "simd.h"

namespace ATTLAS_ISA {

template <class T, class Function>
int32_t map(const attlas::Elementary& work, Function function) {
  for (int64_t i = 0; i < work.count; i += WIDTH<T>) {
    const size_t bytes = sizeof(T) * size_t(work.count - i < WIDTH<T> ? work.count - i : WIDTH<T>);
    T numbers[WIDTH<T>] = {};
    std::memcpy(numbers, static_cast<const T*>(work.in) + i, bytes);
    store(numbers, function(load(numbers)));
    std::memcpy(static_cast<T*>(work.out) + i, numbers, bytes);
  }
  return attlas::DONE;
}

int32_t run_elementary(const attlas::Elementary& work) {
  const bool single = work.type == attlas::FLOAT32;
  const auto exponential = [](auto x) { return exp_(x); };
  if (work.function == attlas::EXP) return single ? map<float>(work, exponential) : map<double>(work, exponential);
  if (work.function == attlas::LOG2 && single) return map<float>(work, [](Vec<float> x) { return log2_<float>(x); });
  if (work.function == attlas::LOG2) return map<double>(work, [](Vec<double> x) { return log2_<double>(x); });
  if (work.function == attlas::TANH && single) return map<float>(work, [](Vec<float> x) { return tanh_(x); });
  return attlas::UNSUPPORTED;
}

}  // namespace ATTLAS_ISA
