// What the scores that are no dot product share: tiles of logits become weights, sums and pooled values.
#pragma once

#include <algorithm>
#include <cmath>

#include "abi_pairs.h"
#include "logits.h"
#include "parallel.h"
#include "whole.h"

namespace ATTLAS_ISA {

using attlas::PairwiseParams;

constexpr int ROWS = 12;  // rows of a tile: whole blocks of the matrix product and of four
template <class T>
constexpr int COLS = 2048 / int(sizeof(T));  // columns of a tile: with it, 24 KiB
constexpr double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;
constexpr int FEW_VALUES = 8;  // up to here values are pooled one by one, above by the matrix product

// 2^x, exactly 0 where it would be below the normal numbers; x is below 127 (1023) and no NaN. Where it is made by a scale of
// powers or by two_to_the, a Flush must live.
template <class T>
ATTLAS_INLINE Vec<T> exp2_of(Vec<T> x) {
  using V = Vec<T>;
  constexpr bool SINGLE = sizeof(T) == 4;
  const V low = all(T(SINGLE ? -126 : -1022)), magic = all(T(SINGLE ? 0x1.8p23 : 0x1.8p52));  // rounds to a whole number
  const V y = larger<T>(x, low);
  V n = y + magic;
  const Ints<T> k = (Ints<T>)n;
  n -= magic;
  const V r = y - n;
  V p;
  if constexpr (SINGLE) {
    p = polynomial(r, 1.3276472048775164e-3f, 9.675541384702224e-3f, 5.5507132737609446e-2f, 2.4022119722914145e-1f,
                   6.931469670643274e-1f, 1.0f);
  } else {
    p = polynomial(r, 4.4549605981865186e-10, 7.072585949269223e-09, 1.0178062445845774e-07, 1.321544258792169e-06,
                   1.525273382983612e-05, 0.0001540353044173605, 0.0013333558146416936, 0.009618129107606888, 0.0555041086648216,
                   0.24022650695910097, 0.6931471805599453, 1.0);
  }
  return x < low ? V{} : (V)((Ints<T>)p + (k << (SINGLE ? 23 : 52)));
}

ATTLAS_INLINE Vec<float> exp2_(Vec<float> x) {
#if defined(__AVX512F__)
  const Vec<float> r = (Vec<float>)_mm512_reduce_ps((__m512)x, 0x09);  // less the whole number below, without exceptions
  const Vec<float> p = polynomial(r, 1.8775766831278101e-3f, 8.9893401417334698e-3f, 5.5826317934704044e-2f,
                                  2.4015361712238548e-1f, 6.931530731823882e-1f, 9.999999250645499e-1f);
  return (Vec<float>)_mm512_maskz_scalef_ps(__mmask16(-1), (__m512)p, (__m512)x);
#elif defined(__AVX2__)
  const Vec<float> y = larger<float>(x, all(-127.0f)), rounded = y + all(ROUNDING);
  return two_to_the(rounded, y - (rounded - all(ROUNDING)));
#else
  return exp2_of<float>(x);
#endif
}

ATTLAS_INLINE Vec<double> exp2_(Vec<double> x) {
#if defined(__AVX512F__)
  return (Vec<double>)power_of_two((__m512d)x, above_sixteenth((__m512d)x));
#else
  return exp2_of<double>(x);
#endif
}

// Calls f<D>() where D is d, from 1 to MOST, and returns true; false for another d.
template <int MOST, class F>
bool with_constant(int64_t d, F f) {
  return [&]<int... D>(std::integer_sequence<int, D...>) {
    return ((d == D + 1 && (f.template operator()<D + 1>(), true)) || ...);
  }(std::make_integer_sequence<int, MOST>());
}

template <class T>
inline const T* token(const attlas::Tensor4& t, int64_t b, int64_t h, int64_t i) {
  return static_cast<const T*>(t.data) + b * t.batch + h * t.head + i * t.row;
}

template <class T>
inline int64_t padded(int64_t columns) {
  return (columns + COLS<T> - 1) / COLS<T> * COLS<T>;
}

// Tokens of one head as [chunk of COLS columns][coordinate][column]: a chunk lies together, whatever their number.
template <class T, class Map>
void pack_major(T* to, const attlas::Tensor4& from, int64_t b, int64_t h, int64_t n, int64_t d, Map map) {
  for (int64_t j0 = 0; j0 < n; j0 += COLS<T>) {
    T* chunk = to + j0 * d;
    for (int j = 0; j < COLS<T>; ++j) {
      const T* x = token<T>(from, b, h, j0 + j < n ? j0 + j : n - 1);
      for (int64_t c = 0; c < d; ++c) chunk[c * COLS<T> + j] = map(x[c], c);
    }
  }
}

// Values of all heads, packed once: one by one for few of them, else for the matrix product.
template <class T>
struct Values {
  int64_t e = 0, width = 0, size = 0;  // width: numbers of a row of the pooled sums
  bool few = true;
  Aligned<T> packed;

