// The statistics of rows that abi.h lists: the sums that they need, how these are computed, and the statistics from the
// sums. The forward and the statistics pass share this file: a new statistic is its line in abi.h and its arithmetic
// here.
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

inline void clear_row_statistics(attlas::AttentionParams& p) {
#define ATTLAS_CLEAR(name) p.name = nullptr;
  ATTLAS_ROW_STATISTICS(ATTLAS_CLEAR)
#undef ATTLAS_CLEAR
  p.top_values = nullptr, p.top_keys = nullptr, p.k_largest = 0;
}

// A number without a default: leaving one out of a structure of these does not compile.
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

// Mean and variance of the logits of a row, from some logits at a time.
struct Moments {
  double count = 0, mean = 0, squares = 0;  // squares: sum of the squared deviations from the mean

  double variance() const { return count > 0 ? squares / count : 0; }

  // Adds `added` logits, which are products times the scale, by the sums of the products' deviations from a centre and of
  // the squares of these deviations (Chan, Golub, LeVeque 1979).
  void merge(double added, double centre, double deviations, double squared_deviations, double scale) {
    const double shift = deviations / added * scale, total = count + added, difference = centre * scale + shift - mean;
    const double within = std::max(squared_deviations * scale * scale - shift * shift * added, 0.0);
    squares += within + difference * difference * count * added / total;
    mean += difference * added / total;
    count = total;
  }
};

// What an inner loop computes of each row, as bits; MASKED changes how.
enum RowSum : int {
  TOTALS = 1,    // sums of the weights p
  PLOGP = 2,     // sums of p log p
  SQUARES = 4,   // sums of p^2
  MOMENTS = 8,   // sums of the allowed logits and of their squares, about a centre
  MASKED = 16,   // some logits are -infinity, and moments must not count them
  MAXIMA = 32,   // the largest logits
};

// The bits of RowSum that the wanted statistics need.
inline int row_sums_for(const attlas::AttentionParams& p) {
  const RowStatistics<int> needed{
      .entropy = PLOGP,
      .squares = SQUARES,
      .mass = p.sink || p.partial ? TOTALS : 0,  // otherwise the weights of a row sum to 1
      .max_logit = MAXIMA,
      .mean = MOMENTS,
      .variance = MOMENTS,
  };
#define ATTLAS_NEEDED(name) | (p.name ? needed.name.value : 0)
  return (p.top_keys ? MAXIMA : 0) ATTLAS_ROW_STATISTICS(ATTLAS_NEEDED);
#undef ATTLAS_NEEDED
}

// Calls f<LOOP>() for the first of the loops that computes all that is wanted.
template <int... LOOPS, class F>
ATTLAS_INLINE void with_first_loop(int wanted, F f) {
  (((wanted & ~LOOPS) == 0 && (f.template operator()<LOOPS>(), true)) || ...);
}

// Sums over some logits of one row, in vectors. A loop computes those whose bits of RowSum are in WANTED; the others stay as
// they are.
template <class T>
struct VectorSums {
  Vec<T> total{}, plogp{}, squares{}, cells{}, deviations{}, squared_deviations{};

  // Adds a vector of logits, which are without the scale, and their weights. Moments are taken about a centre near the
  // mean, so that no digits are lost.
  template <int WANTED>
  ATTLAS_INLINE void accumulate(Vec<T> logit, const Weight<T>& weight, Vec<T> centre) {
    if (WANTED & TOTALS) total += weight.e;
    if (WANTED & PLOGP) plogp = weight.add_plogp(plogp);
    if (WANTED & SQUARES) squares += weight.e * weight.e;
    if (WANTED & MOMENTS) {
      Vec<T> from = logit - centre;
      if (WANTED & MASKED) {
        from = logit > all(-INF<T>) ? from : Vec<T>{};
        cells += logit > all(-INF<T>) ? all(T(1)) : Vec<T>{};
      }
      deviations += from;
      squared_deviations += from * from;
    }
  }

  // How many of `size` accumulated logits count in the moments.
  template <int WANTED>
  ATTLAS_INLINE int64_t count(int64_t size) const {
    return WANTED & MASKED ? int64_t(sum<T>(cells)) : size;
  }

  template <int WANTED>
  ATTLAS_INLINE void merge(const VectorSums& other) {
    if (WANTED & TOTALS) total += other.total;
    if (WANTED & PLOGP) plogp += other.plogp;
    if (WANTED & SQUARES) squares += other.squares;
    if (WANTED & MASKED) cells += other.cells;
    if (WANTED & MOMENTS) {
      deviations += other.deviations;
      squared_deviations += other.squared_deviations;
    }
  }
};

// Sums over all logits of a row so far. Weights are normalized only where the log-sum-exp is known.
template <class T, class Real>
struct RowSums {
  Real total = 0, plogp = 0, squares = 0;
  Moments moments;

  ATTLAS_INLINE void add(const VectorSums<T>& more, int64_t cells, T centre, T scale, int wanted) {
    if (wanted & TOTALS) total += Real(sum<T>(more.total));
    if (wanted & PLOGP) plogp += Real(double(sum<T>(more.plogp)) * Weight<T>::UNIT);
    if (wanted & SQUARES) squares += Real(sum<T>(more.squares));
    if ((wanted & MOMENTS) && cells > 0)
      moments.merge(double(cells), double(centre), double(sum<T>(more.deviations)),
                    double(sum<T>(more.squared_deviations)), double(scale));
  }

  // Multiplies all weights so far by `factor`, which is exp(log_factor).
  void multiply(Real factor, Real log_factor) {
    plogp = factor * (plogp + log_factor * total);
    total *= factor;
    squares *= factor * factor;
  }

  // The statistics of the normalized weights, which are these times `inverse_norm`, exp(-log_norm).
  RowStatistics<T> statistics(Real inverse_norm, Real log_norm, T max_logit) const {
    const Real entropy = (total * log_norm - plogp) * inverse_norm;
    return {
        .entropy = entropy > 0 ? T(entropy) : T(0),  // rounding may make it negative where one key has all the weight
        .squares = T(squares * inverse_norm * inverse_norm),
        .mass = T(total * inverse_norm),
        .max_logit = max_logit,
        .mean = T(moments.mean),
        .variance = T(moments.variance()),
    };
  }
};

// The mean of a few logits in the middle of a row without those of -infinity; -infinity where all of them are.
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

// A number near the mean of a row's logits, without the scale: the mean of those so far, or of a few in the middle, or the
// largest, which has the scale.
template <class T>
T centre_of(const T* row, int64_t size, T scale, const Moments& so_far, T largest) {
  if (so_far.count > 0) return T(so_far.mean / double(scale));
  const T mean = mean_in_the_middle(row, size);
  return mean > -INF<T> ? mean : T(largest / double(scale));
}

}  // namespace ATTLAS_ISA
