// What the tests of additive scores and of distances share: a small problem, its mask, and softmax written out.
#pragma once

#include <functional>

#include "abi_pairs.h"
#include "check.h"

namespace attlas_test {

using attlas::Pairs;
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
  Pairs pairs(int32_t threads) const {
    Pairs p{};
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
void compare(const Problem<T>& given, const std::function<double(const T*, const T*)>& logit, const T* out, const T* lse,
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

}  // namespace attlas_test
