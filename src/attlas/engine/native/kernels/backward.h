// The gradients of the output by recomputation: one pass over the keys, from the log-sum-exp that the forward kept.
//
// A task owns a run of keys of one key head and takes all queries that see them. Logits S = Q K' and slopes D = G V' of
// a few rows become weights P = exp(S - lse) and gradients Z = P (D - delta) of the logits; from these come three more
// products: Z K for the queries, and G' P and Q' Z, transposed, for values and keys. So P and Z are only ever made from
// rows of logits: Z as the left side of a product, and both as the right side.
//
// Statistics add terms to the slopes: a number of each column, and of each row times ln P and P. The mean and variance of
// logits add to Z itself. What a row sums up of the columns' numbers must be known first: a pass before, of logits alone.
//
// What a task finds of queries is kept apart and added up in the order of the keys, so that no result depends on which
// thread had a task.
#pragma once

#include "forward.h"
#include "tokens.h"

namespace ATTLAS_ISA {

// How many parts the numbers of each kind are split into; weights stands for P and Z.
struct BackwardParts {
  int tokens, weights;
};

#if defined(__AMX_BF16__)

// Two neighbouring rows (even one first) of two vectors each, as the right side of a product `depth` rows deep, and as
// the left side of one; cut after 8 bits, as Amx::put does it.
template <bool LEFT>
ATTLAS_INLINE void put_weights(Amx::Number* left, Amx::Number* right, int64_t row, int64_t column, int64_t left_depth,
                               int64_t right_depth, int parts, Vec<float> x[2][2]) {
  constexpr int TILE = Amx::TILE;
  Amx::Number* across = right + (column * right_depth + row / 32 * 32 * 32) * parts + row % 32 / 2 * 32;
  Amx::Number* along = left + (row / 16 * 16 * left_depth + column / 32 * TILE) * parts + row % 16 * 32;
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                       21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (int p = 0;; ++p) {
    for (int v = 0; v < 2; ++v)
      _mm512_store_si512(across + (p * 2 + v) * TILE,
                         _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)x[0][v], 16), (__m512i)x[1][v]));
    for (int r = 0; LEFT && r < 2; ++r)
      _mm512_store_si512(along + p * TILE + r * 32, _mm512_permutex2var_epi16((__m512i)x[r][0], odd, (__m512i)x[r][1]));
    if (p + 1 >= parts) break;
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    for (int r = 0; r < 2; ++r)
      for (int v = 0; v < 2; ++v) x[r][v] -= (Vec<float>)_mm512_and_si512((__m512i)x[r][v], upper);
  }
}

#else

template <bool LEFT, class T>
ATTLAS_INLINE void put_weights(T* left, T* right, int64_t row, int64_t column, int64_t left_depth, int64_t right_depth, int,
                               Vec<T> x[2][2]) {
  for (int r = 0; r < 2; ++r)
    for (int v = 0; v < 2; ++v) {
      store(right + column * right_depth + (row + r) * 2 * WIDTH<T> + v * WIDTH<T>, x[r][v]);
      if (LEFT) store(left + (row + r) * left_depth + column + v * WIDTH<T>, x[r][v]);
    }
}

#endif

// Some queries of one head as the products need them: tokens Q and gradients G of their outputs, as rows and transposed.
template <class M>
class Rows {
  using T = typename M::T;
  using Number = typename M::Number;

 public:
  static constexpr int64_t COUNT = 128 / M::ROWS * M::ROWS;

  Rows(const attlas::AttentionBackwardParams& work, int parts) : w_(work), p_(work.of), parts_(parts) {
    const int64_t sizes[] = {COUNT, p_.d, COUNT, p_.e, p_.d, COUNT, p_.e, COUNT};
    for (int x = 0; x < 4; ++x)
      start_[x + 1] = start_[x] + (M::left_size(sizes[2 * x], sizes[2 * x + 1], parts) + 63) / 64 * 64;
  }

  size_t size() const { return start_[4]; }
  const Number* queries(const Number* rows) const { return rows; }
  const Number* above(const Number* rows) const { return rows + start_[1]; }
  const Number* queries_across(const Number* rows) const { return rows + start_[2]; }
  const Number* above_across(const Number* rows) const { return rows + start_[3]; }

