// The statistics of rows that abi.h lists: the sums that they need, how these are found, and what is made of them. Both
// passes take it from here: a new statistic is its line in abi.h and its arithmetic in this file.
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

// What an inner loop computes of each row.
enum RowSum : int {
  TOTALS = 1,    // sums of the weights p
  PLOGP = 2,     // sums of p log p
  SQUARES = 4,   // sums of p^2
  MOMENTS = 8,   // of the allowed logits
  GAPS = 16,     // some logits are -infinity, and moments must not count them
  PEAKS = 32,    // the largest logits
};

// What the wanted statistics of rows need.
inline int row_sums_for(const attlas::AttentionParams& p) {
  const RowStatistics<int> needed{
      .entropy = PLOGP,
      .squares = SQUARES,
      .mass = p.sink || p.partial ? TOTALS : 0,  // otherwise the weights of a row sum to 1
      .max_logit = PEAKS,
      .mean = MOMENTS,
      .variance = MOMENTS,
  };
#define ATTLAS_NEEDED(name) | (p.name ? needed.name.value : 0)
  return (p.top_keys ? PEAKS : 0) ATTLAS_ROW_STATISTICS(ATTLAS_NEEDED);
#undef ATTLAS_NEEDED
}

// Calls f<LOOP>() for the first of the loops that computes all that is wanted.
template <int... LOOPS, class F>
ATTLAS_INLINE void with_first_loop(int wanted, F f) {
  (((wanted & ~LOOPS) == 0 && (f.template operator()<LOOPS>(), true)) || ...);
}

// Sums over some logits of one row, in vectors. A loop computes those that are WANTED; the others stay as they are.
template <class T>
struct VectorSums {
  Vec<T> total{}, plogp{}, squares{}, cells{}, deviations{}, squared_deviations{};

  // A vector of logits without the scale, and their weights. Moments are taken about a centre near the mean, so that their
  // difference loses nothing.
  template <int WANTED>
  ATTLAS_INLINE void take(Vec<T> logit, const Weight<T>& weight, Vec<T> centre) {
    if (WANTED & TOTALS) total += weight.e;
    if (WANTED & PLOGP) plogp = weight.add_plogp(plogp);
    if (WANTED & SQUARES) squares += weight.e * weight.e;
    if (WANTED & MOMENTS) {
      Vec<T> from = logit - centre;
      if (WANTED & GAPS) {
        from = logit > all(-INF<T>) ? from : Vec<T>{};
        cells += logit > all(-INF<T>) ? all(T(1)) : Vec<T>{};
      }
      deviations += from;
      squared_deviations += from * from;
    }
  }

  // How many of the `size` logits that were taken moments count.
  template <int WANTED>
  ATTLAS_INLINE int64_t count(int64_t size) const {
    return WANTED & GAPS ? int64_t(sum<T>(cells)) : size;
  }

  template <int WANTED>
  ATTLAS_INLINE void add(const VectorSums& more) {
    if (WANTED & TOTALS) total += more.total;
    if (WANTED & PLOGP) plogp += more.plogp;
    if (WANTED & SQUARES) squares += more.squares;
    if (WANTED & GAPS) cells += more.cells;
    if (WANTED & MOMENTS) {
      deviations += more.deviations;
      squared_deviations += more.squared_deviations;
    }
  }
};

// What a row has seen so far. Its weights are not normalized yet, or they are where the log-sum-exp is known.
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

  // All weights so far are multiplied by exp(log_factor), which is `factor`.
  void multiply(Real factor, Real log_factor) {
    plogp = factor * (plogp + log_factor * total);
    total *= factor;
    squares *= factor * factor;
  }

  // The statistics of weights that are these times `share`, which is exp(-log_norm).
  RowStatistics<T> statistics(Real share, Real log_norm, T max_logit) const {
    const Real entropy = (total * log_norm - plogp) * share;
    return {
        .entropy = entropy > 0 ? T(entropy) : T(0),  // rounding may make it negative where one key has all the weight
        .squares = T(squares * share * share),
        .mass = T(total * share),
        .max_logit = max_logit,
        .mean = T(moments.mean),
        .variance = T(moments.variance()),
    };
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
