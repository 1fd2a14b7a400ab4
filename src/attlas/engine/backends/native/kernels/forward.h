// The pass along the rows: output, log-sum-exp and one number or a few of each row, in one pass over the keys.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "largest.h"
#include "row_statistics.h"
#include "tile.h"

namespace ATTLAS_ISA {

// What a row has seen so far, of weights exp(logit - top), where top is its largest logit.
template <class T>
struct Row : RowSums<T, T> {
  T top = -INF<T>;
};

template <class M>
class Forward {
  using T = typename M::T;
  using Number = typename M::Number;
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr bool AT_ONCE = std::is_same_v<T, float>;  // whether products may become weights while they are in registers
#else
  static constexpr bool AT_ONCE = false;
#endif

 public:
  static constexpr int64_t CHUNK = 512;                        // keys taken together; a multiple of COLUMNS
  static constexpr int64_t STRIDE = CHUNK + 16;                // rows of logits that fall into different sets of the cache
  static constexpr int64_t DEPTH = M::Product::STEPS ? CHUNK : STRIDE;  // what a row of weights has room for

  // Rows of one task: many share what of K and V is in the cache, but their own numbers must fit there too, and there
  // must be work for all threads.
  static int64_t block_for(const attlas::AttentionParams& p, int q_parts) {
    const int64_t bytes = p.d * q_parts * int64_t(sizeof(Number)) + p.e * int64_t(sizeof(T)) + 1;
    int64_t rows = std::clamp<int64_t>((720 << 10) / bytes, 64, 1024);
    while (rows > 64 && p.batch * p.heads * ((p.m + rows - 1) / rows) < 4 * p.threads) rows /= 2;
    return round_up(rows, M::ROWS);
  }

  // Whether most logits need no look at, as only output, log-sum-exp and entropy are wanted.
  static bool at_once(const attlas::AttentionParams& p) {
    return AT_ONCE && p.cap == 0 && usual(T(p.scale)) && p.m >= 256 && p.n > CHUNK && !(row_sums_for(p) & ~(TOTALS | PLOGP));
  }

  Forward(const attlas::AttentionParams& problem, int64_t block, int q_parts, int k_parts, int p_parts, int v_parts)
      : p_(problem),
        q_parts_(q_parts),
        k_parts_(k_parts),
        p_parts_(p_parts),
        v_parts_(v_parts),
        transforms_logits_(problem.cap > 0 || !usual(T(problem.scale))),
        wanted_(row_sums_for(problem) & ~PEAKS),
        powers_(at_once(problem)),
        width_(round_up(problem.e, M::COLUMNS)),
        queries_(M::left_size(block, problem.d, q_parts)),
        logits_(2 * M::ROWS * STRIDE),
        weights_size_(M::left_size(M::ROWS, DEPTH, p_parts)),
        weights_(M::Product::STEPS ? 2 * weights_size_ : 0),
        pooled_(size_t(block) * width_),
        rows_(block),
        lengths_(block),
        largest_(block, problem.k_largest) {
    std::fill(logits_.data, logits_.data + 2 * M::ROWS * STRIDE, T(0));
  }

  // Logits, with the mask and the cap in them, stay in these rows from now on.
  void keep(T* rows, int64_t stride) {
    kept_ = rows;
    stride_ = stride;
    powers_ = false;
  }

  // Queries [first, first + count) of one head, count at most the block; `right` and `values` are its packed keys and values.
  template <class Read>
  void run(int64_t b, int64_t h, int64_t first, int64_t count, Read read, const Number* right, const Number* values) {
    M::pack_left(queries_.data, count, p_.d, q_parts_, read);
    if constexpr (AT_ONCE)
      for (int64_t i = 0; powers_ && i < count; ++i) lengths_[i] = length_of(queries_.at(i * p_.d)) * factor();
    const int64_t padded = round_up(count, M::ROWS);
    if (p_.out) std::memset(pooled_.data, 0, sizeof(T) * size_t(padded) * width_);
    std::fill(rows_.begin(), rows_.begin() + padded, Row<T>());
    largest_.clear();
    const MaskView mask(p_, b, h);
    mask_ = &mask;
    first_ = first;
    int64_t left, end;
    mask.hull(first, first + count, left, end);
    const int64_t begin = left / M::COLUMNS * M::COLUMNS;
    // A few keys show how large logits are, where that is all that is asked of them.
    for (int64_t start = begin, stop = begin + (powers_ ? 128 : CHUNK); start < end; start = stop, stop += CHUNK) {
      longest_ = powers_ && start > begin ? longest(right, start, std::min(stop, padded_keys())) : INF<T>;
      for (int64_t r = 0; r < padded; r += M::ROWS)
        strip(mask, first, r, std::min<int64_t>(count - r, M::ROWS), start, std::min(stop, end), right, values);
      settle(values);
    }
    finish(b, h, first, count);
  }

