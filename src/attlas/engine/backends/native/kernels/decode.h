// Few queries, as when a model writes one token at a time: output, log-sum-exp and statistics in one pass over the keys and
// values, which are read once, as they lie, and not packed. What limits it is memory, so that all threads must read at once
// also where there is one head: the keys are split, and what the splits found is joined in their order. What is wanted of
// columns, and the coverage, are found afterwards, from the logits, which are few enough to be kept.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "coverage.h"
#include "forward.h"
#include "parallel.h"
#include "row_statistics.h"
#include "tokens.h"

namespace ATTLAS_ISA {

// The sums of WIDTH vectors, one in each lane.
template <class T>
ATTLAS_INLINE Vec<T> sums_of(Vec<T>* x) {
#pragma GCC unroll 4
  for (int left = WIDTH<T>; left > 1; left /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < left / 2; ++i) x[i] = sum_of_pairs<T>(x[2 * i], x[2 * i + 1]);
  return x[0];
}

template <class T, class Source>
class Decode {
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  static constexpr int64_t CHUNK = 128;    // keys whose weights are held; they and their values stay in the nearest cache
  static constexpr int64_t SPLIT = 1024;   // keys of one task, at least
  static constexpr int64_t MOST = 64;      // tasks of one head
  static constexpr int64_t AHEAD = 2048;   // bytes between what is read and what is fetched for later
  static constexpr T FAR = sizeof(T) == 8 ? T(1e15) : T(1e8);  // logits from which differences lose whole numbers
  static constexpr int TOGETHER = 4;       // rows that share what is loaded of a key or value
  static constexpr int64_t KEPT = 64 << 20;  // most bytes of logits, where there is more than one query

 public:
  static bool suits(const attlas::AttentionParams& p) {
    if (p.m >= 16 || (p.lse_known && p.out)) return false;
    return !keeps_logits(p) || p.m == 1 || p.batch * p.heads * p.m * p.n * int64_t(sizeof(T)) <= KEPT;
  }

  explicit Decode(const attlas::AttentionParams& p)
      : p_(p),
        group_(p.heads / p.key_heads),
        rows_(group_ * p.m),
        depth_(round_up(p.d, W)),
        width_(p.out ? round_up(p.e, W) : 0),
        split_(std::max(SPLIT, round_up((p.n + MOST - 1) / MOST, CHUNK))),
        splits_((p.n + split_ - 1) / split_),
        heads_(p.batch * p.key_heads),
        stride_(round_up(p.n, W)),
        wanted_((row_sums_for(p) & ~MAXIMA) | (p.mass ? TOTALS : 0)),
        pooled_(size_t(heads_ * splits_ * rows_ * width_)),
        states_(size_t(heads_ * splits_ * rows_)),
        sums_(wanted_ ? states_.size() : 0),
        largest_(int64_t(states_.size()), p.k_largest),
        kept_(keeps_logits(p) ? size_t(heads_ * rows_ * stride_) : 0),
        lse_(p.lse_known || !keeps_logits(p) ? 0 : size_t(p.batch * p.heads * p.m)) {
    largest_.clear();
  }

  int32_t run() {
    std::vector<std::unique_ptr<Workspace>> workspaces(size_t(p_.threads));
    attlas::share(size_t(heads_ * splits_), p_.threads, [&](size_t task, int thread) {
      if (!workspaces[thread]) workspaces[thread] = std::make_unique<Workspace>(rows_ * depth_);
      Task(*this, *workspaces[thread], int64_t(task)).run();
    });
    if (non_finite_) return attlas::NOT_FINITE;
    // Threads are not worth their start where there is little to join.
    const bool small = heads_ * splits_ * rows_ * (width_ + W) < (1 << 16);
    attlas::share(size_t(heads_), small ? 1 : p_.threads, [&](size_t head, int) { join(int64_t(head)); });
    if (wants_column_statistics(p_))
      attlas::share(size_t(p_.batch * p_.heads), p_.threads, [&](size_t head, int) { add_columns(int64_t(head)); });
    if (p_.coverage) attlas::share(size_t(p_.batch * p_.heads), p_.threads, [&](size_t head, int) { cover(int64_t(head)); });
    return non_finite_ ? attlas::NOT_FINITE : attlas::DONE;
  }

 private:
  static bool keeps_logits(const attlas::AttentionParams& p) { return wants_column_statistics(p) || p.coverage; }

  struct State {
    T top = -INF<T>, total = 0;
  };

