// What the scores that are no dot product share: tiles of logits become weights, their sums, and pooled values.
#pragma once

#include <algorithm>
#include <cmath>

#include "abi_pairs.h"
#include "bias.h"
#include "logits.h"
#include "parallel.h"
#include "reader.h"
#include "whole.h"

namespace ATTLAS_ISA {

using attlas::PairwiseParams;

constexpr int ROWS = 12;  // rows of a tile: a multiple of four, and of the rows of the matrix product
template <class T>
constexpr int COLS = 2048 / int(sizeof(T));  // columns of a tile, which so takes 24 KiB
constexpr double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;
// Values of so many coordinates are pooled one coordinate at a time, longer ones by the matrix product.
constexpr int FEW_VALUES = 8;

// 2^x, exactly 0 where it would be below the normal numbers; x is below 127 (1023) and no NaN. exp2_() of AVX2 and
// AVX-512 gives that 0 only while a Flush lives.
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
  const Vec<float> r = (Vec<float>)_mm512_reduce_ps((__m512)x, 0x09);  // x less the whole number below it
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

// Calls f<d>() and returns true where d is from 1 to MOST; returns false for another d.
template <int MOST, class F>
bool with_constant(int64_t d, F f) {
  return [&]<int... D>(std::integer_sequence<int, D...>) {
    return ((d == D + 1 && (f.template operator()<D + 1>(), true)) || ...);
  }(std::make_integer_sequence<int, MOST>());
}

// Token i of one head.
template <class T>
inline const T* token(const attlas::Tensor4& t, int64_t b, int64_t h, int64_t i) {
  return static_cast<const T*>(t.data) + b * t.batch + h * t.head + i * t.row;
}

// The number of columns up to the end of the last chunk of COLS.
template <class T>
inline int64_t padded(int64_t columns) {
  return (columns + COLS<T> - 1) / COLS<T> * COLS<T>;
}

// Writes the tokens of one head as [chunk of COLS columns][coordinate][column], each number as map(number, coordinate).
// The columns beyond the last one repeat it.
template <class T, class Map>
void pack_columns(T* to, const attlas::Tensor4& from, int64_t b, int64_t h, int64_t n, int64_t d, Map map) {
  for (int64_t j0 = 0; j0 < n; j0 += COLS<T>) {
    T* chunk = to + j0 * d;
    for (int j = 0; j < COLS<T>; ++j) {
      const T* x = token<T>(from, b, h, j0 + j < n ? j0 + j : n - 1);
      for (int64_t c = 0; c < d; ++c) chunk[c * COLS<T> + j] = map(x[c], c);
    }
  }
}

// Rows of numbers; those beyond the last one repeat it.
template <class T>
struct Repeated {
  Reader<T, T> read;
  int64_t last;
  ATTLAS_INLINE Vec<T> vector(int64_t i, int64_t first, int64_t count) const {
    return read.vector(std::min(i, last), first, count);
  }
};

// The values of all heads, packed once: coordinate by coordinate for few of them, else as the matrix product reads them.
template <class T>
struct PackedValues {
  int64_t e = 0, width = 0, size = 0;  // coordinates; numbers of a row of pooled values; numbers of a packed head
  bool by_coordinate = true;
  Aligned<T> packed;