 private:
  // A strip of logits that was multiplied, where its weights go, and how many of its rows have become weights.
  struct Strip {
    T* logits;
    Number* weights;
    int64_t r, some, left, end, taken;
    bool gaps;  // whether a row may not see all of it
  };

  // What a product is multiplied by to be counted in the unit of the largest logits of the rows; log of that unit.
  T factor() const { return AT_ONCE && powers_ ? T(p_.scale / Weight<T>::UNIT) : factor_of<T>(p_); }
  double unit() const { return AT_ONCE && powers_ ? Weight<T>::UNIT : 1.0; }

  T length_of(const T* query) const {
    T square = 0;
    for (int64_t t = 0; t < p_.d; ++t) square += query[t] * query[t];
    return std::sqrt(square);
  }

  // The length of the longest key from start to stop.
  T longest(const Number* right, int64_t start, int64_t stop) const {
    V most_square{};
    if constexpr (AT_ONCE) {
      constexpr int SIDE = 8;  // vectors whose sums do not wait for each other
      for (int64_t j = start; j < stop; j += SIDE * W) {
        const T* keys[SIDE];
        V squares[SIDE] = {};
        for (int x = 0; x < SIDE; ++x) {
          const int64_t key = std::min(j + x * W, stop - W);
          keys[x] = M::right_at(right, key / M::COLUMNS * M::COLUMNS, 0, p_.d, k_parts_) + key % M::COLUMNS;
        }
        for (int64_t t = 0; t < p_.d; ++t)
#pragma GCC unroll 8
          for (int x = 0; x < SIDE; ++x) squares[x] += load(keys[x] + t * M::COLUMNS) * load(keys[x] + t * M::COLUMNS);
        for (const V& square : squares) most_square = larger<T>(most_square, square);
      }
    }
    return std::sqrt(most<T>(most_square));
  }

  // Whether weights are normal numbers, and not far above 1, whatever the keys of this chunk are: by Cauchy and Schwarz.
  // Then no logit needs to be compared.
  bool within_reach(int64_t r, int64_t some) const {
    if (!powers_ || some < M::ROWS) return false;
    for (int64_t i = r; i < r + some; ++i) {
      const T most = lengths_[i] * longest_, top = rows_[i].top;
      if (!(most - top < T(40) && most + top < T(125))) return false;
    }
    return true;
  }

  template <bool OUT, bool PLOGP>
  void weigh_at_once([[maybe_unused]] const Strip& strip, [[maybe_unused]] const Number* right) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (AT_ONCE) {
      const Flush flush;
      Weighing<M, STRIDE> weighing{p_.d, all(factor())};
      for (int i = 0; i < M::ROWS; ++i) weighing.take_top(i, rows_[strip.r + i].top);
      for (int64_t j = strip.left; j < strip.end; j += M::COLUMNS)
        weighing.template block<OUT, PLOGP>(M::left_at(queries_.data, strip.r, p_.d, q_parts_),
                                            M::right_at(right, j, 0, p_.d, k_parts_), strip.weights + (j - strip.left));
      for (int i = 0; i < M::ROWS; ++i) {
        rows_[strip.r + i].total += sum<T>(weighing.totals[i]);
        if (PLOGP) rows_[strip.r + i].plogp += T(double(sum<T>(weighing.plogp[i])) * unit());
      }
    }
#endif
  }

