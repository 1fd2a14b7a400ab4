// Where the logits of a score that is no dot product come from, for the passes that take them rectangle by rectangle.
#pragma once

#include <functional>
#include <memory>

#include "abi.h"
#include "simd.h"

namespace ATTLAS_ISA {

// The logits of one thread, in powers of 2; -infinity for a weight of 0.
template <class T>
struct Logits {
  static constexpr int ROWS = 12;  // the most rows that are taken at a time
  bool only_masked = false;        // whether the mask alone makes logits of -infinity

  virtual ~Logits() = default;
  // Rows first to first + some of one head are those of the rectangles that follow.
  virtual void take_rows(int64_t b, int64_t h, int64_t first, int64_t some) = 0;
  // Their logits against whole vectors of columns from `left` on, and those of so many more rows as make fours of them;
  // what lies beyond the last column is left as it is, or anything.
  virtual void fill(int64_t left, int64_t columns, T* to, int64_t stride) = 0;
};

template <class T>
using MakeLogits = std::function<std::unique_ptr<Logits<T>>()>;

// All that p wants but the output and the log-sum-exp, which is known. In dot.cpp.
template <class T>
void logit_statistics(const attlas::AttentionParams& p, const MakeLogits<T>& make);

}  // namespace ATTLAS_ISA
