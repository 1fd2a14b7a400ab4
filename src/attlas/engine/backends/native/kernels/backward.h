// The gradients of the output by recomputation: one pass over the keys, from the log-sum-exp that the forward kept.
//
// A task owns a run of keys of one key head and takes all queries that see them. Logits S = Q K' and slopes D = G V' of
// a few rows become weights P = exp(S - lse) and gradients Z = P (D - delta) of the logits; from these come three more
// products. With vectors, P and Z take the place of S and D, and are the left side of them all: Z K for the queries, P' G
// and Z' Q for values and keys. A tile unit takes no left side transposed: there the last two are G' P and Q' Z.
//
// Statistics add terms to the slopes: a number of each column, and of each row times ln P and P. The mean and variance of
// logits add to Z itself. What a row sums up of the columns' numbers must be known first: a pass before, of logits alone.
//
// Terms of places get what Z sums up to over keys, queries or distances (place_sums.h), before the factor of a cap: they are
// added after it. With both, the capped products are kept beside the logits. This is done where Z takes the place of D.
//
// What a task finds of queries is kept apart and added up in the order of the keys, so that no result depends on which
// thread had a task.
#pragma once

#include "forward.h"
#include "place_sums.h"
#include "tokens.h"

namespace ATTLAS_ISA {

// How many parts the numbers of each kind are split into; weights stands for P and Z.
struct BackwardParts {
  int tokens, weights;
};

// Some queries of one head as the products need them: tokens Q and gradients G of their outputs, as rows and across, which
// is transposed for a tile unit, and as the right side of a product for vectors.
template <class M>
class Rows {
  using T = typename M::T;
  using Number = typename M::Number;

 public:
  static constexpr bool TURNS = M::Product::STEPS;
  static constexpr int64_t COUNT = TURNS ? 128 : 192;