  // Queries [row, row + some) of a head; `turned` has room for Rows::room() numbers.
  void pack(int64_t b, int64_t h, int64_t row, int64_t some, Number* to, T* turned) const {
    turn(rows_of<T, T>(p_.q, b, h, row), some, p_.d, to, to + start_[2], turned);
    turn(rows_of<T, T>(w_.grad, b, h, row), some, p_.e, to + start_[1], to + start_[3], turned);
  }
  size_t room() const { return size_t(std::max(p_.d, p_.e) * STRIDE); }

 private:
  static constexpr int64_t STRIDE = COUNT + 16;

  // Not inlined, like others below that are called twice: all of this is compiled for four instruction sets.
  __attribute__((noinline)) void turn(Reader<T, T> read, int64_t some, int64_t size, Number* along, Number* across, T* turned) const {
    M::pack_left(along, some, size, parts_, read);
    for (int64_t i = 0; i < COUNT; i += 8)
      for (int64_t t = 0; t < size; ++t)
        for (int64_t x = i; x < std::min(i + 8, COUNT); ++x) turned[t * STRIDE + x] = x < some ? read(x, t) : T(0);
    M::pack_left(across, size, COUNT, parts_, Reader<T, T>{turned, STRIDE});
  }

  const attlas::AttentionBackwardParams& w_;
  const attlas::AttentionParams& p_;
  const int parts_;
  size_t start_[5] = {};
};

template <class M>
class Backward {
  using T = typename M::T;
  using Number = typename M::Number;
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  static constexpr int64_t STRIDE = 128 + 16;  // rows of the rectangles fall into different sets of the cache

 public:
  static constexpr int64_t ROWS = Rows<M>::COUNT;  // queries and keys whose weights are kept together
  static constexpr int64_t KEYS = 128;

  // Keys of one task: their packed forms and gradients lie in the second cache while all queries pass.
  static int64_t keys_of_task(const attlas::AttentionParams& p) {
    const int64_t most = std::max<int64_t>((512 * 128) / (p.d + p.e), 2 * KEYS);
    return round_up(std::clamp<int64_t>(p.n, 1, most), KEYS);
  }

  Backward(const attlas::AttentionBackwardParams& work, const Rows<M>& rows, int64_t keys, BackwardParts parts)
      : w_(work),
        p_(work.of),
        form_(rows),
        parts_(parts),
        keys_(keys),
        deep_(round_up(p_.d, M::ROWS)),
        wide_(round_up(p_.d, M::COLUMNS)),
        deep_values_(round_up(p_.e, M::ROWS)),
        columns_(M::right_size(p_.d, keys, parts.tokens)),
        values_(M::right_size(p_.e, keys, parts.tokens)),
        rows_(M::right_size(keys, p_.d, parts.tokens)),
        d_keys_(size_t(deep_ * keys / KEYS * STRIDE)),
        d_values_(size_t(deep_values_ * keys / KEYS * STRIDE)),
        products_(size_t(4 * M::ROWS * STRIDE)),
        weights_(M::right_size(ROWS, KEYS, parts.weights)),
        gradients_left_(M::left_size(ROWS, KEYS, parts.weights)),
        gradients_(M::right_size(ROWS, KEYS, parts.weights)),
        d_queries_(size_t(ROWS * wide_)),
        of_columns_(size_t(keys)) {
    std::fill(products_.data, products_.data + 4 * M::ROWS * STRIDE, T(0));
  }

  // Keys [first, stop) of a key head from here on, for the pass of sums or that of gradients.
  void begin(int64_t b, int64_t g, int64_t first, int64_t stop, bool summing) {
    summing_ = summing;
    first_key_ = first;
    stop_key_ = stop;
    const Reader<T, T> keys = rows_of<T, T>(p_.k, b, g, first), values = rows_of<T, T>(p_.v, b, g, first);
    pack_columns(keys, p_.d, columns_.data);
    if (summing) return;
    pack_columns(values, p_.e, values_.data);
    M::pack_rows(rows_.data, 0, keys_, keys_, p_.d, parts_.tokens, Limited<T, T>{keys, stop - first});
    std::memset(d_keys_.data, 0, sizeof(T) * size_t(deep_ * keys_ / KEYS * STRIDE));
    std::memset(d_values_.data, 0, sizeof(T) * size_t(deep_values_ * keys_ / KEYS * STRIDE));
  }