  PackedValues(const PairwiseParams& p, bool always_by_coordinate)
      : e(p.out || always_by_coordinate ? p.e : 0), by_coordinate(always_by_coordinate || e <= FEW_VALUES) {
    width = by_coordinate ? e : round_up(e, Whole<T>::COLUMNS);
    size = width * padded<T>(p.n);
    packed = Aligned<T>(size_t(p.batch * p.value_heads * size));
    attlas::share(size_t(p.batch * p.value_heads), p.threads, [&](size_t item, int) {
      const int64_t b = int64_t(item) / p.value_heads, h = int64_t(item) % p.value_heads;
      T* to = packed.data + int64_t(item) * size;
      if (!e) return;
      if (by_coordinate) {
        pack_columns<T>(to, p.values, b, h, p.n, e, [](T x, int64_t) { return x; });
      } else {
        const Reader<T, T> read{token<T>(p.values, b, h, 0), p.values.row};
        Whole<T>::pack_rows(to, 0, padded<T>(p.n), padded<T>(p.n), e, 1, Repeated<T>{read, p.n - 1});
      }
    });
  }
  const T* head(const PairwiseParams& p, int64_t b, int64_t h) const {
    return packed.data + (b * p.value_heads + h / (p.heads / p.value_heads)) * size;
  }
};

// Working memory of one thread: a tile, the slopes of its logits, pooled values, and what a score prepares of a block of
// rows.
template <class T>
struct Scratch {
  Aligned<T> tile, slopes, pooled, rows;
  int64_t first_row = 0;  // the prepared rows, where places are asked for them
  int some_rows = 0;
  Aligned<Vec<T>> pooled_lanes;  // [row][coordinate] where values are pooled by coordinate, `pooled` [row][coordinate] elsewhere

  Scratch(int64_t width, size_t row_numbers)
      : tile(size_t(ROWS) * COLS<T>),
        slopes(size_t(ROWS) * COLS<T>),
        pooled(size_t(ROWS) * size_t(width) + 1),
        rows(row_numbers),
        pooled_lanes(size_t(ROWS) * FEW_VALUES) {}

  void clear(const PackedValues<T>& layout) const {
    std::fill_n(pooled_lanes.data, ROWS * FEW_VALUES, Vec<T>{});
    if (!layout.by_coordinate) std::fill_n(pooled.data, ROWS * layout.width, T(0));
  }
  // Coordinate c of the pooled values of row r.
  T pooled_value(const PackedValues<T>& layout, int r, int64_t c) const {
    return layout.by_coordinate ? sum<T>(pooled_lanes[size_t(r) * FEW_VALUES + c]) : pooled[r * layout.width + c];
  }
};

// The mask of one head, which is given by row or by column.
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

  // Writes `hidden` over the cells that may not attend, and over those beyond the last column.
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

// The sums of a block of rows over the columns so far.
template <class T>
struct BlockSums {
  T shift[ROWS];           // what is subtracted from the logits, which are in powers of 2
  double max_logit[ROWS];
  Vec<T> total[ROWS];            // sums of the weights
  Vec<T> weighted_logits[ROWS];  // sums of weight times logit
};

template <class T>
ATTLAS_INLINE T finite_or_zero(T x) {
  return x == -INF<T> ? T(0) : x;
}

// Adds the weights of a tile times the values to the pooled values.
template <class T>
void pool(const T* tile, const T* values, int64_t padded_n, int64_t j0, int vectors, const PackedValues<T>& layout, Scratch<T>& s) {
  constexpr int W = WIDTH<T>;
  if (layout.by_coordinate) {
    const T* chunk = values + j0 * layout.e;
    const int e = int(layout.e);
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
        for (int k = 0; k < 4; ++k) s.pooled_lanes[size_t(r + k) * FEW_VALUES + c] += sums[k];
      }
    }
    return;
  }
  using M = Whole<T, ROWS / Whole<T>::TILE>;
  for (int64_t c = 0; c < layout.width; c += M::COLUMNS)
    M::template multiply<true>(tile, 1, COLS<T>, M::right_at(values, c, j0, padded_n, 1), 1, vectors * W,
                               s.pooled.data + c, layout.width);
}

// Multiplies the pooled values of row r by a factor.
template <class T>
void scale_pooled_row(int r, T factor, const PackedValues<T>& layout, Scratch<T>& s) {
  if (layout.by_coordinate) {
    for (int c = 0; c < int(layout.e); ++c) s.pooled_lanes[size_t(r) * FEW_VALUES + c] *= all(factor);
  } else {
    for (int64_t c = 0; c < layout.width; ++c) s.pooled[r * layout.width + c] *= factor;
  }
}

