// The forward pass: output, log-sum-exp and the statistics of each row, in one pass over the keys.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "largest.h"
#include "row_statistics.h"
#include "tile.h"

namespace ATTLAS_ISA {

// The sums of a row so far, of weights exp(logit - max_logit).
template <class T>
struct Row : RowSums<T, T> {
  T max_logit = -INF<T>;
};

template <class M>
class Forward {
  using T = typename M::T;
  using Number = typename M::Number;
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr bool IN_REGISTERS = std::is_same_v<T, float>;  // whether products can become weights in registers
#else
  static constexpr bool IN_REGISTERS = false;
#endif

 public:
  static constexpr int64_t CHUNK = 512;  // most keys of a strip; a multiple of COLUMNS
  static constexpr int64_t STRIDE = CHUNK + 16;  // from one row of logits to the next: rows fall into different sets of the cache
  static constexpr int64_t DEPTH = M::Product::STEPS ? CHUNK : STRIDE;  // from one row of weights to the next

  // The number of rows of a task, its block: many rows share the keys and values in the cache, but their own numbers must
  // fit there too, and there must be tasks for all threads.
  static int64_t block_for(const attlas::AttentionParams& p, int q_parts) {
    const int64_t bytes = p.d * q_parts * int64_t(sizeof(Number)) + p.e * int64_t(sizeof(T)) + 1;
    int64_t rows = std::clamp<int64_t>((720 << 10) / bytes, 64, 1024);
    while (rows > 64 && p.batch * p.heads * ((p.m + rows - 1) / rows) < 4 * p.threads) rows /= 2;
    return round_up(rows, M::ROWS);
  }

  // Whether most logits are not compared with the largest, as only output, log-sum-exp and entropy are wanted.
  static bool compares_few_logits(const attlas::AttentionParams& p) {
    return IN_REGISTERS && !transforms_logits<T>(p) && p.m >= 256 && p.n > CHUNK && !(row_sums_for(p) & ~(TOTALS | PLOGP));
  }

  Forward(const attlas::AttentionParams& problem, int64_t block, int q_parts, int k_parts, int p_parts, int v_parts)
      : p_(problem),
        q_parts_(q_parts),
        k_parts_(k_parts),
        p_parts_(p_parts),
        v_parts_(v_parts),
        transforms_logits_(transforms_logits<T>(problem)),
        wanted_(row_sums_for(problem) & ~MAXIMA),
        in_powers_of_two_(compares_few_logits(problem)),
        width_(round_up(problem.e, M::COLUMNS)),
        queries_(M::left_size(block, problem.d, q_parts)),
        logits_(2 * M::ROWS * STRIDE),
        weights_size_(M::left_size(M::ROWS, DEPTH, p_parts)),
        weights_(M::Product::STEPS ? 2 * weights_size_ : 0),
        pooled_(size_t(block) * width_),
        rows_(block),
        query_norms_(block),
        largest_(block, problem.k_largest) {
    std::fill(logits_.data, logits_.data + 2 * M::ROWS * STRIDE, T(0));
  }

  // Writes all logits, with the mask and the cap in them, to these rows from now on.
  void keep_logits(T* rows, int64_t stride) {
    kept_ = rows;
    stride_ = stride;
    in_powers_of_two_ = false;
  }

  // Runs the task of queries [first, first + count) of one head, count at most the block; `right` and `values` are the
  // packed keys and values.
  template <class Read>
  void run(int64_t b, int64_t h, int64_t first, int64_t count, Read read, const Number* right, const Number* values) {
    M::pack_left(queries_.data, count, p_.d, q_parts_, read);
    if constexpr (IN_REGISTERS)
      for (int64_t i = 0; in_powers_of_two_ && i < count; ++i) query_norms_[i] = norm_of(queries_.at(i * p_.d)) * factor();
    const int64_t padded = round_up(count, M::ROWS);
    if (p_.out) std::memset(pooled_.data, 0, sizeof(T) * size_t(padded) * width_);
    std::fill(rows_.begin(), rows_.begin() + padded, Row<T>());
    largest_.clear();
    const PlaceView mask(p_, b, h);
    mask_ = &mask;
    first_ = first;
    int64_t left, end;
    mask.hull(first, first + count, left, end);
    const int64_t begin = left / M::COLUMNS * M::COLUMNS;
    // Where few logits are compared, a short first chunk shows how large they are.
    for (int64_t start = begin, stop = begin + (in_powers_of_two_ ? 128 : CHUNK); start < end; start = stop, stop += CHUNK) {
      M::checkpoint();
      largest_key_norm_ =
          in_powers_of_two_ && start > begin ? largest_key_norm(right, start, std::min(stop, padded_keys())) : INF<T>;
      for (int64_t r = 0; r < padded; r += M::ROWS)
        process_strip(mask, first, r, std::min<int64_t>(count - r, M::ROWS), start, std::min(stop, end), right, values);
      finish_strips(values);
    }
    finish(b, h, first, count);
  }