  // Rows r to r + ROWS against columns [start, stop). While they are multiplied, and the values with the weights of the rows
  // before last, the rows before become weights.
  void strip(const MaskView& mask, int64_t first, int64_t r, int64_t some, int64_t start, int64_t stop, const Number* right,
             const Number* values) {
    int64_t left, end;
    mask.hull(first + r, first + r + some, left, end);
    left = std::max(left / M::COLUMNS * M::COLUMNS, start);
    end = std::min(round_up(end, M::COLUMNS), round_up(stop, M::COLUMNS));
    while (left < end && mask.hides(first + r, some, left, M::COLUMNS)) left += M::COLUMNS;
    while (left < end && mask.hides(first + r, some, end - M::COLUMNS, M::COLUMNS)) end -= M::COLUMNS;
    if (left >= end) return;
    int64_t inner_left, inner_end;
    mask.core(first + r, first + r + some, inner_left, inner_end);
    const bool gaps = mask.allowed || left < inner_left || end > inner_end;
    T* logits = kept_ ? kept_ + r * stride_ + left : logits_.at(size_t(side_) * M::ROWS * STRIDE);
    const Strip next{logits, weights_at(logits), r, some, left, end, 0, gaps};
    if (!gaps && within_reach(r, some)) {
      if (!p_.out) return weigh_at_once<false, true>(next, right);
      p_.entropy ? weigh_at_once<true, true>(next, right) : weigh_at_once<true, false>(next, right);
      last_ = next;
      return pool(values);
    }
    if (!M::Product::STEPS) {
      for (int64_t j = left; j < end; j += M::COLUMNS)
        if (!mask.hides(first + r, some, j, M::COLUMNS))
          M::template multiply<false>(M::left_at(queries_.data, r, p_.d, q_parts_), q_parts_, p_.d,
                                      M::right_at(right, j, 0, p_.d, k_parts_), k_parts_, M::depth_of(p_.d),
                                      next.logits + (j - left), stride_);
      before_ = next;
      return settle(values);
    }
    keys_ = typename M::Product(M::left_at(queries_.data, r, p_.d, q_parts_), q_parts_, p_.d, k_parts_, STRIDE);
    for (int64_t j = left; j < end; j += M::COLUMNS)
      if (!mask.hides(first + r, some, j, M::COLUMNS))
        keys_.add(M::right_at(right, j, 0, p_.d, k_parts_), next.logits + (j - left));
    soften_all(values);
    before_ = next;
    side_ ^= 1;
  }

  // Where the weights of these logits go: into their place, unless products take other numbers or logits are kept.
  Number* weights_at(T* logits) const {
    if constexpr (M::Product::STEPS) {
      return weights_.at(size_t(side_) * weights_size_);
    } else {
      return kept_ ? logits_.data : logits;
    }
  }

  // All rows of the strip before, and the products that there are to do, side by side.
  void soften_all(const Number* values) {
    if constexpr (M::Product::STEPS) {
      values_ = typename M::Product();
      if (last_.logits) {
        values_ = typename M::Product(last_.weights, p_parts_, last_.end - last_.left, v_parts_, width_, DEPTH, true);
        for (int64_t j = 0; j < width_; j += M::COLUMNS)
          values_.add(M::right_at(values, j, last_.left, padded_keys(), v_parts_), pooled_.at(size_t(last_.r) * width_ + j));
      }
      now_ = values_.done() ? &keys_ : &values_;
      pending_ = 0;
      steps_ = values_.steps() + keys_.steps();
      vectors_ = before_.some * (before_.end - before_.left) / W;
    }
    const Flush flush;
    while (before_.logits && before_.taken < M::ROWS) advance();
    values_.finish();
    keys_.finish();
    last_ = before_;
    if (!p_.out) last_.logits = nullptr;
    before_.logits = nullptr;
  }

  // What is left to do of the strips before.
  void settle(const Number* values) {
    keys_ = typename M::Product();
    soften_all(values);
    if (M::Product::STEPS) return soften_all(values);
    pool(values);
  }

  // The values with the weights of the last strip.
  void pool(const Number* values) {
    for (int64_t j = 0; last_.logits && j < width_; j += M::COLUMNS)
      M::template multiply<true>(last_.weights, p_parts_, DEPTH, M::right_at(values, j, last_.left, padded_keys(), v_parts_),
                                 v_parts_, last_.end - last_.left, pooled_.at(size_t(last_.r) * width_ + j), width_);
    last_.logits = nullptr;
  }