  Rows(const attlas::AttentionBackwardParams& work, int parts) : w_(work), p_(work.of), parts_(parts) {
    const size_t sizes[] = {M::left_size(COUNT, p_.d, parts), M::left_size(COUNT, p_.e, parts), across_size(p_.d), across_size(p_.e)};
    for (int x = 0; x < 4; ++x) start_[x + 1] = start_[x] + (sizes[x] + 63) / 64 * 64;
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
  size_t room() const { return TURNS ? size_t(std::max(p_.d, p_.e) * STRIDE) : 0; }

 private:
  static constexpr int64_t STRIDE = COUNT + 16;

  size_t across_size(int64_t size) const { return TURNS ? M::left_size(size, COUNT, parts_) : M::right_size(COUNT, size, parts_); }

  // Not inlined, like others below that are called twice: all of this is compiled for four instruction sets.
  __attribute__((noinline)) void turn(Reader<T, T> read, int64_t some, int64_t size, Number* along, Number* across, T* turned) const {
    M::pack_left(along, some, size, parts_, read);
    if (!TURNS) return M::pack_rows(across, 0, COUNT, COUNT, size, parts_, Limited<T, T>{read, some});
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
  static constexpr bool STAGED = M::Product::STEPS;  // whether weights are copied to where products take them from

 public:
  static constexpr int64_t ROWS = Rows<M>::COUNT;  // queries and keys whose weights are kept together
  static constexpr int64_t KEYS = STAGED ? 128 : 96;

 private:
  static constexpr int64_t STRIDE = KEYS + 16;  // rows of the rectangles fall into different sets of the cache
  static_assert(ROWS % M::ROWS == 0 && KEYS % M::ROWS == 0 && KEYS % M::COLUMNS == 0 && (!STAGED || M::ROWS == M::COLUMNS));

 public:

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
        wide_(round_up(p_.d, M::COLUMNS)),
        wide_values_(round_up(p_.e, M::COLUMNS)),
        columns_(M::right_size(p_.d, keys, parts.tokens)),
        values_(M::right_size(p_.e, keys, parts.tokens)),
        rows_(M::right_size(keys, p_.d, parts.tokens)),
        d_keys_(size_t(wide_ * keys / KEYS * STRIDE)),
        d_values_(size_t(wide_values_ * keys / KEYS * STRIDE)),
        products_(size_t(2 * SIDE)),
        weights_(STAGED ? M::right_size(ROWS, KEYS, parts.weights) : 0),
        gradients_left_(STAGED ? M::left_size(ROWS, KEYS, parts.weights) : 0),
        gradients_(STAGED ? M::right_size(ROWS, KEYS, parts.weights) : 0),
        d_queries_(size_t(ROWS * wide_)),
        of_columns_(size_t(keys)),
        places_(work),
        keeps_capped_(!STAGED && p_.cap > 0 && has_bias(p_)),
        capped_(keeps_capped_ ? size_t(M::ROWS * STRIDE) : 0) {
    std::fill(products_.data, products_.data + 2 * SIDE, T(0));
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
    std::memset(d_keys_.data, 0, sizeof(T) * size_t(wide_ * keys_ / KEYS * STRIDE));
    std::memset(d_values_.data, 0, sizeof(T) * size_t(wide_values_ * keys_ / KEYS * STRIDE));
  }

  // Queries [row, row + some) of a head, packed, against the keys of this task; what it finds of them goes to `to`, rows
  // of d numbers, or one sum each, or is added there where there is more. Sums of the gradients of their logits go to `totals`
  // likewise, one for each row, and those of distances to `distances`: see PlaceSums. False, and nothing written, where they
  // see none of the keys.
  bool take(int64_t b, int64_t h, int64_t row, int64_t some, const Number* packed, T* to, bool more, T* totals, double* distances) {
    const PlaceView mask(p_, b, h);
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
      if (!any && places_.wanted()) places_.begin(b, h, row, distances);
      any = true;
      block(key, std::max(left, key), std::min(end, key + KEYS));
    }
    const int64_t size = summing_ ? 1 : p_.d, wide = summing_ ? 1 : wide_;
    const T* found = summing_ ? sums_ : d_queries_.data;
    if (any && !more) std::fill_n(to, size_t(some * size), T(0));
    for (int64_t i = 0; any && i < some; ++i) {
      T* row = to + i * size;
      for (int64_t t = 0; t < size; ++t) row[t] += found[i * wide + t];
    }
    if (any && totals && !summing_)
      for (int64_t i = 0; i < some; ++i) totals[i] = (more ? totals[i] : T(0)) + places_.rows()[i];
    return any;
  }

  // Add what was found of the keys of this task.
  void finish(int64_t b, int64_t g) const {
    const int64_t head = (b * p_.key_heads + g) * p_.n;
    give(d_keys_.data, wide_, p_.d, T(p_.scale), static_cast<T*>(w_.d_k) + head * p_.d);
    give(d_values_.data, wide_values_, p_.e, T(1), static_cast<T*>(w_.d_v) + head * p_.e);
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
      shift_[i] = there ? Weight<T>::shift_of(lse[at + i], factor_of<T>(p_)) : Shift<T>::none();
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

  // The rows against the block of keys from `key` on, of which [left, end) may be seen.
  void block(int64_t key, int64_t left, int64_t end) {
    key_ = key;
    if constexpr (STAGED) {
      staged(left, end);
    } else {
      in_place();
    }
  }

  // Strip by strip, while it is in the nearest cache; then what all of them add to the gradients of the keys.
  void in_place() {
    int64_t from = ROWS, to = 0, low = KEYS, high = 0;  // rows and keys that see each other
    const bool sums_places = places_.wanted() && !summing_;
    if (sums_places) places_.begin_block();
    for (int64_t r = 0; r < some_; r += M::ROWS) {
      T* const logits = products_.at(size_t(r * STRIDE));
      Strip strip{r, std::min<int64_t>(M::ROWS, some_ - r), 0, logits, logits + SIDE};
      int64_t left, end;
      mask_->hull(row_ + r, row_ + r + strip.some, left, end);
      first_ = std::clamp<int64_t>(left - key_, 0, KEYS) / M::COLUMNS * M::COLUMNS;
      stop_ = std::max(first_, round_up(std::clamp<int64_t>(end - key_, 0, KEYS), M::COLUMNS));
      if (first_ < stop_) from = std::min(from, r), to = r + strip.some, low = std::min(low, first_), high = std::max(high, stop_);
      multiply(strip);
      before_ = strip;
      advance();
      if (sums_places && first_ < stop_) places_.add(strip.slopes, r, strip.some, key_, first_, stop_);
      if (keeps_capped_ && !summing_) uncap();
      for (int64_t t = 0; t < wide_ && !summing_; t += M::COLUMNS)
        product<true>(strip.slopes + first_, 1, STRIDE, M::right_at(rows_.data, t, key_ - first_key_ + first_, keys_, 1), 1,
                      stop_ - first_, d_queries_.at(size_t(r * wide_ + t)), wide_);
    }
    if (summing_) return;
    if (sums_places) places_.finish_block(key_, key_ - first_key_);
    const auto gather = [&](const T* left, const Number* right, T* sums, int64_t wide) {
      for (int64_t t = 0; t < wide; t += M::COLUMNS)
        for (int64_t j = low / M::ROWS * M::ROWS; j < high; j += M::ROWS)
          product<true, true>(left + from * STRIDE + j, 1, STRIDE, M::right_at(right, t, from, ROWS, 1), 1, to - from,
                              sums + (key_ - first_key_ + j) * wide + t, wide);
    };
    gather(products_.data, form_.above_across(packed_), d_values_.data, wide_values_);
    gather(products_.at(SIDE), form_.queries_across(packed_), d_keys_.data, wide_);
  }

  // While one strip is multiplied, the one before becomes weights.
  void staged(int64_t left, int64_t end) {
    first_ = (left - key_) / M::COLUMNS * M::COLUMNS;
    stop_ = round_up(end - key_, M::COLUMNS);
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
                      M::right_at(rows_.data, t, key_ - first_key_, keys_, parts_.tokens), parts_.tokens, KEYS,
                      d_queries_.at(size_t(r * wide_ + t)), wide_);
    }
    while (before_.taken < M::ROWS) advance();
    const int64_t place = (key_ - first_key_) / KEYS;
    gather(form_.above_across(packed_), weights_.data, wide_values_, d_values_.at(size_t(place * wide_values_ * STRIDE)));
    gather(form_.queries_across(packed_), gradients_.data, wide_, d_keys_.at(size_t(place * wide_ * STRIDE)));
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
    if constexpr (STAGED) {
      const int64_t slopes = summing_ ? 0 : M::pauses(p_.e, parts_.tokens, parts_.tokens);
      schedule((stop_ - first_) / M::COLUMNS * (M::pauses(p_.d, parts_.tokens, parts_.tokens) + slopes));
    }
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

  // The next rows of the strip before, two or with vectors all: from products to weights and gradients of logits.
  __attribute__((noinline)) void advance() {
    const int64_t from = before_.taken, to = from + (STAGED ? 2 : M::ROWS), stop = std::min(to, before_.some);
    before_.taken = to;
    for (int64_t i = from; i < stop; ++i) {
      T* const logits = before_.logits + i * STRIDE + first_;
      cap_row<T>(logits, stop_ - first_, T(p_.scale), T(p_.cap));
      if (keeps_capped_) std::copy_n(logits, stop_ - first_, capped_.at(size_t(i * STRIDE + first_)));
      place_row<T>(logits, *mask_, row_ + before_.r + i, key_ + first_, key_ + stop_);
    }
    if (summing_) {
      for (int64_t i = from; i < stop; ++i) sum_up(i);
    } else if (w_.column || w_.log || w_.mean || (p_.cap > 0 && !keeps_capped_)) {
      weigh<false>(from, stop);
    } else {
      weigh<true>(from, stop);
    }
  }

  // What the weights of a row are made with.
  struct Given {
    V factor, high, low, delta;
  };
  ATTLAS_INLINE Given given(int64_t row) const {
    return {all(T(double(factor_of<T>(p_)) / Weight<T>::UNIT)), all(shift_[row].high), all(shift_[row].low), all(delta_[row])};
  }

  // The weights of one vector of logits, and their gradients. PLAIN: no terms of statistics, and no cap.
  template <bool PLAIN>
  ATTLAS_INLINE void weigh(const Given& g, int64_t row, int64_t j, V logit, V slope, V& weight, V& gradient) const {
    const Weight<T> w(logit, g.factor, g.high, g.low);
    weight = w.e;
    slope -= g.delta;
    if (!PLAIN && w_.column) slope += load(of_columns_.data + key_ - first_key_ + j);
    if (!PLAIN && w_.log) slope += terms_[0][row] * (larger<T>(w.log, all(T(-1e4))) * T(Weight<T>::UNIT)) + terms_[1][row] * weight;
    gradient = weight * slope;
    if (PLAIN) return;
    if (w_.mean) {
      const V direct = terms_[2][row] + terms_[3][row] * (logit * factor_of<T>(p_) - terms_[4][row]);
      gradient += logit > all(-INF<T>) ? direct : V{};
    }
    if (p_.cap > 0 && !keeps_capped_) {
      const V share = larger<T>(logit, all(T(-p_.cap))) * T(1 / p_.cap);  // what is masked has a weight of 0
      gradient *= T(1) - share * share;
    }
  }

  // From the gradients of the logits of the strip to those of the products that were capped.
  void uncap() {
    for (int64_t i = 0; i < before_.some; ++i)
      for (int64_t j = first_; j < stop_; j += W) {
        T* const gradient = before_.slopes + i * STRIDE + j;
        const V share = load(capped_.at(size_t(i * STRIDE + j))) * T(1 / p_.cap);
        store(gradient, load(gradient) * (T(1) - share * share));
      }
  }

  // Rows [from, stop) of the strip; columns that none of its rows may see get zeros.
  template <bool PLAIN>
  void weigh(int64_t from, int64_t stop) {
    const int64_t row = before_.r + from;
    if constexpr (STAGED) {
      const Given rows[2] = {given(row), given(row + 1)};
      for (int64_t j = 0; j < KEYS; j += 2 * W) {
        V weight[2][2] = {}, gradient[2][2] = {};
        for (int64_t x = 0; x < 2 && from < stop && j >= first_ && j < stop_; ++x)
          for (int64_t v = 0; v < 2; ++v) {
            const int64_t at = (from + x) * STRIDE + j + v * W;
            weigh<PLAIN>(rows[x], row + x, j + v * W, load(before_.logits + at), load(before_.slopes + at), weight[x][v], gradient[x][v]);
          }
        M::template put_both<false>(weights_.data, weights_.data, row, j, KEYS, ROWS, parts_.weights, weight);
        M::template put_both<true>(gradients_left_.data, gradients_.data, row, j, KEYS, ROWS, parts_.weights, gradient);
      }
    } else {
      for (int64_t i = from; i < stop; ++i) {
        T *logits = before_.logits + i * STRIDE, *slopes = before_.slopes + i * STRIDE;
        for (int64_t j = 0; j < first_; j += W) store(logits + j, V{}), store(slopes + j, V{});
        for (int64_t j = stop_; j < KEYS; j += W) store(logits + j, V{}), store(slopes + j, V{});
        const Given g = given(before_.r + i);
        for (int64_t j = first_; j < stop_; j += W) {
          V weight, gradient;
          weigh<PLAIN>(g, before_.r + i, j, load(logits + j), load(slopes + j), weight, gradient);
          store(logits + j, weight);
          store(slopes + j, gradient);
        }
      }
    }
  }

  // A row of logits: its weights times the numbers of the columns.
  void sum_up(int64_t i) {
    const Given g = given(before_.r + i);
    V total{};
    for (int64_t j = first_; j < stop_; j += W)
      total += Weight<T>(load(before_.logits + i * STRIDE + j), g.factor, g.high, g.low).e * load(of_columns_.data + key_ - first_key_ + j);
    sums_[before_.r + i] += sum<T>(total);
  }

#if defined(__AMX_BF16__)
  template <bool ADD>
  ATTLAS_INLINE void product(const Number* a, int a_parts, int64_t depth, const Number* b, int b_parts, int64_t steps, T* c,
                             int64_t stride) {
    const auto between = [this] { pause(); };
    M::template multiply<ADD>(a, a_parts, depth, b, b_parts, steps, c, stride, between);
  }
#else
  template <bool ADD, bool TURNED = false>  // not inlined: it is long
  __attribute__((noinline)) static void product(const Number* a, int, int64_t depth, const Number* b, int, int64_t steps, T* c,
                                                int64_t stride) {
    M::template multiply<ADD, TURNED>(a, 1, depth, b, 1, steps, c, stride);
  }
#endif

  // What was found of the keys lies transposed, block by block, where weights are the right side of its products.
  __attribute__((noinline)) void give(const T* found, int64_t wide, int64_t size, T factor, T* to) const {
    for (int64_t j = 0; j < stop_key_ - first_key_; ++j)
      for (int64_t t = 0; t < size; ++t)
        to[(first_key_ + j) * size + t] += factor * found[STAGED ? (j / KEYS * wide + t) * STRIDE + j % KEYS : j * wide + t];
  }

  const attlas::AttentionBackwardParams& w_;
  const attlas::AttentionParams& p_;
  const Rows<M>& form_;
  const BackwardParts parts_;
  const int64_t keys_, wide_, wide_values_;
  static constexpr int64_t SIDE = (STAGED ? 2 * M::ROWS : ROWS) * STRIDE;  // numbers of logits, or of slopes
  int64_t first_key_ = 0, stop_key_ = 0;                 // of the task
  int64_t row_ = 0, some_ = 0;                           // of the queries that are taken
  int64_t key_ = 0, first_ = 0, stop_ = 0;               // of the block, and its columns that may be seen
  int64_t pauses_ = 1, pause_ = 0;
  Strip before_{};
  const PlaceView* mask_ = nullptr;
  const Number* packed_ = nullptr;
  Aligned<Number> columns_, values_, rows_;    // keys and values of the task as columns, and keys as rows
  Aligned<T> d_keys_, d_values_;               // their gradients
  Aligned<T> products_;                        // logits and slopes, of two strips or of a block
  Aligned<Number> weights_, gradients_left_, gradients_;  // of a block, where they do not take the place of those
  Aligned<T> d_queries_;
  Aligned<T> of_columns_;  // the terms of the keys of the task
  PlaceSums<T, ROWS, KEYS, STRIDE> places_;
  const bool keeps_capped_;
  Aligned<T> capped_;  // products of a strip after the cap, before the terms of places
  static constexpr int TERMS = 5;
  bool summing_ = false;
  T sums_[ROWS] = {};
  T terms_[TERMS][ROWS] = {};  // of each row, in the order of DotBackward
  Shift<T> shift_[ROWS] = {};
  T delta_[ROWS] = {};
};

}  // namespace ATTLAS_ISA