  Values(const PairwiseParams& p, bool major) : e(p.out || major ? p.e : 0), few(major || e <= FEW_VALUES) {
    width = few ? e : round_up(e, Whole<T>::COLUMNS);
    size = width * padded<T>(p.n);
    packed = Aligned<T>(size_t(p.batch * p.value_heads * size));
    attlas::share(size_t(p.batch * p.value_heads), p.threads, [&](size_t item, int) {
      const int64_t b = int64_t(item) / p.value_heads, h = int64_t(item) % p.value_heads;
      T* to = packed.data + int64_t(item) * size;
      if (!e) return;
      if (few) {
        pack_major<T>(to, p.values, b, h, p.n, e, [](T x, int64_t) { return x; });
      } else {
        Whole<T>::pack_rows(to, 0, padded<T>(p.n), padded<T>(p.n), e, 1,
                            [&](int64_t j, int64_t c) { return token<T>(p.values, b, h, std::min(j, p.n - 1))[c]; });
      }
    });
  }
  const T* head(const PairwiseParams& p, int64_t b, int64_t h) const {
    return packed.data + (b * p.value_heads + h / (p.heads / p.value_heads)) * size;
  }
};

// Memory of one thread.
template <class T>
struct Scratch {
  Aligned<T> tile, other, pooled, rows;
  Aligned<Vec<T>> lanes;  // of the sums of each row

  Scratch(int64_t width, size_t row_numbers)
      : tile(size_t(ROWS) * COLS<T>),
        other(size_t(ROWS) * COLS<T>),
        pooled(size_t(ROWS) * size_t(width) + 1),
        rows(row_numbers),
        lanes(size_t(ROWS) * FEW_VALUES) {}

  void clear(const Values<T>& form) const {
    std::fill_n(lanes.data, ROWS * FEW_VALUES, Vec<T>{});
    if (!form.few) std::fill_n(pooled.data, ROWS * form.width, T(0));
  }
  // The pooled values of a row.
  T sum_of(const Values<T>& form, int r, int64_t c) const {
    return form.few ? sum<T>(lanes[size_t(r) * FEW_VALUES + c]) : pooled[r * form.width + c];
  }
};

// The mask of one head, seen from rows and columns.
template <class T>
struct PairwiseMaskView {
  const int32_t *low, *high;
  const uint8_t* allowed;
  int64_t row_step, column_step;  // of the bytes
  int64_t n;
  bool by_column;

  PairwiseMaskView(const PairwiseParams& p, int64_t b, int64_t h)
      : low(p.low ? p.low + b * p.span_batch + h * p.span_head : nullptr),
        high(p.low ? p.high + b * p.span_batch + h * p.span_head : nullptr),
        allowed(p.allowed ? p.allowed + b * p.allowed_batch + h * p.allowed_head : nullptr),
        row_step(p.by_column ? 1 : p.allowed_row),
        column_step(p.by_column ? p.allowed_row : 1),
        n(p.n),
        by_column(p.by_column != 0) {}

  // Whether a tile has no cell that may attend (NONE), only such cells (ALL), or both.
  enum Cover { NONE, SOME, ALL };
  Cover cover(int64_t i0, int rows, int64_t j0, int columns) const {
    if (!low) return allowed || columns < COLS<T> ? SOME : ALL;
    const int64_t first = by_column ? j0 : i0, last = first + (by_column ? columns : rows);
    const int64_t start = by_column ? i0 : j0, stop = start + (by_column ? rows : columns);
    bool any = false, every = true;
    for (int64_t x = first; x < last; ++x) {
      any |= low[x] < stop && high[x] > start && low[x] < high[x];
      every &= low[x] <= start && high[x] >= stop;
    }
    if (!any) return NONE;
    return every && !allowed && columns == COLS<T> ? ALL : SOME;
  }

