// What the tests of additive scores and of distances share: a small problem, its mask, and softmax written out.
#pragma once

#include <algorithm>
#include <functional>

#include "abi_pairs.h"
#include "check.h"

namespace attlas_test {

using attlas::PairwiseParams;
using attlas::Tensor4;

// (batch, heads, tokens, size), with `gap` numbers between one token and the next.
template <class T>
struct Tokens {
  int64_t heads, count, size, gap;
  std::vector<T> numbers;
  Tokens(int64_t heads_, int64_t count_, int64_t size_, unsigned seed, int64_t gap_ = 0)
      : heads(heads_), count(count_), size(size_), gap(gap_), numbers(normal<T>(2 * heads_ * count_ * (size_ + gap_), seed)) {}
  Tensor4 view() const {
    return {numbers.data(), heads * count * (size + gap), count * (size + gap), size + gap};
  }
  const T* at(int64_t b, int64_t h, int64_t i) const {
    return numbers.data() + ((b * heads + h) * count + i) * (size + gap);
  }
};

template <class T>
constexpr int32_t type_of() {
  return sizeof(T) == 4 ? attlas::FLOAT32 : attlas::FLOAT64;
}

// Two sequences, four heads, two key heads, one value head.
template <class T>
struct Problem {
  int64_t m, n, d, e;
  int mask;  // 0 for none, 1 for intervals (some empty), 2 for bytes
  Tokens<T> q, k, v;
  std::vector<int32_t> low, high;
  std::vector<uint8_t> allowed;

  Problem(int64_t m_, int64_t n_, int64_t d_, int64_t e_, int mask_)
      : m(m_), n(n_), d(d_), e(e_), mask(mask_), q(4, m_, d_, 1, 3), k(2, n_, d_, 2), v(1, n_, e_, 3, 1) {
    for (int64_t i = 0; i < m; ++i) {
      low.push_back(int32_t(std::max<int64_t>(0, i - 5)));
      high.push_back(int32_t(i % 7 == 3 ? 0 : std::min(n, i + 2)));
      for (int64_t j = 0; j < n; ++j) allowed.push_back((i + j) % 3 == 0);
    }
  }
  bool may(int64_t i, int64_t j) const {
    if (mask == 1) return low[size_t(i)] <= j && j < high[size_t(i)];
    return mask == 0 || allowed[size_t(i * n + j)];
  }
  PairwiseParams pairs(int32_t threads) const {
    PairwiseParams p{};
    p.batch = 2;
    p.heads = 4;
    p.token_heads = 2;
    p.value_heads = 1;
    p.m = m;
    p.n = n;
    p.d = d;
    p.e = e;
    p.rows = q.view();
    p.columns = k.view();
    p.values = v.view();
    p.type = type_of<T>();
    p.threads = threads;
    if (mask == 1) {
      p.low = low.data();
      p.high = high.data();
    }
    if (mask == 2) {
      p.allowed = allowed.data();
      p.allowed_row = n;
    }
    return p;
  }
};

// Compare the results of a forward call with softmax of `logit`.
template <class T>
void compare(const Problem<T>& given, const std::function<double(const T*, const T*)>& logit, const T* out, const double* lse,
             double tolerance) {
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t h = 0; h < 4; ++h)
      for (int64_t i = 0; i < given.m; ++i) {
        double total = 0;
        std::vector<double> sums(size_t(given.e), 0.0);
        for (int64_t j = 0; j < given.n; ++j) {
          const double w = given.may(i, j) ? std::exp(logit(given.q.at(b, h, i), given.k.at(b, h / 2, j))) : 0;
          total += w;
          for (int64_t c = 0; c < given.e; ++c) sums[size_t(c)] += w * double(given.v.at(b, 0, j)[c]);
        }
        const int64_t row = (b * 4 + h) * given.m + i;
        if (total == 0)
          CHECK(lse[row] == -INFINITY);
        else
          CHECK(close(lse[row], std::log(total), tolerance));
        for (int64_t c = 0; c < given.e; ++c)
          CHECK(close(out[row * given.e + c], total == 0 ? 0 : sums[size_t(c)] / total, tolerance));
      }
}

// Everything that the pass with a known log-sum-exp finds, and its comparison with what `logit` says.
template <class T>
struct Found {
  static constexpr int K = 3;
  const Problem<T>& given;
  std::vector<T> entropy, squares, mass, max_logit, mean, variance, top, column_mass, column_max, offsets, blocks, block_max;
  std::vector<int64_t> top_keys, coverage, row_edges, column_edges;
  std::vector<double> levels{0.9};

  explicit Found(const Problem<T>& p)
      : given(p),
        entropy(blank<T>(8 * p.m)),
        squares(entropy),
        mass(entropy),
        max_logit(entropy),
        mean(entropy),
        variance(entropy),
        top(blank<T>(8 * p.m * K)),
        column_mass(blank<T>(8 * p.n)),
        column_max(column_mass),
        offsets(blank<T>(8 * (p.m + p.n - 1))),
        blocks(8 * 4),
        block_max(blocks),
        top_keys(size_t(8 * p.m * K)),
        coverage(size_t(8 * p.m)),
        row_edges{0, std::min<int64_t>(5, p.m), p.m},
        column_edges{0, std::min<int64_t>(9, p.n), p.n} {}