  // Queries [row, row + some) of a head, packed, against the keys of this task; what it finds of them goes to `to`, rows
  // of d numbers, or one sum each. False, and nothing written, where they see none of the keys.
  bool take(int64_t b, int64_t h, int64_t row, int64_t some, const Number* packed, T* to) {
    const MaskView mask(p_, b, h);
    int64_t left, end;
    mask.hull(row, row + some, left, end);
    left = std::max(left, first_key_);
    end = std::min(end, stop_key_);
    if (left >= end) return false;
    bool any = false;
    mask_ = &mask;
    row_ = row;
    some_ = some;
    packed_ = packed;
    for (int64_t key = first_key_ + (left - first_key_) / KEYS * KEYS; key < end; key += KEYS) {
      if (mask.hides(row, some, key, std::min(KEYS, end - key))) continue;
      if (!any) start(b, h);
      any = true;
      block(key, std::max(left, key), std::min(end, key + KEYS));
    }
    if (summing_) std::copy_n(sums_, size_t(some), to);
    for (int64_t i = 0; any && !summing_ && i < some; ++i) std::copy_n(d_queries_.at(size_t(i * wide_)), size_t(p_.d), to + i * p_.d);
    return any;
  }

  // Add what was found of the keys of this task.
  void finish(int64_t b, int64_t g) const {
    const int64_t head = (b * p_.key_heads + g) * p_.n;
    give(d_keys_.data, deep_, p_.d, T(p_.scale), static_cast<T*>(w_.d_k) + head * p_.d);
    give(d_values_.data, deep_values_, p_.e, T(1), static_cast<T*>(w_.d_v) + head * p_.e);
  }

 private:
  void start(int64_t b, int64_t h) {
    const double* lse = p_.lse;
    const T* delta = static_cast<const T*>(w_.delta);
    const int64_t at = (b * p_.heads + h) * p_.m + row_;
    const void* const terms[TERMS] = {w_.log, w_.square, w_.mean, w_.linear, w_.centre};
    for (int x = 0; x < TERMS; ++x)
      for (int64_t i = 0; i < ROWS; ++i)
        terms_[x][i] = terms[x] && i < some_ ? static_cast<const T*>(terms[x])[at + i] : T(0);
    if (w_.column) {
      const int64_t count = stop_key_ - first_key_;
      std::copy_n(static_cast<const T*>(w_.column) + (b * p_.heads + h) * p_.n + first_key_, size_t(count), of_columns_.data);
      std::fill(of_columns_.data + count, of_columns_.data + keys_, T(0));
    }
    for (int64_t i = 0; i < ROWS; ++i) {
      // Rows that see nothing, and those that are missing to the last strip, have weights of 0.
      const bool there = i < some_ && lse[at + i] > -INF<double>;
      shift_[i] = there ? Shift<T>::of(lse[at + i]) : Shift<T>::none();
      delta_[i] = there ? delta[at + i] : T(0);
      if (there && w_.column && !summing_) delta_[i] += static_cast<const T*>(w_.column_sums)[at + i];
      sums_[i] = T(0);
    }
    if (summing_) return;
    std::memset(d_queries_.data, 0, sizeof(T) * size_t(ROWS * wide_));
  }

  __attribute__((noinline)) void pack_columns(Reader<T, T> read, int64_t size, Number* to) const {
    for (int64_t j = 0; j < keys_; j += M::COLUMNS)
      M::pack_transposed(to, j, stop_key_ - first_key_, size, parts_.tokens, read);
  }

  // Rows r to r + M::ROWS, multiplied, and how many of them have become weights.
  struct Strip {
    int64_t r, some, taken;
    T *logits, *slopes;
  };

  // The rows against the block of keys from `key` on, of which [left, end) may be mask. While one strip is multiplied,
  // the one before becomes weights.
  void block(int64_t key, int64_t left, int64_t end) {
    key_ = key;
    first_ = (left - key) / M::COLUMNS * M::COLUMNS;
    stop_ = round_up(end - key, M::COLUMNS);
    before_.taken = M::ROWS;
    for (int64_t r = 0; r < ROWS; r += M::ROWS) {
      T* const products = products_.at(size_t(r / M::ROWS % 2 * 2 * M::ROWS * STRIDE));
      const Strip next{r, std::clamp<int64_t>(some_ - r, 0, M::ROWS), 0, products, products + M::ROWS * STRIDE};
      if (next.some > 0) multiply(next);
      while (before_.taken < M::ROWS) advance();
      before_ = next;
    }
    if (summing_) {
      while (before_.taken < M::ROWS) advance();
      return;
    }
    const int64_t padded = round_up(some_, M::ROWS), last = ROWS - M::ROWS;
    schedule(std::min(padded, last) / M::ROWS * (wide_ / M::COLUMNS) * M::pauses(KEYS, parts_.weights, parts_.tokens));
    for (int64_t r = 0; r < padded; r += M::ROWS) {
      while (r == last && before_.taken < M::ROWS) advance();
      for (int64_t t = 0; t < wide_; t += M::COLUMNS)
        product<true>(M::left_at(gradients_left_.data, r, KEYS, parts_.weights), parts_.weights, KEYS,
                      M::right_at(rows_.data, t, key - first_key_, keys_, parts_.tokens), parts_.tokens, KEYS,
                      d_queries_.at(size_t(r * wide_ + t)), wide_);
    }
    while (before_.taken < M::ROWS) advance();
    const int64_t place = (key - first_key_) / KEYS;
    gather(form_.above_across(packed_), weights_.data, deep_values_, d_values_.at(size_t(place * deep_values_ * STRIDE)));
    gather(form_.queries_across(packed_), gradients_.data, deep_, d_keys_.at(size_t(place * deep_ * STRIDE)));
  }

