#include "abi_distance.h"
#include "problem.h"

extern "C" int32_t attlas_distance(const attlas::Distance*, int32_t set);
extern "C" int32_t attlas_distance_backward(const attlas::DistanceBackward*, int32_t set);

using namespace attlas_test;

template <class T>
double logit(int32_t kernel, int64_t d, const T* scale, const T* q, const T* k) {
  double sum = 0;
  for (int64_t c = 0; c < d; ++c) {
    const double gap = (double(q[c]) - double(k[c])) * double(scale[c]);
    sum += kernel == attlas::LAPLACE ? std::fabs(gap) : gap * gap;
  }
  if (kernel == attlas::GAUSSIAN) return -0.5 * sum;
  if (kernel == attlas::LAPLACE) return -sum;
  if (sum >= 1) return -INFINITY;
  if (kernel == attlas::BOXCAR) return 0;
  return std::log(kernel == attlas::EPANECHNIKOV ? 1 - sum : 1 - std::sqrt(sum));
}

template <class T>
void sums(int32_t set, int32_t kernel, double tolerance) {
  int mask = 0;
  for (int64_t d : {1, 2, 3, 5, 6, 8, 11})
    for (int64_t e : {1, 3, 9}) {
      const Problem<T> given(d == 3 ? 1 : 29, e == 3 ? 523 : 37, d, e, mask++ % 3);
      std::vector<T> scale;
      for (int64_t c = 0; c < d; ++c) scale.push_back(T(0.3 + (e == 9 ? 0.05 * double(c) : 0)));
      std::vector<T> out = blank<T>(8 * given.m * e), more = blank<T>(8 * given.m);
      std::vector<double> lse = blank<double>(8 * given.m);
      std::vector<T> top = blank<T>(8 * given.m);
      attlas::Distance work{given.pairs(e == 1 ? 2 : 1), kernel, scale.data()};
      work.pairs.out = out.data();
      work.pairs.lse = lse.data();
      for (int all = 0; all < 2; ++all) {
        CHECK(attlas_distance(&work, set) == attlas::DONE);
        compare<T>(given, [&](const T* q, const T* k) { return logit(kernel, d, scale.data(), q, k); }, out.data(),
                   lse.data(), tolerance);
        work.pairs.entropy = more.data();
        work.pairs.max_logit = top.data();
      }
      for (T entropy : more) CHECK(entropy > T(-1e-3) && entropy <= T(std::log(double(given.n)) + 1e-3));
      if (e == 3 && d != 5) continue;
      Found<T> found(given);
      const attlas::AttentionParams wanted = found.wanted(lse.data(), e == 1 ? 2 : 1);
      work.pairs.statistics = &wanted;
      CHECK(attlas_distance(&work, set) == attlas::DONE);
      found.check([&](const T* q, const T* k) { return logit(kernel, d, scale.data(), q, k); }, tolerance);
    }
}

// The gradients by differences of the sum that they belong to, in float64.
void gradients(int32_t set, int32_t kernel) {
  Problem<double> given(9, 21, 3, 2, 1);
  const std::vector<double> scale{0.4, 0.7, 1.1};
  const std::vector<double> left = normal<double>(8 * given.m * given.e, 5);
  std::vector<double> out = blank<double>(8 * given.m * given.e), lse = blank<double>(8 * given.m);
  const auto value = [&] {
    attlas::Distance work{given.pairs(2), kernel, scale.data()};
    work.pairs.out = out.data();
    work.pairs.lse = lse.data();
    CHECK(attlas_distance(&work, set) == attlas::DONE);
    double sum = 0;
    for (size_t i = 0; i < out.size(); ++i) sum += out[i] * left[i];
    return sum;
  };
  value();
  std::vector<double> delta(lse.size(), 0.0);
  for (size_t i = 0; i < out.size(); ++i) delta[i / size_t(given.e)] += out[i] * left[i];
  std::vector<double> first = blank<double>(8 * given.m * 3), second = blank<double>(8 * given.m * 3);
  attlas::DistanceBackward work{{given.pairs(2), kernel, scale.data()}, {left.data(), delta.data()}, nullptr, nullptr};
  work.of.pairs.known = lse.data();
  work.first = first.data();
  work.second = second.data();
  CHECK(attlas_distance_backward(&work, set) == attlas::DONE);
  const double step = 1e-6;
  for (int64_t i : {0, 4, 8})
    for (int64_t c = 0; c < 3; ++c) {
      double& q = const_cast<double&>(given.q.at(1, 2, i)[c]);
      const double before = q;
      q = before + step;
      const double above = value();
      q = before - step;
      const double below = value();
      q = before;
      const double by = kernel == attlas::GAUSSIAN ? -scale[size_t(c)] * scale[size_t(c)] : -scale[size_t(c)];
      CHECK(close(first[size_t((6 * given.m + i) * 3 + c)] * by, (above - below) / (2 * step), 1e-6));
    }
}

int main() {
  every_set_from_threads([](int32_t set) {
    for (int32_t kernel = attlas::GAUSSIAN; kernel <= attlas::TRIANGULAR; ++kernel) {
      sums<float>(set, kernel, 2e-4);
      sums<double>(set, kernel, 1e-10);
    }
    gradients(set, attlas::GAUSSIAN);
    gradients(set, attlas::LAPLACE);
  }, 2);
  const Problem<float> given(3, 4, 17, 1, 0);
  const std::vector<float> scale(17, 1.0f);
  attlas::Distance wide{given.pairs(1), attlas::GAUSSIAN, scale.data()};
  CHECK(attlas_distance(&wide, 0) == attlas::UNSUPPORTED);
  const attlas::AttentionParams wanted{};
  wide.pairs.statistics = &wanted;
  CHECK(attlas_distance(&wide, 0) == attlas::UNSUPPORTED);
  std::puts("distance: ok");
}