  // What one thread computes with.
  struct Workspace {
    Aligned<T> queries, weights;
    explicit Workspace(int64_t size) : queries(size_t(size)), weights(size_t(TOGETHER * CHUNK)) {}
  };

  // One split of one head of keys.
  struct Task {
    Decode& decode;
    const attlas::AttentionParams& p;
    Workspace& workspace;
    const int64_t b, g, first, stop;
    const Reader<T, Source> keys, values;
    T* const pooled;
    const int64_t row;  // of the states, sums and largest logits: the first of this task
    State* const states;
    bool non_finite = false;

    Task(Decode& decode, Workspace& workspace, int64_t task)
        : decode(decode),
          p(decode.p_),
          workspace(workspace),
          b(task / decode.splits_ / p.key_heads),
          g(task / decode.splits_ % p.key_heads),
          first(task % decode.splits_ * decode.split_),
          stop(std::min(first + decode.split_, p.n)),
          keys(rows_of<T, Source>(p.k, b, g)),
          values(rows_of<T, Source>(p.v, b, g)),
          pooled(decode.pooled_.at(size_t(task * decode.rows_ * decode.width_))),
          row(task * decode.rows_),
          states(decode.states_.data() + row) {}

    void run() {
      std::optional<Flush> flush;  // an output alone is exact for the smallest numbers of 16 bits too
      if (decode.wanted_) flush.emplace();
      std::fill(pooled, pooled + decode.rows_ * decode.width_, T(0));
      if (keeps_logits(p))
        for (int64_t x = 0; x < decode.rows_; ++x) std::fill_n(kept(x, first), round_up(stop - first, W), -INF<T>);
      for (int64_t x = 0; x < decode.rows_; ++x) {
        const auto queries = rows_of<T, Source>(p.q, b, head(x));
        for (int64_t t = 0; t < decode.depth_; t += W)
          store(workspace.queries.at(size_t(x * decode.depth_ + t)), queries.vector(x % p.m, t, p.d - t));
      }
      for (int64_t from = first; from < stop; from += CHUNK) {
        const int64_t to = std::min(from + CHUNK, stop);
        int64_t x = 0;
        for (; x + TOGETHER <= decode.rows_; x += TOGETHER) rectangle<TOGETHER>(x, from, to);
        for (; x + 2 <= decode.rows_; x += 2) rectangle<2>(x, from, to);
        if (x < decode.rows_) rectangle<1>(x, from, to);
      }
      if (non_finite) decode.non_finite_ = true;
    }

    int64_t head(int64_t x) const { return g * decode.group_ + x / p.m; }
    // Where the logits of row x are kept, from key j on.
    T* kept(int64_t x, int64_t j) const {
      return decode.kept_.at(size_t(((b * p.key_heads + g) * decode.rows_ + x) * decode.stride_ + j));
    }

    // Rows x to x + R against keys [from, to).
    template <int R>
    void rectangle(int64_t x, int64_t from, int64_t to) {
      int64_t left = to, right = from;
      for (int r = 0; r < R; ++r) {
        const PlaceView mask(p, b, head(x + r));
        int64_t a, z;
        mask.hull((x + r) % p.m, (x + r) % p.m + 1, a, z);
        left = std::min(left, std::max(a, from));
        right = std::max(right, std::min(z, to));
      }
      if (left >= right) return;
      if (p.d == 4 * W) {
        products<R, 4>(x, left, right);
      } else if (p.d == 8 * W) {
        products<R, 8>(x, left, right);
      } else {
        products<R, 0>(x, left, right);
      }
      bool any = false;
      for (int r = 0; r < R; ++r) any |= weigh(x + r, left, right, workspace.weights.at(size_t(r * CHUNK)));
      if (any && p.out) pool<R>(x, left, right);
    }

    template <int R, int STEPS>
    void products(int64_t x, int64_t left, int64_t right) {
      const T* queries = workspace.queries.at(size_t(x * decode.depth_));
      const int64_t steps = STEPS ? STEPS : decode.depth_ / W;
      for (int64_t j = left; j < right; j += W) {
        V sums[R][W] = {};
#pragma GCC unroll 4
        for (int key = 0; key < W; ++key) {
          if (j + key >= right) break;
          prefetch(keys, j + key, 0, p.d);
          V sum[R] = {};
#pragma GCC unroll 8
          for (int64_t t = 0; t < steps; ++t) {
            const V k = keys.vector(j + key, t * W, STEPS ? W : p.d - t * W);
            for (int r = 0; r < R; ++r) sum[r] += load(queries + r * decode.depth_ + t * W) * k;
          }
          for (int r = 0; r < R; ++r) sums[r][key] = sum[r];
        }
        for (int r = 0; r < R; ++r) store(workspace.weights.at(size_t(r * CHUNK + j - left)), sums_of<T>(sums[r]));
      }
    }