// A score: it computes tiles of logits, in powers of 2, or of weights that are not normalized yet.
template <class T>
struct Score {
  bool gives_weights = false;   // whether tiles are weights
  bool never_positive = false;  // whether logits are at most 0
  size_t row_numbers = 1;       // how many numbers prepare_rows() writes

  virtual ~Score() = default;
  // Prepares a block of rows in s.rows for the following calls; rows beyond the last one repeat it.
  virtual void prepare_rows(int64_t b, int64_t h, int64_t i0, int rows, Scratch<T>& s) const = 0;
  // Computes the tile of the prepared rows and of whole vectors of columns within one chunk, from j0 on, a multiple of their
  // width. `rows` is rounded up to a multiple of four.
  virtual void tile(int64_t b, int64_t h, int64_t j0, int vectors, T* to, int64_t stride, int rows, Scratch<T>& s) const = 0;
  void tile(int64_t b, int64_t h, int64_t j0, int vectors, T* to, Scratch<T>& s) const {
    tile(b, h, j0, vectors, to, COLS<T>, ROWS, s);
  }
  // Adds a whole tile of allowed cells to the sums and the pooled values without writing its logits; `values` are those
  // of the head. Returns false where the score cannot do so.
  virtual bool add_whole_tile(int64_t, int64_t, int64_t, const T*, const PackedValues<T>&, BlockSums<T>&, Scratch<T>&) const {
    return false;
  }
};

// Raises the shift of a row to a larger logit, and scales the sums so far accordingly.
template <class T>
ATTLAS_INLINE void rescale(const Score<T>& score, BlockSums<T>& sums, int r, T top, const PackedValues<T>& layout, Scratch<T>& s) {
  if (!(top > sums.shift[r])) return;
  if (score.never_positive && top > T(-64)) top = 0;  // near enough to every later logit
  if (sums.shift[r] != -INF<T>) {
    const T factor = std::exp2(sums.shift[r] - top);
    sums.total[r] *= all(factor);
    sums.weighted_logits[r] *= all(factor);
    scale_pooled_row(r, factor, layout, s);
  }
  sums.shift[r] = top;
}

// Limits x to where exp2_() is right, below 127 (1023) without AVX-512: for logits whose shift may be too small.
template <class T>
ATTLAS_INLINE Vec<T> clamp_exponent(Vec<T> x) {
#if defined(__AVX512F__)
  return x;
#else
  return smaller<T>(x, all(sizeof(T) == 4 ? T(126) : T(1022)));
#endif
}

// A log-sum-exp in powers of 2; where it is -infinity, all weights become 0.
template <class T>
Shift<T> shift_of(double lse) {
  return lse == -INF<double> ? Shift<T>{INF<T>, T(0)} : Shift<T>::of(lse * LOG2E);
}

// Adds one tile of logits (or of weights), which is masked already, to the sums of its rows. The weights replace the logits.
template <class T>
void add_tile(const PairwiseParams& p, const Score<T>& score, BlockSums<T>& sums, T* tile, const T* column_lse, int vectors,
              const PackedValues<T>& layout, Scratch<T>& s) {
  constexpr int W = WIDTH<T>;
  const int64_t padded_n = padded<T>(p.n);
  for (int r = 0; r < ROWS; ++r) {
    T* row = tile + r * COLS<T>;
    if (score.gives_weights) {
      Vec<T> total{}, moment{}, top{};
      for (int x = 0; x < vectors; ++x) {
        Vec<T> w = load(row + x * W);
        if (column_lse) store(row + x * W, w = w * load(column_lse + x * W));
        total += w;
        top = larger<T>(top, w);
        if (p.entropy) moment += w > Vec<T>{} ? w * log2_<T>(w) : Vec<T>{};
      }
      sums.total[r] += total;
      sums.weighted_logits[r] += moment;
      sums.max_logit[r] = std::max(sums.max_logit[r], std::log2(double(most<T>(top))));
      continue;
    }
    if (!column_lse) {
      Vec<T> top = all(-INF<T>);
      for (int x = 0; x < vectors; ++x) top = larger<T>(top, load(row + x * W));
      const T largest = most<T>(top);
      sums.max_logit[r] = std::max(sums.max_logit[r], double(largest));
      rescale(score, sums, r, largest, layout, s);
    }
    const Vec<T> shift = all(finite_or_zero(sums.shift[r]));
    Vec<T> total{}, moment{};
    for (int x = 0; x < vectors; ++x) {
      const Vec<T> logit = load(row + x * W);
      const Vec<T> w = column_lse ? exp2_(logit - load(column_lse + x * W) - load(column_lse + padded_n + x * W))
                                  : exp2_(logit - shift);
      store(row + x * W, w);
      total += w;
      if (p.entropy) moment += w > Vec<T>{} ? w * logit : Vec<T>{};
    }
    sums.total[r] += total;
    sums.weighted_logits[r] += moment;
  }
}