  // Write `hidden` over the cells that may not attend, and over those beyond the last column.
  void apply(T* tile, int64_t i0, int rows, int64_t j0, int columns, T hidden) const {
    for (int r = 0; r < rows; ++r) {
      T* row = tile + r * COLS<T>;
      if (low && !by_column) {
        const int from = int(std::max<int64_t>(0, std::min<int64_t>(columns, low[i0 + r] - j0)));
        const int to = int(std::max<int64_t>(from, std::min<int64_t>(columns, high[i0 + r] - j0)));
        for (int j = 0; j < from; ++j) row[j] = hidden;
        for (int j = to; j < columns; ++j) row[j] = hidden;
      } else if (low) {
        const int64_t i = i0 + r;
        for (int j = 0; j < columns; ++j)
          if (i < low[j0 + j] || i >= high[j0 + j]) row[j] = hidden;
      }
      if (allowed) {
        const uint8_t* cells = allowed + (i0 + r) * row_step + j0 * column_step;
        for (int j = 0; j < columns; ++j)
          if (!cells[j * column_step]) row[j] = hidden;
      }
      for (int j = columns; j % WIDTH<T>; ++j) row[j] = hidden;
    }
  }
};

// The rows of one block as they are summed.
template <class T>
struct Running {
  T shift[ROWS];     // what is taken off the logits, in powers of 2
  double top[ROWS];  // largest logit
  Vec<T> total[ROWS];
  Vec<T> moment[ROWS];  // sum of weight times logit
};

template <class T>
ATTLAS_INLINE T finite(T x) {
  return x == -INF<T> ? T(0) : x;
}

// Weights of a tile times the values: into lanes for few of them, else into rows.
template <class T>
void pool(const T* tile, const T* values, int64_t whole, int64_t j0, int vectors, const Values<T>& form, Scratch<T>& s) {
  constexpr int W = WIDTH<T>;
  if (form.few) {
    const T* chunk = values + j0 * form.e;
    const int e = int(form.e);
    for (int r = 0; r < ROWS; r += 4) {
      for (int c = 0; c < e; ++c) {
        Vec<T> sums[4] = {};
        const T* v = chunk + c * COLS<T>;
        const T* w = tile + r * COLS<T>;
        for (int x = 0; x < vectors; ++x) {
          const Vec<T> value = load(v + x * W);
#pragma GCC unroll 4
          for (int k = 0; k < 4; ++k) sums[k] += load(w + k * COLS<T> + x * W) * value;
        }
        for (int k = 0; k < 4; ++k) s.lanes[size_t(r + k) * FEW_VALUES + c] += sums[k];
      }
    }
    return;
  }
  using M = Whole<T, ROWS / Whole<T>::TILE>;
  for (int64_t c = 0; c < form.width; c += M::COLUMNS)
    M::template multiply<true>(tile, 1, COLS<T>, M::right_at(values, c, j0, whole, 1), 1, vectors * W, s.pooled.data + c, form.width);
}

template <class T>
void scale_row(int r, T by, const Values<T>& form, Scratch<T>& s) {
  if (form.few) {
    for (int c = 0; c < int(form.e); ++c) s.lanes[size_t(r) * FEW_VALUES + c] *= all(by);
  } else {
    for (int64_t c = 0; c < form.width; ++c) s.pooled[r * form.width + c] *= by;
  }
}

// What a score gives: tiles of logits in powers of 2, or of weights before they are normed.
template <class T>
struct Score {
  bool linear = false;          // tiles are weights
  bool never_positive = false;  // logits are at most 0
  size_t row_numbers = 1;       // how many numbers `take_rows` keeps