    static ATTLAS_INLINE void prefetch(const Reader<T, Source>& rows, int64_t i, int64_t first, int64_t size) {
      const char* at = reinterpret_cast<const char*>(rows.data + i * rows.stride + first) + AHEAD;
      for (int64_t line = 0; line < size * int64_t(sizeof(Source)); line += 64) __builtin_prefetch(at + line);
    }

    // From products to weights; false where row x sees none of the keys.
    bool weigh(int64_t x, int64_t left, int64_t right, T* logits) {
      const int64_t size = round_up(right - left, W);
      V inside = all(T(1));
      for (int64_t j = 0; j < size; j += W) inside *= load(logits + j) - load(logits + j) + T(1);  // NaN if one is not finite
      non_finite |= !(sum<T>(inside) == T(W));
      finish_row<T>(logits, PlaceView(p, b, head(x)), x % p.m, left, left + size, T(p.scale), T(p.cap));
      for (int64_t j = right - left; j < size; ++j) logits[j] = -INF<T>;
      V tops = all(-INF<T>);
      for (int64_t j = 0; j < size; j += W) tops = larger<T>(tops, load(logits + j));
      const T scale = factor_of<T>(p), peak = most<T>(tops) * scale;
      State& state = states[x];
      non_finite |= peak > -INF<T> && std::fabs(peak) > FAR;
      if (non_finite || !(peak > -INF<T>)) {
        std::fill(logits, logits + size, T(0));
        return false;
      }
      if (peak > state.top) {
        const T shrink = state.total > 0 ? std::exp(state.top - peak) : T(0);
        if (decode.wanted_ && state.total > 0) decode.sums_[size_t(row + x)].multiply(shrink, double(state.top) - double(peak));
        state.total *= shrink;
        for (int64_t t = 0; t < decode.width_; t += W) store(pooled + x * decode.width_ + t, load(pooled + x * decode.width_ + t) * shrink);
        state.top = peak;
      }
      if (keeps_logits(p)) std::copy(logits, logits + (right - left), kept(x, left));
      if (p.top_keys)
        decode.largest_.row(row + x).add(&tops, 1, W, [&](int) { return typename KLargest<T>::Segment{logits, left, size}; });
      if (decode.wanted_) {
        with_first_loop<TOTALS | PLOGP, TOTALS | PLOGP | SQUARES, TOTALS | PLOGP | SQUARES | MOMENTS | MASKED>(
            decode.wanted_ | TOTALS, [&]<int LOOP>() { add_sums<LOOP>(x, size, logits); });
        return true;
      }
      V total{};
      for (int64_t j = 0; j < size; j += W) {
        const V e = exp_below(load(logits + j) * scale - all(state.top));
        total += e;
        store(logits + j, e);
      }
      state.total += sum<T>(total);
      return true;
    }

    // Turns the logits of row x into weights, and adds these to the sums of the row.
    template <int WANTED>
    void add_sums(int64_t x, int64_t size, T* logits) {
      State& state = states[x];
      RowSums<T, double>& row_sums = decode.sums_[size_t(row + x)];
      const T scale = factor_of<T>(p);
      const Shift<T> shift = Weight<T>::shift_of(double(state.top), scale);
      const V factor = all(T(double(scale) / Weight<T>::UNIT)), high = all(shift.high), low = all(shift.low);
      const T centre = WANTED & MOMENTS ? centre_of<T>(logits, size, scale, row_sums.moments, state.top) : T(0);
      VectorSums<T> sums;
      for (int64_t j = 0; j < size; j += W) {
        const V logit = load(logits + j);
        const Weight<T> weight(logit, factor, high, low);
        sums.template accumulate<WANTED>(logit, weight, all(centre));
        store(logits + j, weight.e);
      }
      state.total += sum<T>(sums.total);
      row_sums.add(sums, sums.template count<WANTED>(size), centre, scale, WANTED);
    }

    // Values of keys [left, right) are added with their weights.
    template <int R>
    void pool(int64_t x, int64_t left, int64_t right) {
      int64_t t = 0;
      for (; t + 4 * W <= p.e; t += 4 * W) columns<R, 4>(x, left, right, t);
      for (; t < p.e; t += W) columns<R, 1>(x, left, right, t);
    }