// Whether nothing is wanted of the weights but their sums and the pooled values.
inline bool wants_only_sums(const PairwiseParams& p) { return !p.entropy && !p.max_logit && !p.by_column && !p.statistics; }

// Sums a block of rows over all columns, and writes its results.
template <class T>
void sum_rows(const PairwiseParams& p, const Score<T>& score, const PackedValues<T>& layout, const T* column_lse, int64_t b, int64_t h,
              int64_t i0, Scratch<T>& s) {
  constexpr int W = WIDTH<T>;
  const int rows = int(std::min<int64_t>(ROWS, p.m - i0));
  const PairwiseMaskView<T> mask(p, b, h);
  const T* values = layout.head(p, b, h);
  const int64_t padded_n = padded<T>(p.n), row0 = (b * p.heads + h) * p.m + i0;
  BlockSums<T> sums;
  for (int r = 0; r < ROWS; ++r) {
    sums.shift[r] = -INF<T>;
    sums.max_logit[r] = -INF<double>;
    sums.total[r] = sums.weighted_logits[r] = Vec<T>{};
  }
  s.clear(layout);
  score.prepare_rows(b, h, i0, rows, s);
  for (int64_t j0 = 0; j0 < p.n; j0 += COLS<T>) {
    attlas::checkpoint();
    const int columns = int(std::min<int64_t>(COLS<T>, p.n - j0)), vectors = (columns + W - 1) / W;
    const auto cover = mask.cover(i0, rows, j0, columns);
    if (cover == PairwiseMaskView<T>::NONE) continue;
    if (wants_only_sums(p) && cover == PairwiseMaskView<T>::ALL && score.add_whole_tile(b, h, j0, values, layout, sums, s))
      continue;
    score.tile(b, h, j0, vectors, s.tile.data, s);
    if (cover == PairwiseMaskView<T>::SOME) mask.apply(s.tile.data, i0, rows, j0, columns, score.gives_weights ? T(0) : -INF<T>);
    add_tile(p, score, sums, s.tile.data, column_lse ? column_lse + j0 : nullptr, vectors, layout, s);
    if (layout.e) pool(s.tile.data, values, padded_n, j0, vectors, layout, s);
  }
  T *out = static_cast<T*>(p.out), *entropy = static_cast<T*>(p.entropy);
  double* lse = p.lse;
  T* max_logit = static_cast<T*>(p.max_logit);
  for (int r = 0; r < rows; ++r) {
    const double total = sum<T>(sums.total[r]), shift = score.gives_weights ? 0.0 : double(finite_or_zero(sums.shift[r]));
    const bool empty = total == 0;
    const double log2_sum = empty ? -INF<double> : shift + std::log2(total);
    if (lse) lse[row0 + r] = log2_sum * LN2;
    if (entropy) entropy[row0 + r] = empty ? T(0) : T((log2_sum - sum<T>(sums.weighted_logits[r]) / total) * LN2);
    if (max_logit) max_logit[row0 + r] = T(sums.max_logit[r] * LN2);
    const T by = p.by_column ? T(1) : empty ? T(0) : T(1 / total);
    T* to = out + (row0 + r) * layout.e;
    for (int64_t c = 0; c < layout.e; ++c) to[c] = s.pooled_value(layout, r, c) * by;
  }
}

