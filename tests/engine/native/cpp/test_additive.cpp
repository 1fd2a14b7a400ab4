#include "abi_additive.h"
#include "problem.h"

extern "C" int32_t attlas_additive(const attlas::Additive*, int32_t set);
extern "C" int32_t attlas_additive_backward(const attlas::AdditiveBackward*, int32_t set);

using namespace attlas_test;

template <class T>
void sums(int32_t set, double tolerance) {
  int mask = 0;
  for (int64_t d : {1, 3, 8, 13})
    for (int64_t e : {1, 9})
      for (double far : {1.0, 40.0}) {
        Problem<T> given(29, e == 1 ? 523 : 37, d, e, mask++ % 3);
        for (T& x : given.q.numbers) x *= T(far);  // beyond what the reciprocals take, for some
        const std::vector<T> weight = normal<T>(d, 4);
        std::vector<T> out = blank<T>(8 * given.m * e);
        std::vector<double> lse = blank<double>(8 * given.m);
        attlas::Additive work{given.pairs(e == 1 ? 2 : 1), weight.data()};
        work.pairs.out = out.data();
        work.pairs.lse = lse.data();
        CHECK(attlas_additive(&work, set) == attlas::DONE);
        const auto logit = [&](const T* q, const T* k) {
          double sum = 0;
          for (int64_t u = 0; u < d; ++u) sum += double(weight[size_t(u)]) * std::tanh(double(q[u]) + double(k[u]));
          return sum;
        };
        compare<T>(given, logit, out.data(), lse.data(), tolerance);
        if (e == 1 && d != 3) continue;
        Found<T> found(given);
        const attlas::AttentionParams wanted = found.wanted(lse.data(), e == 1 ? 2 : 1);
        work.pairs.statistics = &wanted;
        CHECK(attlas_additive(&work, set) == attlas::DONE);
        found.check(logit, tolerance);
      }
}

// The gradients by differences of the sum that they belong to, in float64, with one worker a head and with several.
void gradients(int32_t set, int32_t threads, double far) {
  Problem<double> given(15, 21, 6, 2, 1);
  for (double& x : given.q.numbers) x *= far;
  std::vector<double> weight = normal<double>(6, 4);
  const std::vector<double> left = normal<double>(8 * given.m * given.e, 5);
  std::vector<double> out = blank<double>(8 * given.m * given.e), lse = blank<double>(8 * given.m);
  const auto value = [&] {
    attlas::Additive work{given.pairs(threads), weight.data()};
    work.pairs.out = out.data();
    work.pairs.lse = lse.data();
    CHECK(attlas_additive(&work, set) == attlas::DONE);
    double sum = 0;
    for (size_t i = 0; i < out.size(); ++i) sum += out[i] * left[i];
    return sum;
  };
  value();
  std::vector<double> delta(lse.size(), 0.0);
  for (size_t i = 0; i < out.size(); ++i) delta[i / size_t(given.e)] += out[i] * left[i];
  std::vector<double> d_rows = blank<double>(8 * given.m * 6), d_columns = blank<double>(8 * given.n * 6);
  std::vector<double> d_values = blank<double>(8 * given.n * 2), d_weight = blank<double>(6);
  attlas::AdditiveBackward work{{given.pairs(threads), weight.data()}, {left.data(), delta.data()}, d_rows.data(),
                                d_columns.data(), d_values.data(), d_weight.data()};
  work.of.pairs.known = lse.data();
  CHECK(attlas_additive_backward(&work, set) == attlas::DONE);
  const double step = 1e-6;
  const auto slope = [&](double& x) {
    const double before = x;
    x = before + step;
    const double above = value();
    x = before - step;
    const double below = value();
    x = before;
    return (above - below) / (2 * step);
  };
  for (int64_t u = 0; u < 6; ++u) {
    CHECK(close(d_rows[size_t((6 * given.m + 4) * 6 + u)], slope(const_cast<double&>(given.q.at(1, 2, 4)[u])), 1e-6));
    const double both = d_columns[size_t((6 * given.n + 3) * 6 + u)] + d_columns[size_t((7 * given.n + 3) * 6 + u)];
    CHECK(close(both, slope(const_cast<double&>(given.k.at(1, 1, 3)[u])), 1e-6));
    CHECK(close(d_weight[size_t(u)], slope(weight[size_t(u)]), 1e-6));
  }
  double d_value = 0;
  for (int64_t h = 4; h < 8; ++h) d_value += d_values[size_t((h * given.n + 2) * 2 + 1)];
  CHECK(close(d_value, slope(const_cast<double&>(given.v.at(1, 0, 2)[1])), 1e-6));
}

int main() {
  every_set_from_threads([](int32_t set) {
    sums<float>(set, 2e-5);
    sums<double>(set, 1e-11);
    for (double far : {1.0, 200.0}) {
      gradients(set, 1, far);
      gradients(set, 9, far);  // more than there are heads
    }
  }, 2);
  std::puts("additive: ok");
}
