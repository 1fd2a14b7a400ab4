#include "check.h"

#include <algorithm>
#include <limits>

extern "C" int32_t attlas_dot(const attlas::AttentionParams*, int32_t set);

using namespace attlas_test;

namespace {

struct Sizes {
  int64_t batch, heads, key_heads, m, n, d, e;
};

enum class Mask { NONE, CAUSAL, CELLS, NOTHING };

template <class T>
struct Results {
  std::vector<double> lse;
  std::vector<T> out, entropy, squares, mass, max_logit, mean, variance, top_values, column_mass, column_max, offsets,
      picture_sum, picture_max;
  std::vector<int64_t> top_keys, coverage;
};

// Everything at once, and each number against its definition in double.
template <class T>
void compare(int32_t set, int32_t type, Sizes z, Mask mask, double cap, bool with_sink, int32_t threads, int k) {
  const double tolerance = sizeof(T) == 8 ? 1e-10 : 2e-4, inf = std::numeric_limits<double>::infinity();
  const auto q = normal<T>(z.batch * z.heads * z.m * z.d, 1), key = normal<T>(z.batch * z.key_heads * z.n * z.d, 2);
  const auto v = normal<T>(z.batch * z.key_heads * z.n * z.e, 3), sink = normal<T>(z.heads, 4);
  std::vector<int32_t> low(size_t(z.m), 0), high(size_t(z.m), int32_t(z.n));
  std::vector<uint8_t> allowed(size_t(z.m * z.n), 1);
  for (int64_t i = 0; i < z.m; ++i) {
    if (mask == Mask::CAUSAL) high[i] = int32_t(std::clamp<int64_t>(i + 1 + z.n - z.m, 0, z.n));
    if (mask == Mask::NOTHING) high[i] = 0;
    for (int64_t j = 0; mask == Mask::CELLS && j < z.n; ++j) allowed[i * z.n + j] = i % 5 != 2 && (i * 7 + j * 3) % 4 != 0;
  }
  const int64_t rows = z.batch * z.heads * z.m;
  const std::vector<int64_t> row_edges{0, (z.m + 1) / 2, z.m}, column_edges{0, z.n / 2, z.n};
  const std::vector<double> levels{0.5, 0.95};
  const int64_t high_blocks = z.m > 1 ? 2 : 1, wide_blocks = z.n > 1 ? 2 : 1;
  const int64_t whole_rows[2] = {0, z.m}, whole_columns[2] = {0, z.n};
  const int64_t blocks = z.batch * z.heads * high_blocks * wide_blocks;
  Results<T> r{blank<double>(rows), blank<T>(rows * z.e), blank<T>(rows), blank<T>(rows), blank<T>(rows), blank<T>(rows),
               blank<T>(rows), blank<T>(rows), blank<T>(rows * k), blank<T>(z.batch * z.heads * z.n),
               blank<T>(z.batch * z.heads * z.n), blank<T>(z.batch * z.heads * (z.m + z.n - 1)),
               std::vector<T>(size_t(blocks)), std::vector<T>(size_t(blocks)), std::vector<int64_t>(size_t(rows * k)), std::vector<int64_t>(size_t(rows * 2))};
  attlas::AttentionParams p{};
  p.batch = z.batch, p.heads = z.heads, p.key_heads = z.key_heads;
  p.m = z.m, p.n = z.n, p.d = z.d, p.e = z.e;
  p.q = {q.data(), z.heads * z.m * z.d, z.m * z.d, z.d};
  p.k = {key.data(), z.key_heads * z.n * z.d, z.n * z.d, z.d};
  p.v = {v.data(), z.key_heads * z.n * z.e, z.n * z.e, z.e};
  p.type = type, p.threads = threads, p.scale = 0.4, p.cap = cap;
  if (with_sink) p.sink = sink.data();
  if (mask == Mask::CAUSAL || mask == Mask::NOTHING) p.low = low.data(), p.high = high.data();
  if (mask == Mask::CELLS) p.allowed = allowed.data(), p.allowed_row = z.n;
  p.out = r.out.data(), p.lse = r.lse.data(), p.entropy = r.entropy.data(), p.squares = r.squares.data();
  p.mass = r.mass.data(), p.max_logit = r.max_logit.data(), p.mean = r.mean.data(), p.variance = r.variance.data();
  p.top_values = r.top_values.data(), p.top_keys = r.top_keys.data(), p.k_largest = k;
  p.column_mass = r.column_mass.data(), p.column_max = r.column_max.data(), p.offsets = r.offsets.data();
  p.picture_sum = r.picture_sum.data(), p.picture_max = r.picture_max.data();
  p.picture_rows = high_blocks, p.picture_columns = wide_blocks;
  p.row_edges = high_blocks == 2 ? row_edges.data() : whole_rows;
  p.column_edges = wide_blocks == 2 ? column_edges.data() : whole_columns;
  p.coverage = r.coverage.data(), p.levels = levels.data(), p.level_count = 2;
  CHECK(attlas_dot(&p, set) == attlas::DONE);

  // Few queries of which nothing but this is wanted are read another way.
  auto out = blank<T>(rows * z.e);
  auto lse_alone = blank<double>(rows);
  attlas::AttentionParams brief = p;
  brief.out = out.data(), brief.lse = lse_alone.data(), brief.k_largest = 0;
  for (void** wanted : {&brief.entropy, &brief.squares, &brief.mass, &brief.max_logit, &brief.mean, &brief.variance,
                        &brief.top_values, &brief.column_mass, &brief.column_max, &brief.offsets, &brief.picture_sum,
                        &brief.picture_max})
    *wanted = nullptr;
  brief.top_keys = brief.coverage = nullptr;
  CHECK(attlas_dot(&brief, set) == attlas::DONE);
  for (int64_t i = 0; i < rows; ++i) CHECK(lse_alone[i] == r.lse[i] || close(lse_alone[i], r.lse[i], tolerance));
  for (int64_t i = 0; i < rows * z.e; ++i) CHECK(close(out[i], r.out[i], tolerance));

  std::vector<double> s(size_t(z.n)), w(size_t(z.n));
  for (int64_t head = 0; head < z.batch * z.heads; ++head) {
    const int64_t b = head / z.heads, h = head % z.heads, g = b * z.key_heads + h / (z.heads / z.key_heads);
    std::vector<double> column(size_t(z.n), 0.0), tallest(size_t(z.n), 0.0), diagonal(size_t(z.m + z.n - 1), 0.0);
    std::vector<double> sums(size_t(high_blocks * wide_blocks), 0.0), tops(sums.size(), 0.0);
    for (int64_t i = 0; i < z.m; ++i) {
      const int64_t at = head * z.m + i;
      double top = -inf, total = 0, count = 0, mean = 0;
      for (int64_t j = 0; j < z.n; ++j) {
        double x = 0;
        for (int64_t t = 0; t < z.d; ++t) x += double(q[at * z.d + t]) * double(key[(g * z.n + j) * z.d + t]);
        x = cap > 0 ? cap * std::tanh(0.4 * x / cap) : 0.4 * x;
        s[j] = j >= low[i] && j < high[i] && allowed[i * z.n + j] ? x : -inf;
        top = std::max(top, s[j]);
        if (s[j] > -inf) ++count, mean += s[j];
      }
      const double floor = with_sink ? std::max(top, double(sink[h])) : top;
      for (int64_t j = 0; j < z.n; ++j) total += s[j] > -inf ? std::exp(s[j] - floor) : 0.0;
      if (with_sink) total += std::exp(double(sink[h]) - floor);
      const double lse = total > 0 ? floor + std::log(total) : -inf;
      double mass = 0, squares = 0, entropy = 0, spread = 0;
      mean = count > 0 ? mean / count : 0;
      for (int64_t j = 0; j < z.n; ++j) {
        w[j] = s[j] > -inf ? std::exp(s[j] - lse) : 0.0;
        mass += w[j], squares += w[j] * w[j], entropy += s[j] > -inf ? w[j] * (lse - s[j]) : 0.0;
        spread += s[j] > -inf ? (s[j] - mean) * (s[j] - mean) : 0.0;
        column[j] += w[j], tallest[j] = std::max(tallest[j], w[j]), diagonal[j - i + z.m - 1] += w[j];
        const int64_t block = (i >= p.row_edges[1]) * wide_blocks + (j >= p.column_edges[1]);
        sums[block] += w[j], tops[block] = std::max(tops[block], w[j]);
      }
      CHECK(lse == -inf ? r.lse[at] == -inf : close(r.lse[at], lse, tolerance));
      CHECK(top == -inf ? r.max_logit[at] == -inf : close(r.max_logit[at], top, tolerance));
      CHECK(close(r.mass[at], mass, tolerance) && close(r.squares[at], squares, tolerance));
      CHECK(close(r.entropy[at], entropy, tolerance));
      CHECK(close(r.mean[at], mean, tolerance) && close(r.variance[at], count > 0 ? spread / count : 0.0, tolerance));
      for (int64_t t = 0; t < z.e; ++t) {
        double pooled = 0;
        for (int64_t j = 0; j < z.n; ++j) pooled += w[j] * double(v[(g * z.n + j) * z.e + t]);
        CHECK(close(r.out[at * z.e + t], pooled, tolerance));
      }
      std::vector<double> order = w;
      std::sort(order.rbegin(), order.rend());
      for (int x = 0; x < k; ++x) {
        CHECK(close(r.top_values[at * k + x], order[x], tolerance));
        const int64_t place = r.top_keys[at * k + x];
        CHECK(place < z.n && (place < 0 ? order[x] == 0.0 : close(w[place], order[x], tolerance)));
      }
      for (int x = 0; x < 2; ++x) {
        double held = 0;
        const int64_t needed = r.coverage[at * 2 + x];
        CHECK(needed >= 0 && needed <= z.n);
        for (int64_t j = 0; j < needed; ++j) held += order[j];
        CHECK(held >= (levels[x] - tolerance) * mass);
        CHECK(needed == 0 || held - order[needed - 1] <= (levels[x] + tolerance) * mass);
      }
    }
    for (int64_t j = 0; j < z.n; ++j) CHECK(close(r.column_mass[head * z.n + j], column[j], tolerance));
    for (int64_t j = 0; j < z.n; ++j) CHECK(close(r.column_max[head * z.n + j], tallest[j], tolerance));
    for (int64_t x = 0; x < z.m + z.n - 1; ++x)
      CHECK(close(r.offsets[head * (z.m + z.n - 1) + x], diagonal[x], tolerance));
    for (size_t x = 0; x < sums.size(); ++x) {
      CHECK(close(r.picture_sum[head * sums.size() + x], sums[x], tolerance));
      CHECK(close(r.picture_max[head * sums.size() + x], tops[x], tolerance));
    }
  }
}

}  // namespace