// For each head, the log-sum-exp of each column in powers of 2, padded, then the rounding error of each of these numbers.
// Where tiles are weights, one over the sum instead. Columns that no row sees get weights 0.
template <class T>
Aligned<T> column_shifts(const PairwiseParams& p, bool gives_weights) {
  if (!p.by_column) return {};
  const int64_t padded_n = padded<T>(p.n);
  Aligned<T> out(size_t(p.batch * p.heads * 2 * padded_n));
  attlas::share(size_t(p.batch * p.heads), p.threads, [&](size_t item, int) {
    T* high = out.data + item * size_t(2 * padded_n);
    for (int64_t j = 0; j < padded_n; ++j) {
      const double x = j < p.n ? p.known[int64_t(item) * p.n + j] : -INF<double>;
      const Shift<T> shift = gives_weights ? Shift<T>{T(std::exp(-x)), T(0)} : shift_of<T>(x);
      high[j] = gives_weights && x == -INF<double> ? T(0) : shift.high;
      high[padded_n + j] = shift.low;
    }
  });
  return out;
}

// Sums all rows of all heads; threads share the blocks of rows.
template <class T>
void sum_all(const PairwiseParams& p, const Score<T>& score) {
  const PackedValues<T> layout(p, false);
  const Aligned<T> shifts = column_shifts<T>(p, score.gives_weights);
  const int64_t blocks = (p.m + ROWS - 1) / ROWS, padded_n = padded<T>(p.n);
  std::vector<Scratch<T>> scratch;
  for (int t = 0; t < std::max(1, p.threads); ++t) scratch.emplace_back(layout.width, score.row_numbers);
  attlas::share(size_t(p.batch * p.heads * blocks), p.threads, [&](size_t item, int thread) {
    const Flush flush;
    const int64_t head = int64_t(item) / blocks;
    const T* shift = p.by_column ? shifts.data + head * 2 * padded_n : nullptr;
    sum_rows(p, score, layout, shift, head / p.heads, head % p.heads, int64_t(item) % blocks * ROWS,
             scratch[size_t(thread)]);
  });
}

// The rows' side of what slopes_of() needs, for a block of rows.
template <class T>
struct SlopeRows {
  Aligned<T> left;  // [row][e]
  Shift<T> shift[ROWS];
  T delta[ROWS];

  explicit SlopeRows(int64_t e) : left(size_t(ROWS * e)) {}

  // Reads rows [row0, row0 + count), counted over all heads. Rows beyond the last one, and rows without keys, get weights 0.
  void read(const PairwiseParams& p, const attlas::Slopes& slopes, int64_t row0, int count) {
    for (int r = 0; r < ROWS; ++r) {
      const int64_t i = row0 + std::min(r, count - 1);
      std::copy_n(static_cast<const T*>(slopes.left) + i * p.e, p.e, left.data + r * p.e);
      if (p.by_column) continue;
      shift[r] = shift_of<T>(r < count ? p.known[i] : -INF<double>);
      delta[r] = static_cast<const T*>(slopes.delta)[i];
    }
  }
};

// Computes slope_ij = A_ij (left_i . right_j - delta) for the tile of logits s.tile: weights replace the logits, slopes
// go to s.slopes. Where the log-sum-exp belongs to the columns, so do shift and delta; elsewhere column_shift and
// column_delta are null.
template <class T>
void slopes_of(const SlopeRows<T>& rows, int64_t e, const T* right, const T* column_shift, int64_t padded_n, const T* column_delta,
               int vectors, Scratch<T>& s) {
  constexpr int W = WIDTH<T>;
  const T* left = rows.left.data;
  T *tile = s.tile.data, *slopes = s.slopes.data;
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
        const Vec<T> low = column_shift ? load(column_shift + padded_n + x * W) : all(rows.shift[r + i].low);
        const Vec<T> delta = column_delta ? load(column_delta + x * W) : all(rows.delta[r + i]);
        const Vec<T> w = exp2_(load(tile + place) - high - low);
        store(tile + place, w);
        store(slopes + place, w * (products[i] - delta));
      }
    }
  }
}

