#include "check.h"

#include <algorithm>

extern "C" int32_t attlas_dot_backward(const attlas::AttentionBackwardParams*, int32_t set);

using namespace attlas_test;

namespace {

struct Sizes {
  int64_t batch, heads, key_heads, m, n, d, e;
};

enum class Mask { NONE, CAUSAL, CELLS, NOTHING };

template <class T>
struct Gradients {
  std::vector<T> q, k, v, cells;
  std::vector<double> distances, queries, keys;
};

// Each gradient against its definition in double, from the log-sum-exp and the outputs of that definition.
template <class T>
Gradients<T> compare(int32_t set, int32_t type, Sizes z, Mask mask, double cap, double scale, int32_t threads,
                     bool places = false, bool shared = false) {
  const double tolerance = sizeof(T) == 8 ? 1e-10 : 2e-4;
  const auto q = normal<T>(z.batch * z.heads * z.m * z.d, 1), key = normal<T>(z.batch * z.key_heads * z.n * z.d, 2);
  const auto v = normal<T>(z.batch * z.key_heads * z.n * z.e, 3), grad = normal<T>(z.batch * z.heads * z.m * z.e, 4);
  std::vector<int32_t> low(size_t(z.m), 0), high(size_t(z.m), int32_t(z.n));
  std::vector<uint8_t> allowed(size_t(z.m * z.n), 1);
  for (int64_t i = 0; i < z.m; ++i) {
    if (mask == Mask::CAUSAL) high[i] = int32_t(std::clamp<int64_t>(i + 1 + z.n - z.m, 0, z.n));
    if (mask == Mask::NOTHING) high[i] = 0;
    for (int64_t j = 0; mask == Mask::CELLS && j < z.n; ++j) allowed[i * z.n + j] = i % 5 != 2 && (i * 7 + j * 3) % 4 != 0;
  }
  const int64_t rows = z.batch * z.heads * z.m, group = z.heads / z.key_heads;
  std::vector<double> d_q(q.size(), 0.0), d_k(key.size(), 0.0), d_v(v.size(), 0.0), s(size_t(z.n)), w(size_t(z.n));
  // Terms of places, and what the gradients of logits sum up to; pairs have numbers for all heads where they are shared.
  const int64_t span = z.m + z.n - 1, heads = z.batch * z.heads, tensors = shared ? 1 : heads;
  const auto by_distance = normal<T>(heads * span, 5), by_cell = normal<T>(tensors * z.m * z.n, 6);
  const auto by_query = normal<double>(rows, 7), by_key = normal<double>(heads * z.n, 8);
  std::vector<double> d_distance(by_distance.size()), d_cell(by_cell.size()), d_query(by_query.size()), d_key(by_key.size());
  auto lse = blank<double>(rows);
  auto delta = blank<T>(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t i = row % z.m, head = row / z.m, g = head / z.heads * z.key_heads + head % z.heads / group;
    const int64_t which = row / z.m, cells = (shared ? 0 : which) * z.m * z.n + i * z.n;
    std::vector<double> capped(size_t(z.n));
    double top = -INFINITY, total = 0, pending = 0;
    for (int64_t j = 0; j < z.n; ++j) {
      double x = 0;
      for (int64_t t = 0; t < z.d; ++t) x += double(q[row * z.d + t]) * double(key[(g * z.n + j) * z.d + t]);
      x = cap > 0 ? cap * std::tanh(scale * x / cap) : scale * x;
      capped[j] = x;
      if (places) x += by_distance[which * span + j - i + z.m - 1] + by_cell[cells + j] + by_query[row] + by_key[which * z.n + j];
      s[j] = j >= low[i] && j < high[i] && allowed[i * z.n + j] ? x : -INFINITY;
      top = std::max(top, s[j]);
    }
    for (int64_t j = 0; j < z.n; ++j) total += s[j] > -INFINITY ? std::exp(s[j] - top) : 0.0;
    lse[row] = total > 0 ? top + std::log(total) : -INFINITY;
    std::vector<double> slope(size_t(z.n), 0.0);
    for (int64_t j = 0; j < z.n; ++j) {
      w[j] = s[j] > -INFINITY ? std::exp(s[j] - top) / total : 0.0;
      for (int64_t t = 0; t < z.e; ++t) slope[j] += double(grad[row * z.e + t]) * double(v[(g * z.n + j) * z.e + t]);
      pending += w[j] * slope[j];
    }
    delta[row] = T(pending);
    for (int64_t j = 0; j < z.n; ++j) {
      if (w[j] == 0) continue;
      const double of_logit = w[j] * (slope[j] - pending), share = cap > 0 ? capped[j] / cap : 0.0;
      const double plogp = of_logit * scale * (1 - share * share);
      d_distance[which * span + j - i + z.m - 1] += of_logit, d_cell[cells + j] += of_logit;
      d_query[row] += of_logit, d_key[which * z.n + j] += of_logit;
      for (int64_t t = 0; t < z.e; ++t) d_v[(g * z.n + j) * z.e + t] += w[j] * double(grad[row * z.e + t]);
      for (int64_t t = 0; t < z.d; ++t) d_q[row * z.d + t] += plogp * double(key[(g * z.n + j) * z.d + t]);
      for (int64_t t = 0; t < z.d; ++t) d_k[(g * z.n + j) * z.d + t] += plogp * double(q[row * z.d + t]);
    }
  }

  Gradients<T> found{blank<T>(int64_t(q.size())), std::vector<T>(key.size()), std::vector<T>(v.size()), std::vector<T>(d_cell.size()),
                     std::vector<double>(d_distance.size()), std::vector<double>(d_query.size()), std::vector<double>(d_key.size())};
  attlas::AttentionBackwardParams work{};
  attlas::AttentionParams& p = work.of;
  p.batch = z.batch, p.heads = z.heads, p.key_heads = z.key_heads;
  p.m = z.m, p.n = z.n, p.d = z.d, p.e = z.e;
  p.q = {q.data(), z.heads * z.m * z.d, z.m * z.d, z.d};
  p.k = {key.data(), z.key_heads * z.n * z.d, z.n * z.d, z.d};
  p.v = {v.data(), z.key_heads * z.n * z.e, z.n * z.e, z.e};
  p.type = type, p.threads = threads, p.scale = scale, p.cap = cap;
  if (mask == Mask::CAUSAL || mask == Mask::NOTHING) p.low = low.data(), p.high = high.data();
  if (mask == Mask::CELLS) p.allowed = allowed.data(), p.allowed_row = z.n;
  p.lse = lse.data(), p.lse_known = 1;
  work.grad = {grad.data(), z.heads * z.m * z.e, z.m * z.e, z.e};
  work.delta = delta.data();
  work.d_q = found.q.data(), work.d_k = found.k.data(), work.d_v = found.v.data();
  const int64_t of_batch = z.heads * z.m * z.n, of_head = z.m * z.n;
  if (places) {
    p.by_distance = {by_distance.data() + z.m - 1, z.heads * span, span, -1, 1, 1.0, type};
    p.by_cell = {by_cell.data(), shared ? 0 : of_batch, shared ? 0 : of_head, z.n, 1, 1.0, type};
    p.by_query = {by_query.data(), z.heads * z.m, z.m}, p.by_key = {by_key.data(), z.heads * z.n, z.n};
    work.places = {found.distances.data() + z.m - 1, found.queries.data(), found.keys.data(), found.cells.data(), span, z.m,
                   shared ? 0 : of_batch, shared ? 0 : of_head};
  }
  CHECK(attlas_dot_backward(&work, set) == attlas::DONE);
  for (size_t x = 0; places && x < d_distance.size(); ++x) CHECK(close(found.distances[x], d_distance[x], tolerance));
  for (size_t x = 0; places && x < d_cell.size(); ++x) CHECK(close(found.cells[x], d_cell[x], tolerance));
  for (size_t x = 0; places && x < d_query.size(); ++x) CHECK(close(found.queries[x], d_query[x], tolerance));
  for (size_t x = 0; places && x < d_key.size(); ++x) CHECK(close(found.keys[x], d_key[x], tolerance));
  for (size_t x = 0; x < d_q.size(); ++x) CHECK(close(found.q[x], d_q[x], tolerance));
  for (size_t x = 0; x < d_k.size(); ++x) CHECK(close(found.k[x], d_k[x], tolerance));
  for (size_t x = 0; x < d_v.size(); ++x) CHECK(close(found.v[x], d_v[x], tolerance));
  return found;
}

}  // namespace