int main() {
  every_set_from_threads(
      [](int32_t set) {
        for (Mask mask : {Mask::NONE, Mask::CAUSAL, Mask::CELLS, Mask::NOTHING}) {
          compare<float>(set, attlas::FLOAT32, {1, 1, 1, 1, 1, 1, 1}, mask, 0.0, false, 1, 1);
          compare<float>(set, attlas::FLOAT32, {1, 2, 1, 37, 45, 7, 5}, mask, 0.0, true, 3, 9);
          compare<float>(set, attlas::FLOAT32, {1, 1, 1, 5, 71, 33, 40}, mask, 1.5, false, 2, 70);
          compare<double>(set, attlas::FLOAT64, {2, 1, 1, 13, 19, 3, 1}, mask, 0.0, false, 2, 3);
        }
      },
      2);
  // Longer than what one task of the pass along the columns owns, or one of few queries.
  compare<float>(attlas_best(), attlas::FLOAT32, {1, 1, 1, 3, 1100, 2, 1}, Mask::CAUSAL, 0.0, false, 3, 4);

  // Numbers that the kernels do not take, and problems that they do not know.
  std::vector<float> q(4, 1.0f);
  std::vector<double> lse(1);
  attlas::AttentionParams p{};
  p.batch = p.heads = p.key_heads = p.m = p.n = 1;
  p.d = 4;
  p.q = p.k = {q.data(), 4, 4, 4};
  p.threads = 1, p.scale = 1.0, p.lse = lse.data();
  for (float bad : {NAN, INFINITY, 1e30f}) {
    q[2] = bad;
    for (int32_t set = 0; set <= attlas_best(); ++set) CHECK(attlas_dot(&p, set) == attlas::NOT_FINITE);
  }
  p.type = attlas::FLOAT64, p.cap = 1.0;
  CHECK(attlas_dot(&p, 0) == attlas::UNSUPPORTED);
  CHECK(attlas_dot(nullptr, 0) == attlas::UNSUPPORTED);
  CHECK(attlas_dot(&p, attlas_best() + 1) == attlas::UNSUPPORTED);
  std::puts("dot: ok");
}