    template <int R, int VECTORS>
    void columns(int64_t x, int64_t left, int64_t right, int64_t t) {
      V sums[R][VECTORS];
      T* to = pooled + x * decode.width_ + t;
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < VECTORS; ++c) sums[r][c] = load(to + r * decode.width_ + c * W);
      for (int64_t j = left; j < right; ++j) {
        prefetch(values, j, t, VECTORS * W);
        V v[VECTORS];
#pragma GCC unroll 4
        for (int c = 0; c < VECTORS; ++c) v[c] = values.vector(j, t + c * W, VECTORS > 1 ? W : p.e - t);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V weight = all(workspace.weights.at(size_t(r * CHUNK))[j - left]);
#pragma GCC unroll 4
          for (int c = 0; c < VECTORS; ++c) sums[r][c] += weight * v[c];
        }
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < VECTORS; ++c) store(to + r * decode.width_ + c * W, sums[r][c]);
    }
  };

  // What the splits of one head of keys found, in their order.
  void join(int64_t pair) {
    const State* states = states_.data() + pair * splits_ * rows_;
    const T* found = pooled_.at(size_t(pair * splits_ * rows_ * width_));
    const T* sinks = static_cast<const T*>(p_.sink);
    std::vector<T> sums(static_cast<size_t>(width_));
    for (int64_t x = 0; x < rows_; ++x) {
      const int64_t h = pair % p_.key_heads * group_ + x / p_.m;
      const int64_t at = (pair / p_.key_heads * p_.heads + h) * p_.m + x % p_.m;
      T top = sinks ? sinks[h] : -INF<T>, total = 0;
      for (int64_t s = 0; s < splits_; ++s) top = std::max(top, states[s * rows_ + x].top);
      std::fill(sums.begin(), sums.end(), T(0));
      for (int64_t s = 0; s < splits_; ++s) {
        const State& state = states[s * rows_ + x];
        if (!(state.total > 0)) continue;
        const T share = std::exp(state.top - top);
        total += state.total * share;
        for (int64_t t = 0; t < width_; ++t) sums[size_t(t)] += found[(s * rows_ + x) * width_ + t] * share;
      }
      if (sinks && sinks[h] > -INF<T>) total += std::exp(sinks[h] - top);
      const T inverse = total > 0 ? T(1) / total : T(0);
      double lse = total > 0 ? double(top) + std::log(double(total)) : -INF<double>;
      if (p_.lse_known) {
        lse = p_.lse[at];
      } else {
        if (p_.lse) p_.lse[at] = lse;
        if (!lse_.empty()) lse_[size_t(at)] = lse;
      }
      finish_statistics(pair * splits_ * rows_ + x, at, double(top), lse);
      for (int64_t t = 0; p_.out && t < p_.e; ++t) {
        const T mean = sums[size_t(t)] * inverse;
        if (!(std::fabs(mean) < INF<T>)) non_finite_ = true;
        static_cast<T*>(p_.out)[at * p_.e + t] = mean;
      }
    }
  }

  // Writes the statistics of a row, and its largest weights: the splits have what they found of it in places `first`, `first`
  // + rows_ and so on, `at` is its place in the results, and `top` at least as large as all its logits.
  void finish_statistics(int64_t first, int64_t at, double top, double lse) {
    if (!wants_row_statistics(p_)) return;
    T max_logit = -INF<T>;
    RowSums<T, double> found;
    for (int64_t s = 0; s < splits_; ++s) {
      const size_t from = size_t(first + s * rows_);
      if (s && p_.top_keys) largest_.merge(first, int64_t(from));
      const State& state = states_[from];
      if (!(state.total > 0)) continue;
      max_logit = std::max(max_logit, state.top);
      if (!wanted_) continue;
      RowSums<T, double> part = sums_[from];
      part.multiply(std::exp(double(state.top) - top), double(state.top) - top);
      found.total += part.total, found.plogp += part.plogp, found.squares += part.squares;
      const Moments& moments = part.moments;
      if (moments.count > 0) found.moments.merge(moments.count, moments.mean, 0, moments.squares, 1);
    }
    const bool empty = !(lse > -INF<double> && top > -INF<double>);
    found.statistics(empty ? 0 : std::exp(top - lse), empty ? 0 : lse - top, max_logit).store(p_, at);
    largest_.store(p_, first, at, factor_of<T>(p_), lse);
  }

  // The logits of the first query of a head, as they were kept; those of the next one are stride_ further on.
  const T* kept(int64_t head) const {
    const int64_t b = head / p_.heads, h = head % p_.heads;
    return kept_.at(size_t(((b * p_.key_heads + h / group_) * rows_ + h % group_ * p_.m) * stride_));
  }

  // Finds the coverage of the rows of a head.
  void cover(int64_t head) {
    using M = Whole<T, 1>;
    Finished<T> known(p_);
    if (!p_.lse_known) known.lse = lse_.data();
    CoveragePass<M> pass(known, 1, 1, std::make_unique<KeptLogits<T>>(kept(head), stride_, !has_bias(p_)));
    for (int64_t i = 0; i < p_.m; i += M::ROWS)
      pass.run(head / p_.heads, head % p_.heads, i, std::min<int64_t>(M::ROWS, p_.m - i), nullptr);
  }

  // Writes what is wanted of the columns of a head.
  void add_columns(int64_t head) {
    const Flush flush;
    const T* logits = kept(head);
    const T scale = factor_of<T>(p_);
    const size_t size = size_t(stride_);
    std::vector<T> weights(size), mass(p_.column_mass ? size : 0), most(p_.column_max ? size : 0);
    std::vector<double> offsets(p_.offsets ? size_t(p_.m + p_.n - 1) : 0);
    for (int64_t i = 0; i < p_.m; ++i) {
      const int64_t at = head * p_.m + i;
      const double lse = p_.lse_known ? p_.lse[at] : lse_[size_t(at)];
      const Shift<T> shift = lse > -INF<double> ? Weight<T>::shift_of(lse, scale) : Shift<T>::none();
      const V factor = all(T(double(scale) / Weight<T>::UNIT)), high = all(shift.high), low = all(shift.low);
      for (int64_t j = 0; j < stride_; j += W) {
        const V e = Weight<T>(load(logits + i * stride_ + j), factor, high, low).e;
        store(weights.data() + j, e);
        if (p_.column_mass) store(mass.data() + j, load(mass.data() + j) + e);
        if (p_.column_max) store(most.data() + j, larger<T>(load(most.data() + j), e));
      }
      for (int64_t j = 0; p_.offsets && j < p_.n; ++j) offsets[size_t(p_.m - 1 - i + j)] += double(weights[size_t(j)]);
      add_to_picture(head, i, weights.data());
    }
    if (p_.column_mass) std::copy_n(mass.data(), p_.n, static_cast<T*>(p_.column_mass) + head * p_.n);
    if (p_.column_max) std::copy_n(most.data(), p_.n, static_cast<T*>(p_.column_max) + head * p_.n);
    if (p_.offsets) std::copy(offsets.begin(), offsets.end(), static_cast<T*>(p_.offsets) + head * int64_t(offsets.size()));
  }

  // Adds the weights of query i to the picture of a head.
  void add_to_picture(int64_t head, int64_t i, const T* weights) const {
    if (!p_.picture_sum && !p_.picture_max) return;
    const int64_t* last_row = p_.row_edges + p_.picture_rows + 1;
    const int64_t block_row = std::upper_bound(p_.row_edges, last_row, i) - p_.row_edges - 1;
    const int64_t first = (head * p_.picture_rows + block_row) * p_.picture_columns;
    for (int64_t x = 0; x < p_.picture_columns; ++x) {
      double total = 0;
      T most = 0;
      for (int64_t j = p_.column_edges[x]; j < p_.column_edges[x + 1]; ++j) {
        total += double(weights[j]);
        most = std::max(most, weights[j]);
      }
      if (p_.picture_sum) static_cast<T*>(p_.picture_sum)[first + x] += T(total);
      if (p_.picture_max) {
        T& to = static_cast<T*>(p_.picture_max)[first + x];
        to = std::max(to, most);
      }
    }
  }

  const attlas::AttentionParams& p_;
  const int64_t group_, rows_, depth_, width_, split_, splits_, heads_;
  const int64_t stride_;  // from one row of kept logits to the next
  const int wanted_;      // of RowSum; the largest logits are found anyway
  const Aligned<T> pooled_;
  std::vector<State> states_;            // by head of keys, split and row
  std::vector<RowSums<T, double>> sums_;  // likewise
  KLargestOfRows<T> largest_;             // likewise
  const Aligned<T> kept_;                 // logits, without the scale, by head of keys and row
  std::vector<double> lse_;               // where columns want it and the caller does not have it
  std::atomic<bool> non_finite_{false};
};

}  // namespace ATTLAS_ISA