  virtual ~Score() = default;
  // Prepare a block of rows in s.rows; those beyond the last row repeat it.
  virtual void take_rows(int64_t b, int64_t h, int64_t i0, int rows, Scratch<T>& s) const = 0;
  // Vectors of columns from j0 on, a multiple of their width, within one chunk. Fours of rows, as many as hold `rows`.
  virtual void tile(int64_t b, int64_t h, int64_t j0, int vectors, T* to, int64_t stride, int rows, Scratch<T>& s) const = 0;
  void tile(int64_t b, int64_t h, int64_t j0, int vectors, T* to, Scratch<T>& s) const {
    tile(b, h, j0, vectors, to, COLS<T>, ROWS, s);
  }
  // Add a whole tile of allowed cells to the sums at once; false where that cannot be done. The values are the head's.
  virtual bool fused(int64_t, int64_t, int64_t, const T*, const Values<T>&, Running<T>&, Scratch<T>&) const {
    return false;
  }
};

// A new largest logit of a row: what was summed so far is brought to it.
template <class T>
ATTLAS_INLINE void rescale(const Score<T>& score, Running<T>& run, int r, T top, const Values<T>& form, Scratch<T>& s) {
  if (!(top > run.shift[r])) return;
  if (score.never_positive && top > T(-64)) top = 0;  // near enough: no later key can be too large
  if (run.shift[r] != -INF<T>) {
    const T by = std::exp2(run.shift[r] - top);
    run.total[r] *= all(by);
    run.moment[r] *= all(by);
    scale_row(r, by, form, s);
  }
  run.shift[r] = top;
}

// Where a shift is not known to be large enough: without AVX-512, 2^x is right below 127 (1023) only.
template <class T>
ATTLAS_INLINE Vec<T> in_reach(Vec<T> x) {
#if defined(__AVX512F__)
  return x;
#else
  return smaller<T>(x, all(sizeof(T) == 4 ? T(126) : T(1022)));
#endif
}

// A log-sum-exp in powers of 2. What sees no key gets weights 0.
template <class T>
Shift<T> shift_of(double lse) {
  return lse == -INF<double> ? Shift<T>{INF<T>, T(0)} : Shift<T>::of(lse * LOG2E);
}

// One tile of logits (or of weights), masked, joins the sums of its rows.
template <class T>
void absorb(const PairwiseParams& p, const Score<T>& score, Running<T>& run, T* tile, const T* column_lse, int vectors, const Values<T>& form,
            Scratch<T>& s) {
  constexpr int W = WIDTH<T>;
  const int64_t whole = padded<T>(p.n);
  for (int r = 0; r < ROWS; ++r) {
    T* row = tile + r * COLS<T>;
    if (score.linear) {
      Vec<T> total{}, moment{}, top{};
      for (int x = 0; x < vectors; ++x) {
        Vec<T> w = load(row + x * W);
        if (column_lse) store(row + x * W, w = w * load(column_lse + x * W));
        total += w;
        top = larger<T>(top, w);
        if (p.entropy) moment += w > Vec<T>{} ? w * log2_<T>(w) : Vec<T>{};
      }
      run.total[r] += total;
      run.moment[r] += moment;
      run.top[r] = std::max(run.top[r], std::log2(double(most<T>(top))));
      continue;
    }
    if (!column_lse) {
      Vec<T> top = all(-INF<T>);
      for (int x = 0; x < vectors; ++x) top = larger<T>(top, load(row + x * W));
      const T largest = most<T>(top);
      run.top[r] = std::max(run.top[r], double(largest));
      rescale(score, run, r, largest, form, s);
    }
    const Vec<T> shift = all(finite(run.shift[r]));
    Vec<T> total{}, moment{};
    for (int x = 0; x < vectors; ++x) {
      const Vec<T> logit = load(row + x * W);
      const Vec<T> w = column_lse ? exp2_(logit - load(column_lse + x * W) - load(column_lse + whole + x * W))
                                  : exp2_(logit - shift);
      store(row + x * W, w);
      total += w;
      if (p.entropy) moment += w > Vec<T>{} ? w * logit : Vec<T>{};
    }
    run.total[r] += total;
    run.moment[r] += moment;
  }
}

// Whether no more is asked of the logits than their sums.
inline bool simple(const PairwiseParams& p) { return !p.entropy && !p.max_logit && !p.by_column && !p.statistics; }

// Sums of a block of rows over all columns.
template <class T>
void sum_rows(const PairwiseParams& p, const Score<T>& score, const Values<T>& form, const T* column_lse, int64_t b, int64_t h,
              int64_t i0, Scratch<T>& s) {
  constexpr int W = WIDTH<T>;
  const int rows = int(std::min<int64_t>(ROWS, p.m - i0));
  const PairwiseMaskView<T> mask(p, b, h);
  const T* values = form.head(p, b, h);
  const int64_t whole = padded<T>(p.n), row0 = (b * p.heads + h) * p.m + i0;
  Running<T> run;
  for (int r = 0; r < ROWS; ++r) {
    run.shift[r] = -INF<T>;
    run.top[r] = -INF<double>;
    run.total[r] = run.moment[r] = Vec<T>{};
  }
  s.clear(form);
  score.take_rows(b, h, i0, rows, s);
  for (int64_t j0 = 0; j0 < p.n; j0 += COLS<T>) {
    const int columns = int(std::min<int64_t>(COLS<T>, p.n - j0)), vectors = (columns + W - 1) / W;
    const auto cover = mask.cover(i0, rows, j0, columns);
    if (cover == PairwiseMaskView<T>::NONE) continue;
    if (simple(p) && cover == PairwiseMaskView<T>::ALL && score.fused(b, h, j0, values, form, run, s)) continue;
    score.tile(b, h, j0, vectors, s.tile.data, s);
    if (cover == PairwiseMaskView<T>::SOME) mask.apply(s.tile.data, i0, rows, j0, columns, score.linear ? T(0) : -INF<T>);
    absorb(p, score, run, s.tile.data, column_lse ? column_lse + j0 : nullptr, vectors, form, s);
    if (form.e) pool(s.tile.data, values, whole, j0, vectors, form, s);
  }
  T *out = static_cast<T*>(p.out), *entropy = static_cast<T*>(p.entropy);
  double* lse = p.lse;
  T* max_logit = static_cast<T*>(p.max_logit);
  for (int r = 0; r < rows; ++r) {
    const double total = sum<T>(run.total[r]), shift = score.linear ? 0.0 : double(finite(run.shift[r]));
    const bool nothing = total == 0;
    const double found = nothing ? -INF<double> : shift + std::log2(total);
    if (lse) lse[row0 + r] = found * LN2;
    if (entropy) entropy[row0 + r] = nothing ? T(0) : T((found - sum<T>(run.moment[r]) / total) * LN2);
    if (max_logit) max_logit[row0 + r] = T(run.top[r] * LN2);
    const T by = p.by_column ? T(1) : nothing ? T(0) : T(1 / total);
    T* to = out + (row0 + r) * form.e;
    for (int64_t c = 0; c < form.e; ++c) to[c] = s.sum_of(form, r, c) * by;
  }
}

// The log-sum-exp of each column in powers of 2, padded, then what each of these numbers lacks; one over the sum where
// tiles are weights. Columns without any key get weights 0.
template <class T>
Aligned<T> column_shifts(const PairwiseParams& p, bool linear) {
  if (!p.by_column) return {};
  const int64_t whole = padded<T>(p.n);
  Aligned<T> out(size_t(p.batch * p.heads * 2 * whole));
  attlas::share(size_t(p.batch * p.heads), p.threads, [&](size_t item, int) {
    T* high = out.data + item * size_t(2 * whole);
    for (int64_t j = 0; j < whole; ++j) {
      const double x = j < p.n ? p.known[int64_t(item) * p.n + j] : -INF<double>;
      const Shift<T> shift = linear ? Shift<T>{T(std::exp(-x)), T(0)} : shift_of<T>(x);
      high[j] = linear && x == -INF<double> ? T(0) : shift.high;
      high[whole + j] = shift.low;
    }
  });
  return out;
}

// All rows of all heads, shared by the threads.
template <class T>
void sum_all(const PairwiseParams& p, const Score<T>& score) {
  const Values<T> form(p, false);
  const Aligned<T> shifts = column_shifts<T>(p, score.linear);
  const int64_t blocks = (p.m + ROWS - 1) / ROWS, whole = padded<T>(p.n);
  std::vector<Scratch<T>> scratch;
  for (int t = 0; t < std::max(1, p.threads); ++t) scratch.emplace_back(form.width, score.row_numbers);
  attlas::share(size_t(p.batch * p.heads * blocks), p.threads, [&](size_t item, int thread) {
    const Flush flush;
    const int64_t head = int64_t(item) / blocks;
    const T* shift = p.by_column ? shifts.data + head * 2 * whole : nullptr;
    sum_rows(p, score, form, shift, head / p.heads, head % p.heads, int64_t(item) % blocks * ROWS,
             scratch[size_t(thread)]);
  });
}

// What the slopes of a block of rows are made with.
template <class T>
struct SlopeRows {
  Aligned<T> left;  // [row][e]
  Shift<T> shift[ROWS];
  T delta[ROWS];

