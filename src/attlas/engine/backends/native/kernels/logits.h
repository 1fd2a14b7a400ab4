// Where the logits of a score that is no dot product come from, for the passes that read them rectangle by rectangle.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>

#include "abi.h"
#include "simd.h"

namespace ATTLAS_ISA {

// Computes logits for one thread, in powers of 2; -infinity for a weight of 0.
template <class T>
struct LogitSource {
  static constexpr int ROWS = 12;  // most rows of a rectangle
  bool only_masked = false;        // whether the mask alone makes logits of -infinity

  virtual ~LogitSource() = default;
  // Rows [first, first + some) of one head are those of the following calls of fill().
  virtual void prepare_rows(int64_t b, int64_t h, int64_t first, int64_t some) = 0;
  // Writes their logits for `columns` columns from `left` on, whole vectors of them; rows are filled up to a multiple of
  // four. Columns beyond the last one get any number, or stay as they were.
  virtual void fill(int64_t left, int64_t columns, T* to, int64_t stride) = 0;
};

// Logits that an earlier pass has kept, those of one row behind those of another.
template <class T>
struct KeptLogits final : LogitSource<T> {
  const T* const rows;
  const int64_t stride;            // from one row to the next
  int64_t group = 0;               // the query that the first row is of
  int64_t prepared = 0, some = 0;  // the prepared rows: the first, counted from `group`, and how many

  KeptLogits(const T* kept, int64_t from_row_to_row, bool masked) : rows(kept), stride(from_row_to_row) {
    this->only_masked = masked;
  }
  void prepare_rows(int64_t, int64_t, int64_t first, int64_t count) override { prepared = first - group, some = count; }
  void fill(int64_t left, int64_t columns, T* to, int64_t to_stride) override {
    for (int64_t i = 0; i < some; ++i)
      std::copy_n(rows + (prepared + i) * stride + left, std::min(columns, stride - left), to + i * to_stride);
  }
};

template <class T>
using MakeLogitSource = std::function<std::unique_ptr<LogitSource<T>>()>;

// Computes all that p wants but the output; the log-sum-exp must be known. In dot.cpp.
template <class T>
void logit_statistics(const attlas::AttentionParams& p, const MakeLogitSource<T>& make);

}  // namespace ATTLAS_ISA
