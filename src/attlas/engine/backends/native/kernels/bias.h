// Terms of the logits that depend on places alone: of a distance, of a cell, of a query and of a key.
#pragma once

#include <algorithm>
#include <atomic>

#include "abi.h"
#include "parallel.h"
#include "reader.h"

namespace ATTLAS_ISA {

inline bool has_bias(const attlas::AttentionParams& p) {
  return p.by_distance.data || p.by_cell.data || p.by_query.data || p.by_key.data;
}

// Calls f(pointer to numbers of their type) for the numbers of a term.
template <class F>
ATTLAS_INLINE void with_numbers(const attlas::Bias& bias, F f) {
  switch (bias.type) {
    case attlas::FLOAT32: return f(static_cast<const float*>(bias.data));
    case attlas::FLOAT64: return f(static_cast<const double*>(bias.data));
    case attlas::BFLOAT16: return f(static_cast<const Bfloat16*>(bias.data));
    default: return f(static_cast<const Float16*>(bias.data));
  }
}

// The terms of one head.
class BiasView {
 public:
  // `factor` is what logits are multiplied by afterwards: terms are divided by it.
  BiasView(const attlas::AttentionParams& p, int64_t b, int64_t h, double factor)
      : p_(p),
        inverse_(1 / factor),
        distance_(b * p.by_distance.batch + h * p.by_distance.head),
        cell_(b * p.by_cell.batch + h * p.by_cell.head),
        query_(of_head(p.by_query, b, h)),
        key_(of_head(p.by_key, b, h)) {}

  // Adds the terms of keys [first, stop) to the logits of query i; `to` holds them from key `first` on.
  template <class T>
  __attribute__((noinline)) void add(T* to, int64_t i, int64_t first, int64_t stop) const {
    const int64_t count = stop - first;
    if (p_.by_distance.data) add_strided(p_.by_distance, distance_ + i * p_.by_distance.row, to, first, count);
    if (p_.by_cell.data) add_strided(p_.by_cell, cell_ + i * p_.by_cell.row, to, first, count);
    if (!query_ && !key_) return;
    // Added in double: running sums of gates are large, and their differences are small.
    const double of_query = query_ ? query_[i] : 0.0;
    const T inverse = T(inverse_);
    if (key_) {
      for (int64_t j = 0; j < count; ++j) to[j] += T(key_[first + j] + of_query) * inverse;
    } else {
      for (int64_t j = 0; j < count; ++j) to[j] += T(of_query) * inverse;
    }
  }

 private:
  static const double* of_head(const attlas::TokenBias& bias, int64_t b, int64_t h) {
    return bias.data ? bias.data + b * bias.batch + h * bias.head : nullptr;
  }

  template <class T>
  ATTLAS_INLINE void add_strided(const attlas::Bias& bias, int64_t row, T* to, int64_t first, int64_t count) const {
    const T factor = T(bias.factor * inverse_);
    with_numbers(bias, [&](const auto* numbers) {
      using Source = std::remove_cv_t<std::remove_pointer_t<decltype(numbers)>>;
      const Source* from = numbers + row + first * bias.column;
      int64_t j = 0;
      if constexpr (sizeof(Source) <= 4 && sizeof(T) == 4)
        for (; bias.column == 1 && j + WIDTH<T> <= count; j += WIDTH<T>)
          store(to + j, load(to + j) + ATTLAS_ISA::numbers(from + j) * factor);
      if (bias.column == 1) {
        for (; j < count; ++j) to[j] += T(number(from[j])) * factor;
      } else {
        for (; j < count; ++j) to[j] += T(number(from[j * bias.column])) * factor;
      }
    });
  }

  const attlas::AttentionParams& p_;
  const double inverse_;
  const int64_t distance_, cell_;  // where the numbers of this head begin
  const double *query_, *key_;
};

// Whether all terms are numbers that no sum of a few makes infinite, or -infinity, which forbids a pair.
template <class T>
bool biases_in_range(const attlas::AttentionParams& p) {
  const double limit = sizeof(T) == 8 ? 1e150 : 1e17;
  const auto good = [limit](double x) { return (x < limit) & ((x > -limit) | (x == -INF<double>)); };
  std::atomic<bool> all_good{true};
  for (const attlas::TokenBias* bias : {&p.by_query, &p.by_key}) {
    if (!bias->data) continue;
    const int64_t size = bias == &p.by_query ? p.m : p.n;
    for (int64_t b = 0; b < (bias->batch ? p.batch : 1); ++b)
      for (int64_t h = 0; h < (bias->head ? p.heads : 1); ++h)
        for (int64_t i = 0; i < size; ++i) {
          const double x = bias->data[b * bias->batch + h * bias->head + i];
          if (!good(x) || (bias == &p.by_query && x < -limit)) return false;
        }
  }
  for (const attlas::Bias* bias : {&p.by_distance, &p.by_cell}) {
    if (!bias->data) continue;
    // Of a table of distances the first row and the first column are all there is.
    const bool table = bias == &p.by_distance;
    const int64_t rows = table || !bias->row ? 1 : p.m, columns = bias->column ? p.n : 1;
    const int64_t batches = bias->batch ? p.batch : 1, heads = bias->head ? p.heads : 1;
    const int64_t some = std::max<int64_t>((1 << 18) / columns, 1), blocks = (rows + some - 1) / some;
    attlas::share(size_t(batches * heads * blocks), p.threads, [&](size_t task, int) {
      const int64_t which = int64_t(task) / blocks, row = int64_t(task) % blocks * some;
      const int64_t start = which / heads * bias->batch + which % heads * bias->head;
      with_numbers(*bias, [&](const auto* numbers) {
        const auto check = [&](int64_t from, int64_t step, int64_t count) {
          bool fine = true;
          for (int64_t x = 0; x < count; ++x) fine &= good(bias->factor * double(number(numbers[from + x * step])));
          if (!fine) all_good = false;
        };
        for (int64_t i = row; i < std::min(row + some, rows); ++i) check(start + i * bias->row, bias->column, columns);
        if (table) check(start, bias->row, p.m);
      });
    });
  }
  return all_good;
}

}  // namespace ATTLAS_ISA