  // Products that are due after so many vectors of a row.
  ATTLAS_INLINE void step(int vectors) {
    if constexpr (M::Product::STEPS)
      for (pending_ += vectors * steps_; pending_ >= vectors_; pending_ -= vectors_) {
        now_->template step<false>();
        if (now_->done()) now_ = &keys_;
      }
  }

  int64_t padded_keys() const { return round_up(p_.n, M::COLUMNS); }

  // The next rows of the strip before become weights: all of them, or one where products are under way. The largest logits
  // come first: no row's weights wait for them then.
  __attribute__((noinline)) void advance() {
    const int64_t from = before_.taken, to = M::Product::STEPS ? from + 1 : M::ROWS;
    const int64_t size = before_.end - before_.left;
    bool any[M::ROWS];
    for (int64_t i = from; i < to; ++i) any[i] = i < before_.some && find_top(i, size);
    for (int64_t i = from; i < to; ++i) {
      if (!any[i]) {
        if (p_.out) nothing(i, size);
      } else if (p_.out) {
        weigh_as_wanted<true>(i, size);
      } else {
        weigh_as_wanted<false>(i, size);
      }
    }
    before_.taken = to;
  }

  // Row i of the strip: from products to logits, and the largest of them; false where there is none.
  bool find_top(int64_t i, int64_t size) {
    T* logits = before_.logits + i * stride_;
    const int64_t r = before_.r + i, left = before_.left, end = before_.end;
    if (before_.gaps || transforms_logits_) finish_row<T>(logits, *mask_, first_ + r, left, end, T(p_.scale), T(p_.cap));
    V tops[4] = {all(-INF<T>), all(-INF<T>), all(-INF<T>), all(-INF<T>)};
    int64_t j = 0;
    for (; j + 4 * W <= size; j += 4 * W)
      for (int x = 0; x < 4; ++x) tops[x] = larger<T>(tops[x], load(logits + j + x * W));
    for (; j < size; j += W) tops[j / W % 4] = larger<T>(tops[j / W % 4], load(logits + j));
    const T peak = most<T>(larger<T>(larger<T>(tops[0], tops[1]), larger<T>(tops[2], tops[3])));
    if (peak == -INF<T>) return false;
    if (p_.top_keys) keep_largest(logits, left, size, r, tops);
    Row<T>& row = rows_[r];
    const T top = peak * factor();
    if (top > row.top) rescale(row, r, powers_ ? std::ceil(top * 8) / 8 : top);
    return true;
  }

  // Weights of a row that sees nothing here.
  void nothing(int64_t i, int64_t size) {
    const V zeros[2] = {};
    for (int64_t j = 0; j < size; j += 2 * W) M::put(before_.weights, i, j, DEPTH, p_parts_, zeros);
  }

  template <bool OUT>
  void weigh_as_wanted(int64_t i, int64_t size) {
    const int wanted = wanted_ | TOTALS | ((wanted_ & MOMENTS) && before_.gaps ? GAPS : 0);
    with_first_loop<TOTALS, TOTALS | SQUARES, TOTALS | PLOGP, TOTALS | PLOGP | SQUARES, TOTALS | PLOGP | MOMENTS,
                    TOTALS | PLOGP | MOMENTS | GAPS, ~0>(wanted, [&]<int LOOP>() { weigh<OUT, LOOP>(i, size); });
  }

  // A larger logit was found: what was summed before shrinks.
  void rescale(Row<T>& row, int64_t r, T top) {
    if (row.total > 0) {
      const T by = (row.top - top) * T(unit()), shrink = std::exp(by);
      row.multiply(shrink, by);
      if (p_.out) {
        T* pooled = pooled_.at(size_t(r) * width_);
        for (int64_t j = 0; j < width_; j += W) store(pooled + j, load(pooled + j) * shrink);
      }
    }
    row.top = top;
  }