  explicit SlopeRows(int64_t e) : left(size_t(ROWS * e)) {}

  // Rows row0 to row0 + count of all heads' rows. Those beyond the last, and rows without keys, have weights 0.
  void take(const PairwiseParams& p, const attlas::Slopes& slopes, int64_t row0, int count) {
    for (int r = 0; r < ROWS; ++r) {
      const int64_t i = row0 + std::min(r, count - 1);
      std::copy_n(static_cast<const T*>(slopes.left) + i * p.e, p.e, left.data + r * p.e);
      if (p.by_column) continue;
      shift[r] = shift_of<T>(r < count ? p.known[i] : -INF<double>);
      delta[r] = static_cast<const T*>(slopes.delta)[i];
    }
  }
};

// slope_ij = A_ij (left_i . right_j - delta) for a tile of logits: weights take their place in s.tile, slopes go to s.other.
// Columns have a shift and a delta of their own where the log-sum-exp belongs to them; else these are null.
template <class T>
void slopes_of(const SlopeRows<T>& rows, int64_t e, const T* right, const T* column_shift, int64_t whole, const T* column_delta,
               int vectors, Scratch<T>& s) {
  constexpr int W = WIDTH<T>;
  const T* left = rows.left.data;
  T *tile = s.tile.data, *slopes = s.other.data;
  for (int r = 0; r < ROWS; r += 4) {
    for (int x = 0; x < vectors; ++x) {
      Vec<T> products[4] = {};
      for (int64_t c = 0; c < e; ++c) {
        const Vec<T> value = load(right + c * COLS<T> + x * W);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) products[i] += all(left[(r + i) * e + c]) * value;
      }
      for (int i = 0; i < 4; ++i) {
        const int64_t place = (r + i) * COLS<T> + x * W;
        const Vec<T> high = column_shift ? load(column_shift + x * W) : all(rows.shift[r + i].high);
        const Vec<T> low = column_shift ? load(column_shift + whole + x * W) : all(rows.shift[r + i].low);
        const Vec<T> delta = column_delta ? load(column_delta + x * W) : all(rows.delta[r + i]);
        const Vec<T> w = exp2_(load(tile + place) - high - low);
        store(tile + place, w);
        store(slopes + place, w * (products[i] - delta));
      }
    }
  }
}

