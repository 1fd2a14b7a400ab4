// The statistics of rows that abi.h lists: which are wanted, and where they are stored.
#pragma once

#include <algorithm>

#include "abi.h"
#include "simd.h"

namespace ATTLAS_ISA {

inline bool wants_row_statistics(const attlas::AttentionParams& p) {
#define ATTLAS_WANTED(name) p.name ||
  return ATTLAS_ROW_STATISTICS(ATTLAS_WANTED) p.top_keys;
#undef ATTLAS_WANTED
}

inline bool wants_column_statistics(const attlas::AttentionParams& p) {
  return p.column_mass || p.column_max || p.offsets || p.picture_sum || p.picture_max;
}

inline void forget_row_statistics(attlas::AttentionParams& p) {
#define ATTLAS_FORGET(name) p.name = nullptr;
  ATTLAS_ROW_STATISTICS(ATTLAS_FORGET)
#undef ATTLAS_FORGET
  p.top_values = nullptr, p.top_keys = nullptr, p.k_largest = 0;
}

// A number that must be given: a structure of these does not compile where one is left out.
template <class T>
struct Required {
  T value;
  Required(T x) : value(x) {}
};

// The statistics of one row.
template <class T>
struct RowStatistics {
#define ATTLAS_MEMBER(name) Required<T> name;
  ATTLAS_ROW_STATISTICS(ATTLAS_MEMBER)
#undef ATTLAS_MEMBER

  void store(const attlas::AttentionParams& p, int64_t row) const {
#define ATTLAS_STORE(name) \
  if (p.name) static_cast<T*>(p.name)[row] = name.value;
    ATTLAS_ROW_STATISTICS(ATTLAS_STORE)
#undef ATTLAS_STORE
  }
};

// Mean and variance of the logits of a row, found some at a time.
struct Moments {
  double count = 0, mean = 0, squares = 0;  // squares: squared deviations from the mean, summed

  double variance() const { return count > 0 ? squares / count : 0; }

  // Merges `more` products, which have these sums of deviations from a centre and of their squares; logits are products times
  // the scale (Chan, Golub, LeVeque 1979).
  void merge(double more, double centre, double deviations, double squared_deviations, double scale) {
    const double shift = deviations / more * scale, total = count + more, difference = centre * scale + shift - mean;
    const double about = std::max(squared_deviations * scale * scale - shift * shift * more, 0.0);
    squares += about + difference * difference * count * more / total;
    mean += difference * more / total;
    count = total;
  }
};

// The mean of a few logits in the middle of a row, those of -infinity left out; -infinity where there is no other.
template <class T>
T mean_in_the_middle(const T* row, int64_t size) {
  T total = 0;
  int count = 0;
  for (int64_t j = std::max<int64_t>(size / 2 - 8, 0); j < std::min<int64_t>(size, size / 2 + 8); ++j)
    if (row[j] > -INF<T>) {
      total += row[j];
      ++count;
    }
  return count ? total / T(count) : -INF<T>;
}

}  // namespace ATTLAS_ISA
