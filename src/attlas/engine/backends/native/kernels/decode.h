// Few queries, as when a model writes one token at a time: output and log-sum-exp in one pass over the keys and values,
// which are read once, as they lie, and not packed. What limits it is memory, so that all threads must read at once also
// where there is one head: the keys are split, and what the splits found is joined in their order.
#pragma once

#include <atomic>
#include <vector>

#include "forward.h"
#include "parallel.h"
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

 public:
  static bool suits(const attlas::AttentionParams& p) {
    const bool more = wants_row_statistics(p) || wants_column_statistics(p) || p.coverage;
    return p.m < 16 && !more && !(p.lse_known && p.lse);
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
        pooled_(size_t(heads_ * splits_ * rows_ * width_)),
        states_(size_t(heads_ * splits_ * rows_)) {}

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
    return non_finite_ ? attlas::NOT_FINITE : attlas::DONE;
  }

 private:
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
          states(decode.states_.data() + task * decode.rows_) {}

    void run() {
      std::fill(pooled, pooled + decode.rows_ * decode.width_, T(0));
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

    // Rows x to x + R against keys [from, to).
    template <int R>
    void rectangle(int64_t x, int64_t from, int64_t to) {
      int64_t left = to, right = from;
      for (int r = 0; r < R; ++r) {
        const MaskView mask(p, b, head(x + r));
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
      finish_row<T>(logits, MaskView(p, b, head(x)), x % p.m, left, left + size, T(p.scale), T(p.cap));
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
        state.total *= shrink;
        for (int64_t t = 0; t < decode.width_; t += W) store(pooled + x * decode.width_ + t, load(pooled + x * decode.width_ + t) * shrink);
        state.top = peak;
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
      if (p_.lse) p_.lse[at] = total > 0 ? double(top) + std::log(double(total)) : -INF<double>;
      for (int64_t t = 0; p_.out && t < p_.e; ++t) {
        const T mean = sums[size_t(t)] * inverse;
        if (!(std::fabs(mean) < INF<T>)) non_finite_ = true;
        static_cast<T*>(p_.out)[at * p_.e + t] = mean;
      }
    }
  }

  const attlas::AttentionParams& p_;
  const int64_t group_, rows_, depth_, width_, split_, splits_, heads_;
  const Aligned<T> pooled_;
  std::vector<State> states_;
  std::atomic<bool> non_finite_{false};
};

}  // namespace ATTLAS_ISA