  // Row i of the strip: from logits to weights, and what they add to the row's numbers.
  template <bool OUT, int WANTED>
  void weigh(int64_t i, int64_t size) {
    const T* logits = before_.logits + i * stride_;
    const T scale = factor_of<T>(p_);
    Row<T>& row = rows_[before_.r + i];
    // Two sums of each in turn wait less for each other, where there are registers for them.
    constexpr int SUMS = VECTOR_BYTES == 32 ? 1 : 2;
    VectorSums<T> sums[SUMS];
    const Shift<T> shift = Weight<T>::shift_of(double(row.top) * unit(), scale);
    const V factor = all(T(double(scale) / Weight<T>::UNIT)), high = all(shift.high), low = all(shift.low);
    const T centre = WANTED & MOMENTS ? centre_of(logits, size, scale, row) : T(0);
    for (int64_t j = 0; j < size; j += 2 * W) {  // COLUMNS is two vectors
      V e[2];
      for (int x = 0; x < 2; ++x) {
        const V logit = load(logits + j + x * W);
        const Weight<T> weight(logit, factor, high, low);
        e[x] = weight.e;
        sums[x % SUMS].template take<WANTED>(logit, weight, all(centre));
      }
      if (OUT) M::put(before_.weights, i, j, DEPTH, p_parts_, e);
      step(2);
    }
    if (SUMS > 1) sums[0].template add<WANTED>(sums[SUMS - 1]);
    row.add(sums[0], sums[0].template count<WANTED>(size), centre, scale, WANTED);
  }

  // A number near the mean of a row's logits, without the scale: that of what was seen before, or of a few in the middle.
  T centre_of(const T* logits, int64_t size, T scale, const Row<T>& row) const {
    if (row.moments.count > 0) return T(row.moments.mean / double(scale));
    const T mean = mean_in_the_middle(logits, size);
    return mean > -INF<T> ? mean : T(row.top / double(scale));
  }

  void keep_largest(const T* logits, int64_t left, int64_t size, int64_t r, const V* tops) {
    using Stretch = typename Largest<T>::Stretch;
    largest_.row(r).take(tops, 4, 4 * W, [&](int place) { return Stretch{logits + place * W, left + place * W, size - place * W}; });
  }

  void finish(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t head = b * p_.heads + h;
    const T* sinks = static_cast<const T*>(p_.sink);
    for (int64_t r = 0; r < count; ++r) {
      Row<T>& row = rows_[r];
      const T largest = row.top;
      const int64_t at = head * p_.m + first + r;
      T total = row.total;
      if (sinks && sinks[h] > -INF<T>) {
        const T sink = sinks[h] / T(unit());
        if (sink > row.top) rescale(row, r, sink);
        total = row.total + std::exp((sink - row.top) * T(unit()));
      }
      const bool empty = !(total > 0);
      const T share = empty ? T(0) : T(1) / total;
      const double lse = empty ? -INF<double> : double(row.top) * unit() + std::log(double(total));
      if (p_.lse && !p_.lse_known) p_.lse[at] = lse;
      if (p_.out) {
        T* to = static_cast<T*>(p_.out) + at * p_.e;
        const T* pooled = pooled_.at(size_t(r) * width_);
        for (int64_t j = 0; j < p_.e; ++j) to[j] = pooled[j] * share;
      }
      row.statistics(share, empty ? T(0) : std::log(total), largest).store(p_, at);
      largest_.store(p_, r, at, factor_of<T>(p_), lse);
    }
  }

  const attlas::AttentionParams& p_;
  const int q_parts_, k_parts_, p_parts_, v_parts_;
  const bool transforms_logits_;  // a cap or an unusual scale: logits are not just multiples of products
  const int wanted_;              // of RowSum; the largest logits are found anyway
  bool powers_;  // whether the largest logits of rows are counted in powers of 2, as multiples of 1/8
  const int64_t width_;
  Aligned<Number> queries_;
  Aligned<T> logits_;  // of two strips: one is multiplied while the other becomes weights
  T* kept_ = nullptr;
  int64_t stride_ = STRIDE;  // of the logits
  Strip before_{}, last_{};
  int side_ = 0;
  typename M::Product keys_, values_, *now_ = &keys_;  // that are under way; so many of their steps for so many vectors
  int64_t steps_ = 0, vectors_ = 1, pending_ = 0;
  int64_t first_ = 0;
  const MaskView* mask_ = nullptr;
  const size_t weights_size_;
  Aligned<Number> weights_;  // of two strips: one is multiplied with the values while the other becomes weights
  Aligned<T> pooled_;
  std::vector<Row<T>> rows_;
  std::vector<T> lengths_;  // of the queries
  T longest_ = 0;           // the length of the longest key of the chunk
  LargestOfRows<T> largest_;
};

}  // namespace ATTLAS_ISA