  attlas::AttentionParams wanted(double* lse, int32_t threads) {
    const PairwiseParams pairs = given.pairs(threads);
    attlas::AttentionParams p{};
    p.batch = 2, p.heads = 4, p.m = given.m, p.n = given.n, p.d = given.d, p.type = pairs.type, p.threads = threads;
    p.scale = std::log(2.0), p.lse = lse, p.lse_known = 1;
    p.low = pairs.low, p.high = pairs.high, p.allowed = pairs.allowed, p.allowed_row = pairs.allowed_row;
    p.entropy = entropy.data(), p.squares = squares.data(), p.mass = mass.data(), p.max_logit = max_logit.data();
    p.mean = mean.data(), p.variance = variance.data();
    p.top_values = top.data(), p.top_keys = top_keys.data(), p.k_largest = K;
    p.column_mass = column_mass.data(), p.column_max = column_max.data(), p.offsets = offsets.data();
    p.picture_sum = blocks.data(), p.picture_max = block_max.data(), p.picture_rows = p.picture_columns = 2;
    p.row_edges = row_edges.data(), p.column_edges = column_edges.data();
    p.coverage = coverage.data(), p.levels = levels.data(), p.level_count = 1;
    return p;
  }

  void check(const std::function<double(const T*, const T*)>& logit, double tolerance) const {
    for (int64_t head = 0; head < 8; ++head) {
      std::vector<double> columns(size_t(given.n), 0.0), highest = columns, diagonals(size_t(given.m + given.n - 1), 0.0);
      std::vector<double> sums(4, 0.0), peaks(4, 0.0);
      for (int64_t i = 0; i < given.m; ++i) {
        std::vector<double> logits(size_t(given.n), -INFINITY);
        double total = 0, count = 0, mean_of = 0, largest = -INFINITY;
        for (int64_t j = 0; j < given.n; ++j) {
          if (!given.may(i, j)) continue;
          const double x = logits[size_t(j)] = logit(given.q.at(head / 4, head % 4, i), given.k.at(head / 4, head % 4 / 2, j));
          if (x == -INFINITY) continue;
          total += std::exp(x);
          count += 1;
          mean_of += x;
          largest = std::max(largest, x);
        }
        mean_of /= std::max(count, 1.0);
        double plogp = 0, two = 0, spread = 0, seen = 0;
        std::vector<double> weights;
        for (int64_t j = 0; j < given.n; ++j) {
          const double x = logits[size_t(j)];
          if (x == -INFINITY) continue;
          const double w = std::exp(x) / total;
          weights.push_back(w);
          plogp -= w * std::log(w);
          two += w * w;
          spread += (x - mean_of) * (x - mean_of) / count;
          columns[size_t(j)] += w;
          highest[size_t(j)] = std::max(highest[size_t(j)], w);
          diagonals[size_t(j - i + given.m - 1)] += w;
          const size_t block = size_t((i >= row_edges[1]) * 2 + (j >= column_edges[1]));
          sums[block] += w;
          peaks[block] = std::max(peaks[block], w);
        }
        std::sort(weights.begin(), weights.end(), std::greater<double>());
        const size_t row = size_t(head * given.m + i);
        CHECK(close(entropy[row], plogp, tolerance) && close(squares[row], two, tolerance));
        CHECK(close(mass[row], count > 0 ? 1 : 0, tolerance));
        CHECK(count == 0 ? max_logit[row] == -INFINITY : close(max_logit[row], largest, tolerance));
        CHECK(close(mean[row], mean_of, tolerance) && close(variance[row], spread, 10 * tolerance));
        for (size_t x = 0; x < K; ++x) {
          const size_t at = row * K + x;
          CHECK(close(top[at], x < weights.size() ? weights[x] : 0, tolerance));
          if (x < weights.size()) {
            const double w = std::exp(logits[size_t(top_keys[at])]) / total;
            CHECK(close(top[at], w, tolerance));
          } else {
            CHECK(top_keys[at] == -1);
          }
        }
        // As many as hold nine tenths, give or take rounding.
        for (int64_t x = 0; x < coverage[row]; ++x) seen += weights[size_t(x)];
        CHECK(count == 0 ? coverage[row] == 0 : seen >= 0.9 - 1e-3);
        CHECK(count == 0 || seen - weights[size_t(coverage[row] - 1)] < 0.9 + 1e-3);
      }
      for (int64_t j = 0; j < given.n; ++j) {
        CHECK(close(column_mass[size_t(head * given.n + j)], columns[size_t(j)], 10 * tolerance));
        CHECK(close(column_max[size_t(head * given.n + j)], highest[size_t(j)], tolerance));
      }
      for (size_t x = 0; x < diagonals.size(); ++x)
        CHECK(close(offsets[size_t(head) * diagonals.size() + x], diagonals[x], 10 * tolerance));
      for (size_t x = 0; x < 4; ++x) {
        CHECK(close(blocks[size_t(head) * 4 + x], sums[x], 10 * tolerance));
        CHECK(close(block_max[size_t(head) * 4 + x], peaks[x], tolerance));
      }
    }
  }
};

}  // namespace attlas_test