  // Tokens, transposed, times weights: what the rows add to the gradients of a block of keys.
  __attribute__((noinline)) void gather(const Number* across, const Number* right, int64_t size, T* to) {
    for (int64_t t = 0; t < size; t += M::ROWS)
      for (int64_t j = 0; j < KEYS; j += M::COLUMNS)
        product<true>(M::left_at(across, t, ROWS, parts_.tokens), parts_.tokens, ROWS,
                      M::right_at(right, j, 0, ROWS, parts_.weights), parts_.weights, ROWS, to + t * STRIDE + j, STRIDE);
  }

  void multiply(const Strip& next) {
    const int64_t from = key_ - first_key_;
    const int64_t slopes = summing_ ? 0 : M::pauses(p_.e, parts_.tokens, parts_.tokens);
    schedule((stop_ - first_) / M::COLUMNS * (M::pauses(p_.d, parts_.tokens, parts_.tokens) + slopes));
    for (int64_t j = first_; j < stop_; j += M::COLUMNS) {
      product<false>(M::left_at(form_.queries(packed_), next.r, p_.d, parts_.tokens), parts_.tokens, p_.d,
                     M::right_at(columns_.data, from + j, 0, p_.d, parts_.tokens), parts_.tokens, M::depth_of(p_.d),
                     next.logits + j, STRIDE);
      if (summing_) continue;
      product<false>(M::left_at(form_.above(packed_), next.r, p_.e, parts_.tokens), parts_.tokens, p_.e,
                     M::right_at(values_.data, from + j, 0, p_.e, parts_.tokens), parts_.tokens, M::depth_of(p_.e),
                     next.slopes + j, STRIDE);
    }
  }

  // The strip before is to become weights within so many pauses of the products to come.
  void schedule(int64_t pauses) {
    pauses_ = pauses;
    pause_ = 0;
  }
  ATTLAS_INLINE void pause() {
    ++pause_;
    while (before_.taken < M::ROWS && before_.taken * pauses_ < pause_ * M::ROWS) advance();
  }

  // Two rows of the strip before: from products to weights and gradients of logits.
  __attribute__((noinline)) void advance() {
    const Strip& strip = before_;
    const int64_t i = strip.taken, row = strip.r + i;
    before_.taken += 2;
    const T scale = factor_of<T>(p_), cap = T(p_.cap), slant = cap > 0 ? T(1) / cap : T(0);
    for (int64_t x = i; x < std::min(i + 2, strip.some); ++x)
      finish_row<T>(strip.logits + x * STRIDE + first_, *mask_, row_ + strip.r + x, key_ + first_, key_ + stop_, T(p_.scale), cap);
    if (summing_) return sum_up(strip, i, scale);
    for (int64_t j = 0; j < KEYS; j += 2 * W) {
      V weight[2][2] = {}, gradient[2][2] = {};
      if (i < strip.some && j >= first_ && j < stop_) {
        for (int x = 0; x < 2; ++x) {
          const T *logits = strip.logits + (i + x) * STRIDE + j, *slopes = strip.slopes + (i + x) * STRIDE + j;
          const V high = all(shift_[row + x].high), low = all(shift_[row + x].low), delta = all(delta_[row + x]);
          for (int v = 0; v < 2; ++v) {
            V log;
            const V logit = load(logits + v * W);
            weight[x][v] = weight_of<T>(logit * scale - high - low, log);
            V slope = load(slopes + v * W) - delta;
            if (w_.column) slope += load(of_columns_.data + key_ - first_key_ + j + v * W);
            if (w_.log) slope += terms_[0][row + x] * (log * LOG_UNIT<T>) + terms_[1][row + x] * weight[x][v];
            gradient[x][v] = weight[x][v] * slope;
            if (w_.mean) {
              const V direct = terms_[2][row + x] + terms_[3][row + x] * (logit * scale - terms_[4][row + x]);
              gradient[x][v] += logit > all(-INF<T>) ? direct : V{};
            }
            if (cap > 0) {
              const V share = larger<T>(logit, all(-cap)) * slant;  // what is masked has a weight of 0
              gradient[x][v] *= T(1) - share * share;
            }
          }
        }
      }
      put_weights<false>(weights_.data, weights_.data, row, j, KEYS, ROWS, parts_.weights, weight);
      put_weights<true>(gradients_left_.data, gradients_.data, row, j, KEYS, ROWS, parts_.weights, gradient);
    }
  }

