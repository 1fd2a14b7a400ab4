// exp and tanh of simd.h over an array. The kernels call them inline; this function is for the tests, which compare them with
// numpy for every instruction set and the whole range of numbers.
#include "abi.h"
#include "simd.h"

namespace ATTLAS_ISA {

template <class T, class Function>
void map(const attlas::Elementary& work, Function function) {
  const T* in = static_cast<const T*>(work.in);
  T* out = static_cast<T*>(work.out);
  int64_t i = 0;
  for (; i + WIDTH<T> <= work.count; i += WIDTH<T>) store(out + i, function(load(in + i)));
  if (i < work.count) {
    T rest[WIDTH<T>] = {};
    std::memcpy(rest, in + i, sizeof(T) * size_t(work.count - i));
    store(rest, function(load(rest)));
    std::memcpy(out + i, rest, sizeof(T) * size_t(work.count - i));
  }
}

int32_t run_elementary(const attlas::Elementary& work) {
  if (work.function == attlas::EXP && work.type == attlas::FLOAT32) {
    map<float>(work, [](Vec<float> x) { return exp_(x); });
  } else if (work.function == attlas::EXP && work.type == attlas::FLOAT64) {
    map<double>(work, [](Vec<double> x) { return exp_(x); });
  } else if (work.function == attlas::TANH && work.type == attlas::FLOAT32) {
    map<float>(work, [](Vec<float> x) { return tanh_(x); });
  } else if (work.function == attlas::LOG2 && work.type == attlas::FLOAT32) {
    map<float>(work, [](Vec<float> x) { return log2_<float>(x); });
  } else if (work.function == attlas::LOG2 && work.type == attlas::FLOAT64) {
    map<double>(work, [](Vec<double> x) { return log2_<double>(x); });
  } else {
    return attlas::UNSUPPORTED;
  }
  return attlas::DONE;
}

}  // namespace ATTLAS_ISA