int main() {
  every_set_from_threads(
      [](int32_t set) {
        for (Mask mask : {Mask::NONE, Mask::CAUSAL, Mask::CELLS, Mask::NOTHING}) {
          compare<float>(set, attlas::FLOAT32, {1, 1, 1, 1, 1, 1, 1}, mask, 0.0, 0.4, 1);
          compare<float>(set, attlas::FLOAT32, {1, 2, 1, 37, 45, 7, 5}, mask, 0.0, -0.4, 3);
          compare<float>(set, attlas::FLOAT32, {1, 1, 1, 5, 71, 33, 40}, mask, 1.5, 0.4, 2);
          compare<double>(set, attlas::FLOAT64, {2, 1, 1, 13, 19, 3, 1}, mask, 0.0, 0.4, 2);
          for (const bool shared : {false, true}) {
            compare<float>(set, attlas::FLOAT32, {2, 2, 1, 5, 71, 7, 5}, mask, 1.5, 0.4, 2, true, shared);
            compare<double>(set, attlas::FLOAT64, {1, 2, 2, 27, 19, 3, 1}, mask, 0.0, 0.4, 3, true, shared);
          }
        }
      },
      2);
  // More than one task, block and round: the same numbers from any number of threads.
  for (Mask mask : {Mask::NONE, Mask::CAUSAL}) {
    const Sizes z{1, 2, 1, 140, 1100, 2, 90};
    const auto one = compare<float>(attlas_best(), attlas::FLOAT32, z, mask, 0.0, 0.4, 1);
    const auto three = compare<float>(attlas_best(), attlas::FLOAT32, z, mask, 0.0, 0.4, 3);
    CHECK(one.q == three.q && one.k == three.k && one.v == three.v);
    for (const bool shared : {false, true}) {
      const auto a = compare<float>(attlas_best(), attlas::FLOAT32, z, mask, 0.0, 0.4, 1, true, shared);
      const auto b = compare<float>(attlas_best(), attlas::FLOAT32, z, mask, 0.0, 0.4, 3, true, shared);
      CHECK(a.distances == b.distances && a.queries == b.queries && a.keys == b.keys && a.cells == b.cells);
    }
  }

  // Numbers that the kernels do not take, and problems that they do not know.
  std::vector<float> given[4] = {{1, 1}, {1, 1}, {1, 1}, {1, 1}}, out(6);
  const double lse = 0;
  const float delta = 0;
  attlas::AttentionBackwardParams work{};
  attlas::AttentionParams& p = work.of;
  p.batch = p.heads = p.key_heads = p.m = p.n = 1, p.d = p.e = 2;
  p.q = {given[0].data(), 2, 2, 2}, p.k = {given[1].data(), 2, 2, 2}, p.v = {given[2].data(), 2, 2, 2};
  work.grad = {given[3].data(), 2, 2, 2}, work.delta = &delta;
  double place = lse;
  p.lse = &place, p.threads = 1, p.scale = 1.0;
  work.d_q = out.data(), work.d_k = out.data() + 2, work.d_v = out.data() + 4;
  for (auto& numbers : given)
    for (float bad : {NAN, INFINITY, 1e30f}) {
      numbers[1] = bad;
      for (int32_t set = 0; set <= attlas_best(); ++set) CHECK(attlas_dot_backward(&work, set) == attlas::NOT_FINITE);
      numbers[1] = 1;
    }
  p.type = attlas::FLOAT64, p.cap = 1.0;
  for (int32_t set = 0; set <= attlas_best(); ++set) CHECK(attlas_dot_backward(&work, set) == attlas::UNSUPPORTED);
  CHECK(attlas_dot_backward(nullptr, 0) == attlas::UNSUPPORTED);
  CHECK(attlas_dot_backward(&work, attlas_best() + 1) == attlas::UNSUPPORTED);
  std::puts("dot_backward: ok");
}