// The logits of a score as the statistics and the coverage pass read them.
template <class T>
class ScoreLogits final : public LogitSource<T> {
  static constexpr int W = WIDTH<T>;
  static_assert(LogitSource<T>::ROWS == ROWS);
  const PairwiseParams& p_;
  const Score<T>& score_;
  Scratch<T> scratch_;
  int64_t b_ = 0, h_ = 0;
  int rows_ = 0;

 public:
  ScoreLogits(const PairwiseParams& p, const Score<T>& score) : p_(p), score_(score), scratch_(0, score.row_numbers) {}

  void prepare_rows(int64_t b, int64_t h, int64_t first, int64_t some) override {
    b_ = b;
    h_ = h;
    rows_ = int(some);
    score_.prepare_rows(b, h, first, rows_, scratch_);
  }

  void fill(int64_t left, int64_t columns, T* to, int64_t stride) override {
    const int64_t end = std::min(left + columns, (p_.n + W - 1) / W * W);
    for (int64_t j = left, next; j < end; j = next) {
      attlas::checkpoint();
      next = std::min(end, (j / COLS<T> + 1) * COLS<T>);
      T* part = to + (j - left);
      score_.tile(b_, h_, j, int((next - j) / W), part, stride, rows_, scratch_);
      for (int r = 0; score_.gives_weights && r < rows_; ++r)
        for (int64_t x = 0; x < next - j; x += W) store(part + r * stride + x, log2_<T>(load(part + r * stride + x)));
    }
  }
};

// Adds the terms of places to a tile of logits in powers of 2: some rows from i0 on, columns from j0 on.
template <class T>
void add_places(const PairwiseParams& p, int64_t b, int64_t h, int64_t i0, int rows, int64_t j0, int64_t columns, T* tile,
                int64_t stride) {
  const BiasView terms(*p.places, b, h, LN2);
  for (int r = 0; r < rows; ++r) terms.add(tile + r * stride, i0 + r, j0, j0 + columns);
}

// Whether the terms of places, if there are any, are numbers that the kernels add.
template <class T>
bool places_in_range(const PairwiseParams& p) {
  return !p.places || biases_in_range<T>(*p.places);
}

// The logits of a score with the terms of places.
template <class T>
struct PlacedScore final : Score<T> {
  const PairwiseParams& p;
  const Score<T>& inner;

  PlacedScore(const PairwiseParams& params, const Score<T>& score) : p(params), inner(score) { this->row_numbers = score.row_numbers; }

  void prepare_rows(int64_t b, int64_t h, int64_t i0, int rows, Scratch<T>& s) const override {
    s.first_row = i0;
    s.some_rows = rows;
    inner.prepare_rows(b, h, i0, rows, s);
  }

  using Score<T>::tile;
  void tile(int64_t b, int64_t h, int64_t j0, int vectors, T* to, int64_t stride, int rows, Scratch<T>& s) const override {
    inner.tile(b, h, j0, vectors, to, stride, rows, s);
    for (int r = 0; inner.gives_weights && r < rows; ++r)
      for (int x = 0; x < vectors; ++x) store(to + r * stride + x * WIDTH<T>, log2_<T>(load(to + r * stride + x * WIDTH<T>)));
    add_places(p, b, h, s.first_row, std::min(rows, s.some_rows), j0, std::min<int64_t>(vectors * WIDTH<T>, p.n - j0), to, stride);
  }
};

// Computes what is wanted of a score: sums, or statistics where the log-sum-exp of each row is known.
template <class T>
void run_score(const PairwiseParams& p, const Score<T>& score) {
  const PlacedScore<T> placed(p, score);
  const Score<T>& whole = p.places ? static_cast<const Score<T>&>(placed) : score;
  if (!p.statistics) return sum_all<T>(p, whole);
  logit_statistics<T>(*p.statistics, [&] { return std::make_unique<ScoreLogits<T>>(p, whole); });
}

}  // namespace ATTLAS_ISA