  // Two rows of logits: their weights times the numbers of the columns.
  void sum_up(const Strip& strip, int64_t i, T scale) {
    const T* columns = of_columns_.data + key_ - first_key_;
    for (int64_t x = i; x < std::min(i + 2, strip.some); ++x) {
      const Shift<T>& shift = shift_[strip.r + x];
      V total{}, log;
      for (int64_t j = first_; j < stop_; j += W)
        total += weight_of<T>(load(strip.logits + x * STRIDE + j) * scale - all(shift.high) - all(shift.low), log) * load(columns + j);
      sums_[strip.r + x] += sum<T>(total);
    }
  }

#if defined(__AMX_BF16__)
  template <bool ADD>
  ATTLAS_INLINE void product(const Number* a, int a_parts, int64_t depth, const Number* b, int b_parts, int64_t steps, T* c,
                             int64_t stride) {
    const auto between = [this] { pause(); };
    if (a_parts == 1 && b_parts == 2) return M::template multiply<ADD, 1, 2>(a, depth, b, steps, c, stride, between);
    M::template multiply<ADD>(a, a_parts, depth, b, b_parts, steps, c, stride, between);
  }
#else
  template <bool ADD>  // not inlined: it is long
  __attribute__((noinline)) static void product(const Number* a, int, int64_t depth, const Number* b, int, int64_t steps, T* c,
                                                int64_t stride) {
    M::template multiply<ADD>(a, 1, depth, b, 1, steps, c, stride);
  }
#endif

  __attribute__((noinline)) void give(const T* found, int64_t high, int64_t size, T factor, T* to) const {
    for (int64_t start = 0; start < stop_key_ - first_key_; start += KEYS) {
      const T* block = found + start / KEYS * high * STRIDE;
      const int64_t some = std::min(KEYS, stop_key_ - first_key_ - start);
      for (int64_t j = 0; j < some; ++j)
        for (int64_t t = 0; t < size; ++t) to[(first_key_ + start + j) * size + t] += factor * block[t * STRIDE + j];
    }
  }

  const attlas::AttentionBackwardParams& w_;
  const attlas::AttentionParams& p_;
  const Rows<M>& form_;
  const BackwardParts parts_;
  const int64_t keys_, deep_, wide_, deep_values_;
  int64_t first_key_ = 0, stop_key_ = 0;                 // of the task
  int64_t row_ = 0, some_ = 0;                           // of the queries that are taken
  int64_t key_ = 0, first_ = 0, stop_ = 0;               // of the block, and its columns that may be seen
  int64_t pauses_ = 1, pause_ = 0;
  Strip before_{};
  const MaskView* mask_ = nullptr;
  const Number* packed_ = nullptr;
  Aligned<Number> columns_, values_, rows_;    // keys and values of the task as columns, and keys as rows
  Aligned<T> d_keys_, d_values_;               // their gradients, transposed, block by block
  Aligned<T> products_;                        // logits and slopes of two strips
  Aligned<Number> weights_, gradients_left_, gradients_; // of one block
  Aligned<T> d_queries_;
  Aligned<T> of_columns_;  // the terms of the keys of the task
  static constexpr int TERMS = 5;
  bool summing_ = false;
  T sums_[ROWS] = {};
  T terms_[TERMS][ROWS] = {};  // of each row, in the order of DotBackward
  Shift<T> shift_[ROWS] = {};
  T delta_[ROWS] = {};
};

}  // namespace ATTLAS_ISA