// The tiles of a score as the other passes take them.
template <class T>
class FromScore final : public Logits<T> {
  static constexpr int W = WIDTH<T>;
  static_assert(Logits<T>::ROWS == ROWS);
  const PairwiseParams& p_;
  const Score<T>& score_;
  Scratch<T> scratch_;
  int64_t b_ = 0, h_ = 0;
  int rows_ = 0;

 public:
  FromScore(const PairwiseParams& p, const Score<T>& score) : p_(p), score_(score), scratch_(0, score.row_numbers) {}

  void take_rows(int64_t b, int64_t h, int64_t first, int64_t some) override {
    b_ = b;
    h_ = h;
    rows_ = int(some);
    score_.take_rows(b, h, first, rows_, scratch_);
  }

  void fill(int64_t left, int64_t columns, T* to, int64_t stride) override {
    const int64_t end = std::min(left + columns, (p_.n + W - 1) / W * W);
    for (int64_t j = left, next; j < end; j = next) {
      next = std::min(end, (j / COLS<T> + 1) * COLS<T>);
      T* part = to + (j - left);
      score_.tile(b_, h_, j, int((next - j) / W), part, stride, rows_, scratch_);
      for (int r = 0; score_.linear && r < rows_; ++r)
        for (int64_t x = 0; x < next - j; x += W) store(part + r * stride + x, log2_<T>(load(part + r * stride + x)));
    }
  }
};

// What is wanted of a score: sums, or statistics with the log-sum-exp of each row known.
template <class T>
void run_score(const PairwiseParams& p, const Score<T>& score) {
  if (!p.statistics) return sum_all<T>(p, score);
  logit_statistics<T>(*p.statistics, [&] { return std::make_unique<FromScore<T>>(p, score); });
}

}  // namespace ATTLAS_ISA
