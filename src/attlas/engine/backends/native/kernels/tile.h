// One rectangle of logits: a product, and then what the cap, the terms of places and the mask say.
#pragma once

#include <algorithm>

#include "abi.h"
#include "bias.h"
#include "whole.h"

namespace ATTLAS_ISA {

// Whether products keep the order of logits, and neither squares of them nor what is divided by the scale leave the range.
template <class T>
ATTLAS_INLINE bool usual(T scale) {
  return scale > T(1e-6) && scale < T(1e6);
}

// Whether logits are more than products times a usual scale.
template <class T>
bool transforms_logits(const attlas::AttentionParams& p) {
  return p.cap > 0 || !usual(T(p.scale)) || has_bias(p);
}

// What is left to multiply logits by after finish_row: a usual scale is applied where they are used.
template <class T>
ATTLAS_INLINE T factor_of(const attlas::AttentionParams& p) {
  return p.cap > 0 || !usual(T(p.scale)) ? T(1) : T(p.scale);
}

// What the places of one head say: which keys its rows may see, and which terms their logits have.
struct PlaceView {
  const int32_t* low;
  const int32_t* high;
  const uint8_t* allowed;
  int64_t allowed_row;
  int64_t n;
  bool has_bias;
  BiasView bias;

  PlaceView(const attlas::AttentionParams& p, int64_t b, int64_t h)
      : low(p.low ? p.low + b * p.span_batch + h * p.span_head : nullptr),
        high(p.high ? p.high + b * p.span_batch + h * p.span_head : nullptr),
        allowed(p.allowed ? p.allowed + b * p.allowed_batch + h * p.allowed_head : nullptr),
        allowed_row(p.allowed_row),
        n(p.n),
        has_bias(ATTLAS_ISA::has_bias(p)),
        bias(p, b, h, p.type == attlas::FLOAT64 ? factor_of<double>(p) : double(factor_of<float>(p))) {}

  ATTLAS_INLINE int64_t first(int64_t i) const { return low ? (low[i] > 0 ? low[i] : 0) : 0; }
  ATTLAS_INLINE int64_t last(int64_t i) const { return high ? (high[i] < n ? high[i] : n) : n; }

  // The columns [left, right) that every row of [from, to) may see, as far as intervals say.
  void core(int64_t from, int64_t to, int64_t& left, int64_t& right) const {
    left = 0;
    right = n;
    for (int64_t i = from; low && i < to; ++i) {
      left = std::max(left, first(i));
      right = std::min(right, last(i));
    }
  }

  // Whether cells hide columns [left, left + width) from all rows of [from, from + some).
  bool hides(int64_t from, int64_t some, int64_t left, int64_t width) const {
    if (!allowed) return false;
    const int64_t stop = std::min(left + width, n);
    uint8_t any = 0;
    for (int64_t i = from; i < from + some && !any; ++i) {
      const uint8_t* cells = allowed + i * allowed_row;
      for (int64_t j = left; j < stop; ++j) any |= cells[j];
    }
    return !any;
  }

  // The columns that some row of [from, to) may see.
  void hull(int64_t from, int64_t to, int64_t& left, int64_t& right) const {
    left = n;
    right = 0;
    for (int64_t i = from; i < to; ++i) {
      const int64_t a = first(i), b = last(i);
      if (a >= b) continue;
      left = a < left ? a : left;
      right = b > right ? b : right;
    }
  }
};

// What a cap, or an unusual scale, makes of products.
template <class T>
ATTLAS_INLINE void cap_row(T* row, int64_t count, T scale, T cap) {
  if (cap > 0) {
    if constexpr (std::is_same_v<T, float>) {
      const T inner = scale / cap;
      for (int64_t j = 0; j < count; j += WIDTH<T>) store(row + j, tanh_(load(row + j) * inner) * cap);
    }
  } else if (!usual(scale)) {
    for (int64_t j = 0; j < count; j += WIDTH<T>) store(row + j, load(row + j) * scale);
  }
}

// What places say of them: `row` holds columns [from, to) of query i, a whole number of vectors.
template <class T>
ATTLAS_INLINE void place_row(T* row, const PlaceView& places, int64_t i, int64_t from, int64_t to) {
  int64_t first = places.first(i), last = places.last(i);
  first = first < from ? from : first > to ? to : first;
  last = last < first ? first : last > to ? to : last;
  if (places.has_bias) places.bias.add(row + (first - from), i, first, last);
  for (int64_t j = from; j < first; ++j) row[j - from] = -INF<T>;
  for (int64_t j = last; j < to; ++j) row[j - from] = -INF<T>;
  if (places.allowed) {
    const uint8_t* cells = places.allowed + i * places.allowed_row;
    for (int64_t j = first; j < last; ++j) row[j - from] = cells[j] ? row[j - from] : -INF<T>;
  }
}

// Turn products into logits.
template <class T>
ATTLAS_INLINE void finish_row(T* row, const PlaceView& places, int64_t i, int64_t from, int64_t to, T scale, T cap) {
  cap_row(row, to - from, scale, cap);
  place_row(row, places, i, from, to);
}

// What is wanted of logits that finish_row has made: a cap, an unusual scale and terms of places are in them.
template <class T>
struct Finished : attlas::AttentionParams {
  explicit Finished(const attlas::AttentionParams& p) : AttentionParams(p) {
    if (cap > 0 || !usual(T(scale))) scale = 1, cap = 0;
    by_distance = by_cell = {}, by_query = by_key = {};
  }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Products with the keys of one block of columns become weights while they are in registers: the few instructions of that run
// beside the multiplications of the next tile. All weights must be normal numbers.
template <class M, int64_t STRIDE>
struct Weighing {
  using V = Vec<float>;
  int64_t depth;  // of a query
  V factor;       // of the products, in powers of 2
  float tops[M::ROWS] = {};    // multiples of 1/8, which may be taken off ROUNDING without an error
  float shifts[M::ROWS] = {};  // ROUNDING less them
  V totals[M::ROWS] = {}, plogp[M::ROWS] = {};

  void set_max(int row, float top) {
    tops[row] = top;
    shifts[row] = ROUNDING - top;
  }

  template <bool OUT, bool PLOGP>
  void block(const float* queries, const float* keys, float* to) {
    tile<OUT, PLOGP, true>(0, queries, keys, to);
    for (int r = M::TILE; r < M::ROWS; r += M::TILE) tile<OUT, PLOGP, false>(r, queries, keys, to);
  }

 private:
  template <bool OUT, bool PLOGP, bool FETCH>
  ATTLAS_INLINE void tile(int from, const float* queries, const float* keys, float* to) {
    V s[M::TILE][M::VECTORS];
    M::template loop<FETCH, false>(queries + from * depth, depth, keys, depth, s);
#pragma GCC unroll 6
    for (int i = 0; i < M::TILE; ++i) {
      const V shift = all(shifts[from + i]), top = PLOGP ? all(tops[from + i]) : V{};
#pragma GCC unroll 2
      for (int x = 0; x < M::VECTORS; ++x) {
        const V rounded = s[i][x] * factor + shift, e = two_to_the(rounded, s[i][x] * factor - (rounded - shift));
        totals[from + i] += e;
        if (PLOGP) plogp[from + i] += e * (s[i][x] * factor - top);
        if (OUT) store(to + (from + i) * STRIDE + x * WIDTH<float>, e);
      }
    }
  }
};
#endif

}  // namespace ATTLAS_ISA