 private:
  // M::ROWS rows of the task, from row r on, against the keys [left, end) of a chunk: their logits, where the weights go,
  // and how many of the rows have become weights. `rows` of them are queries, the others fill the strip up.
  struct Strip {
    T* logits;
    Number* weights;
    int64_t r, rows, left, end, rows_done;
    bool has_masked;  // whether some logits may be masked
  };

  // What a product is multiplied by to become a logit in the unit of Row::max_logit; that unit.
  T factor() const { return IN_REGISTERS && in_powers_of_two_ ? T(p_.scale / Weight<T>::UNIT) : factor_of<T>(p_); }
  double unit() const { return IN_REGISTERS && in_powers_of_two_ ? Weight<T>::UNIT : 1.0; }

  // The Euclidean norm of a packed query.
  T norm_of(const T* query) const {
    T square = 0;
    for (int64_t t = 0; t < p_.d; ++t) square += query[t] * query[t];
    return std::sqrt(square);
  }

  // The largest norm of the keys [start, stop).
  T largest_key_norm(const Number* right, int64_t start, int64_t stop) const {
    V most_square{};
    if constexpr (IN_REGISTERS) {
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

  // Whether the norms of queries and keys bound the logits (Cauchy-Schwarz) so that all weights of a strip are normal
  // numbers and not far above 1. Then no logit needs to be compared with the largest.
  bool norms_bound_logits(int64_t r, int64_t rows) const {
    if (!in_powers_of_two_ || rows < M::ROWS) return false;
    for (int64_t i = r; i < r + rows; ++i) {
      const T bound = query_norms_[i] * largest_key_norm_, max_logit = rows_[i].max_logit;
      if (!(bound - max_logit < T(40) && bound + max_logit < T(125))) return false;
    }
    return true;
  }

  // Multiplies a strip and turns its products into weights while they are in registers.
  template <bool OUT, bool PLOGP>
  void weigh_in_registers([[maybe_unused]] const Strip& strip, [[maybe_unused]] const Number* right) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (IN_REGISTERS) {
      const Flush flush;
      Weighing<M, STRIDE> weighing{p_.d, all(factor())};
      for (int i = 0; i < M::ROWS; ++i) weighing.set_max(i, rows_[strip.r + i].max_logit);
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

  // Multiplies the strip of `rows` rows from r on with the keys [start, stop). Meanwhile the strip before becomes
  // weights, and the weights of the one before that are multiplied with the values.
  void process_strip(const PlaceView& mask, int64_t first, int64_t r, int64_t rows, int64_t start, int64_t stop,
                     const Number* right, const Number* values) {
    int64_t left, end;
    mask.hull(first + r, first + r + rows, left, end);
    left = std::max(left / M::COLUMNS * M::COLUMNS, start);
    end = std::min(round_up(end, M::COLUMNS), round_up(stop, M::COLUMNS));
    while (left < end && mask.hides(first + r, rows, left, M::COLUMNS)) left += M::COLUMNS;
    while (left < end && mask.hides(first + r, rows, end - M::COLUMNS, M::COLUMNS)) end -= M::COLUMNS;
    if (left >= end) return;
    int64_t inner_left, inner_end;
    mask.core(first + r, first + r + rows, inner_left, inner_end);
    const bool has_masked = mask.allowed || mask.has_bias || left < inner_left || end > inner_end;
    T* logits = kept_ ? kept_ + r * stride_ + left : logits_.at(size_t(buffer_) * M::ROWS * STRIDE);
    const Strip next{logits, weights_at(logits), r, rows, left, end, 0, has_masked};
    if (!has_masked && norms_bound_logits(r, rows)) {
      if (!p_.out) return weigh_in_registers<false, true>(next, right);
      p_.entropy ? weigh_in_registers<true, true>(next, right) : weigh_in_registers<true, false>(next, right);
      to_pool_ = next;
      return pool_values(values);
    }
    if (!M::Product::STEPS) {
      for (int64_t j = left; j < end; j += M::COLUMNS)
        if (!mask.hides(first + r, rows, j, M::COLUMNS))
          M::template multiply<false>(M::left_at(queries_.data, r, p_.d, q_parts_), q_parts_, p_.d,
                                      M::right_at(right, j, 0, p_.d, k_parts_), k_parts_, M::depth_of(p_.d),
                                      next.logits + (j - left), stride_);
      to_weigh_ = next;
      return finish_strips(values);
    }
    key_product_ = typename M::Product(M::left_at(queries_.data, r, p_.d, q_parts_), q_parts_, p_.d, k_parts_, STRIDE);
    for (int64_t j = left; j < end; j += M::COLUMNS)
      if (!mask.hides(first + r, rows, j, M::COLUMNS))
        key_product_.add(M::right_at(right, j, 0, p_.d, k_parts_), next.logits + (j - left));
    weigh_strip(values);
    to_weigh_ = next;
    buffer_ ^= 1;
  }

  // Where the weights of these logits go: to the same place, unless products need them packed or logits are kept.
  Number* weights_at(T* logits) const {
    if constexpr (M::Product::STEPS) {
      return weights_.at(size_t(buffer_) * weights_size_);
    } else {
      return kept_ ? logits_.data : logits;
    }
  }

  // Turns all rows of to_weigh_ into weights, side by side with the pending products: of keys, and of values with to_pool_.
  void weigh_strip(const Number* values) {
    if constexpr (M::Product::STEPS) {
      value_product_ = typename M::Product();
      if (to_pool_.logits) {
        value_product_ =
            typename M::Product(to_pool_.weights, p_parts_, to_pool_.end - to_pool_.left, v_parts_, width_, DEPTH, true);
        for (int64_t j = 0; j < width_; j += M::COLUMNS)
          value_product_.add(M::right_at(values, j, to_pool_.left, padded_keys(), v_parts_),
                             pooled_.at(size_t(to_pool_.r) * width_ + j));
      }
      running_product_ = value_product_.done() ? &key_product_ : &value_product_;
      pending_ = 0;
      steps_ = value_product_.steps() + key_product_.steps();
      vectors_ = to_weigh_.rows * (to_weigh_.end - to_weigh_.left) / W;
    }
    const Flush flush;
    while (to_weigh_.logits && to_weigh_.rows_done < M::ROWS) weigh_next_rows();
    value_product_.finish();
    key_product_.finish();
    to_pool_ = to_weigh_;
    if (!p_.out) to_pool_.logits = nullptr;
    to_weigh_.logits = nullptr;
  }

  // Completes the strips that are in work.
  void finish_strips(const Number* values) {
    key_product_ = typename M::Product();
    weigh_strip(values);
    if (M::Product::STEPS) return weigh_strip(values);
    pool_values(values);
  }

  // Multiplies the values with the weights of to_pool_.
  void pool_values(const Number* values) {
    for (int64_t j = 0; to_pool_.logits && j < width_; j += M::COLUMNS)
      M::template multiply<true>(to_pool_.weights, p_parts_, DEPTH, M::right_at(values, j, to_pool_.left, padded_keys(), v_parts_),
                                 v_parts_, to_pool_.end - to_pool_.left, pooled_.at(size_t(to_pool_.r) * width_ + j), width_);
    to_pool_.logits = nullptr;
  }

  // Does the steps of the pending products that are due after so many vectors of a row.
  ATTLAS_INLINE void run_due_steps(int vectors) {
    if constexpr (M::Product::STEPS)
      for (pending_ += vectors * steps_; pending_ >= vectors_; pending_ -= vectors_) {
        running_product_->template step<false>();
        if (running_product_->done()) running_product_ = &key_product_;
      }
  }

  int64_t padded_keys() const { return round_up(p_.n, M::COLUMNS); }

  // Turns the next rows of to_weigh_ into weights: all of them, or one where products are pending. The largest logits of
  // all these rows are found first, so that no row's weights wait for its own.
  __attribute__((noinline)) void weigh_next_rows() {
    const int64_t from = to_weigh_.rows_done, to = M::Product::STEPS ? from + 1 : M::ROWS;
    const int64_t size = to_weigh_.end - to_weigh_.left;
    bool any[M::ROWS];
    for (int64_t i = from; i < to; ++i) any[i] = i < to_weigh_.rows && find_max_logit(i, size);
    for (int64_t i = from; i < to; ++i) {
      if (!any[i]) {
        if (p_.out) write_zero_weights(i, size);
      } else if (p_.out) {
        weigh_as_wanted<true>(i, size);
      } else {
        weigh_as_wanted<false>(i, size);
      }
    }
    to_weigh_.rows_done = to;
  }

  // Turns the products of row i of to_weigh_ into logits, and raises the row's largest logit; false where all are masked.
  bool find_max_logit(int64_t i, int64_t size) {
    T* logits = to_weigh_.logits + i * stride_;
    const int64_t r = to_weigh_.r + i, left = to_weigh_.left, end = to_weigh_.end;
    if (to_weigh_.has_masked || transforms_logits_) finish_row<T>(logits, *mask_, first_ + r, left, end, T(p_.scale), T(p_.cap));
    V tops[4] = {all(-INF<T>), all(-INF<T>), all(-INF<T>), all(-INF<T>)};
    int64_t j = 0;
    for (; j + 4 * W <= size; j += 4 * W)
      for (int x = 0; x < 4; ++x) tops[x] = larger<T>(tops[x], load(logits + j + x * W));
    for (; j < size; j += W) tops[j / W % 4] = larger<T>(tops[j / W % 4], load(logits + j));
    const T peak = most<T>(larger<T>(larger<T>(tops[0], tops[1]), larger<T>(tops[2], tops[3])));
    if (peak == -INF<T>) return false;
    if (p_.top_keys) keep_largest(logits, left, size, r, tops);
    Row<T>& row = rows_[r];
    const T max_logit = peak * factor();
    if (max_logit > row.max_logit) rescale(row, r, in_powers_of_two_ ? std::ceil(max_logit * 8) / 8 : max_logit);
    return true;
  }

  // Writes the weights of a row that sees no key of the strip.
  void write_zero_weights(int64_t i, int64_t size) {
    const V zeros[2] = {};
    for (int64_t j = 0; j < size; j += 2 * W) M::put(to_weigh_.weights, i, j, DEPTH, p_parts_, zeros);
  }

  // weigh() with the loop that computes what is wanted.
  template <bool OUT>
  void weigh_as_wanted(int64_t i, int64_t size) {
    const int wanted = wanted_ | TOTALS | ((wanted_ & MOMENTS) && to_weigh_.has_masked ? MASKED : 0);
    with_first_loop<TOTALS, TOTALS | SQUARES, TOTALS | PLOGP, TOTALS | PLOGP | SQUARES, TOTALS | PLOGP | MOMENTS,
                    TOTALS | PLOGP | MOMENTS | MASKED, ~0>(wanted, [&]<int LOOP>() { weigh<OUT, LOOP>(i, size); });
  }

  // Raises the largest logit of row r, and scales its sums and pooled values accordingly.
  void rescale(Row<T>& row, int64_t r, T max_logit) {
    if (row.total > 0) {
      const T log_factor = (row.max_logit - max_logit) * T(unit()), factor = std::exp(log_factor);
      row.multiply(factor, log_factor);
      if (p_.out) {
        T* pooled = pooled_.at(size_t(r) * width_);
        for (int64_t j = 0; j < width_; j += W) store(pooled + j, load(pooled + j) * factor);
      }
    }
    row.max_logit = max_logit;
  }

  // Turns the logits of row i of to_weigh_ into weights, and adds these to the sums of the row.
  template <bool OUT, int WANTED>
  void weigh(int64_t i, int64_t size) {
    const T* logits = to_weigh_.logits + i * stride_;
    const T scale = factor_of<T>(p_);
    Row<T>& row = rows_[to_weigh_.r + i];
    // Where there are registers for them, two sums are used in turn: neither waits for the other.
    constexpr int SUMS = VECTOR_BYTES == 32 ? 1 : 2;
    VectorSums<T> sums[SUMS];
    const Shift<T> shift = Weight<T>::shift_of(double(row.max_logit) * unit(), scale);
    const V factor = all(T(double(scale) / Weight<T>::UNIT)), high = all(shift.high), low = all(shift.low);
    const T centre = WANTED & MOMENTS ? centre_of<T>(logits, size, scale, row.moments, row.max_logit) : T(0);
    for (int64_t j = 0; j < size; j += 2 * W) {  // COLUMNS is two vectors
      V e[2];
      for (int x = 0; x < 2; ++x) {
        const V logit = load(logits + j + x * W);
        const Weight<T> weight(logit, factor, high, low);
        e[x] = weight.e;
        sums[x % SUMS].template accumulate<WANTED>(logit, weight, all(centre));
      }
      if (OUT) M::put(to_weigh_.weights, i, j, DEPTH, p_parts_, e);
      run_due_steps(2);
    }
    if (SUMS > 1) sums[0].template merge<WANTED>(sums[SUMS - 1]);
    row.add(sums[0], sums[0].template count<WANTED>(size), centre, scale, WANTED);
  }

  // Adds the logits of a row of a strip to its k largest; lane l of tops[x] is the largest of logits l + x W, l + (x + 4)
  // W, ...
  void keep_largest(const T* logits, int64_t left, int64_t size, int64_t r, const V* tops) {
    using Segment = typename KLargest<T>::Segment;
    largest_.row(r).add(tops, 4, 4 * W, [&](int x) { return Segment{logits + x * W, left + x * W, size - x * W}; });
  }

  // Writes the results of the task, with the sink counted in.
  void finish(int64_t b, int64_t h, int64_t first, int64_t count) {
    const int64_t head = b * p_.heads + h;
    const T* sinks = static_cast<const T*>(p_.sink);
    for (int64_t r = 0; r < count; ++r) {
      Row<T>& row = rows_[r];
      const T max_logit = row.max_logit;  // without the sink
      const int64_t place = head * p_.m + first + r;  // of the row in the results
      T total = row.total;
      if (sinks && sinks[h] > -INF<T>) {
        const T sink = sinks[h] / T(unit());
        if (sink > row.max_logit) rescale(row, r, sink);
        total = row.total + std::exp((sink - row.max_logit) * T(unit()));
      }
      const bool empty = !(total > 0);
      const T inverse_total = empty ? T(0) : T(1) / total;
      const double lse = empty ? -INF<double> : double(row.max_logit) * unit() + std::log(double(total));
      if (p_.lse && !p_.lse_known) p_.lse[place] = lse;
      if (p_.out) {
        T* to = static_cast<T*>(p_.out) + place * p_.e;
        const T* pooled = pooled_.at(size_t(r) * width_);
        for (int64_t j = 0; j < p_.e; ++j) to[j] = pooled[j] * inverse_total;
      }
      row.statistics(inverse_total, empty ? T(0) : std::log(total), max_logit).store(p_, place);
      largest_.store(p_, r, place, factor_of<T>(p_), lse);
    }
  }

  const attlas::AttentionParams& p_;
  const int q_parts_, k_parts_, p_parts_, v_parts_;
  const bool transforms_logits_;
  const int wanted_;              // of RowSum; the largest logits are found anyway
  bool in_powers_of_two_;         // whether Row::max_logit counts in powers of 2, in eighths; few logits are compared then
  const int64_t width_;           // numbers of a row of pooled values
  Aligned<Number> queries_;
  Aligned<T> logits_;  // of two strips: one is multiplied while the other becomes weights
  T* kept_ = nullptr;  // where all logits are kept, or null
  int64_t stride_ = STRIDE;  // of the logits
  Strip to_weigh_{}, to_pool_{};  // the strip whose logits are no weights yet; the one before, not pooled yet
  int buffer_ = 0;                // which of the two buffers of logits and of weights the next strip gets
  typename M::Product key_product_, value_product_, *running_product_ = &key_product_;  // the pending products
  int64_t steps_ = 0, vectors_ = 1, pending_ = 0;  // steps_ steps of them are done during vectors_ vectors of to_weigh_
  int64_t first_ = 0;  // query of the task
  const PlaceView* mask_ = nullptr;
  const size_t weights_size_;
  Aligned<Number> weights_;  // of two strips: one is multiplied with the values while the other becomes weights
  Aligned<T> pooled_;
  std::vector<Row<T>> rows_;
  std::vector<T> query_norms_;
  T largest_key_norm_ = 0;  // of the chunk
  KLargestOfRows<T> largest_;
};

}  // namespace ATTLAS_ISA
