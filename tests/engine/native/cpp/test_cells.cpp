#include "abi_cells.h"
#include "check.h"

#include <algorithm>

extern "C" int32_t attlas_cell_sums(const attlas::CellSums*, int32_t set);

using namespace attlas_test;

namespace {

constexpr int64_t BATCH = 2, HEADS = 3, M = 151, N = 299, D = 7, K = 5;

// All tiles of a matrix of signed weights, as they are or as products, and what is expected of them.
template <class T>
void compare(int32_t set, int32_t threads, bool factored, double tolerance) {
  const std::vector<T> left = normal<T>(BATCH * HEADS * M * D, 1), right = normal<T>(BATCH * HEADS * N * D, 2);
  std::vector<T> cells = blank<T>(BATCH * HEADS * M * N);
  for (int64_t head = 0; head < BATCH * HEADS; ++head)
    for (int64_t i = 0; i < M; ++i)
      for (int64_t j = 0; j < N; ++j) {
        double sum = 0;
        for (int64_t c = 0; c < D; ++c) sum += double(left[size_t((head * M + i) * D + c)]) * double(right[size_t((head * N + j) * D + c)]);
        cells[size_t((head * M + i) * N + j)] = T(sum);
      }
  const std::vector<int64_t> row_edges{0, 4, 70, 71, 130, M}, column_edges{0, 1, 2, 33, 250, 280, N};
  const int64_t high = int64_t(row_edges.size()) - 1, wide = int64_t(column_edges.size()) - 1, all = BATCH * HEADS;
  std::vector<double> mass(size_t(all * M)), column_mass(size_t(all * N)), offsets(size_t(all * (M + N - 1))), sums(size_t(all * high * wide));
  std::vector<T> values(size_t(all * M * K), T(-INFINITY)), column_max(size_t(all * N), T(-INFINITY)), largest(size_t(all * high * wide));
  std::vector<int32_t> keys(size_t(all * M * K), -1);
  // The last columns have no tile: their weights count as 0, which may be among the largest.
  const int64_t seen = N - 20;
  std::vector<int32_t> zero_keys;
  for (int64_t x = 0; x < K; ++x) zero_keys.push_back(int32_t(seen + x));
  for (int64_t i = 0; i < M; i += 100)
    for (int64_t j = 0; j < seen + 1; j += 140) {
      attlas::CellSums work{};
      work.batch = BATCH, work.heads = HEADS, work.all_heads = HEADS, work.m = M, work.n = N, work.first_row = i;
      work.rows = std::min<int64_t>(100, M - i), work.columns = std::min<int64_t>(140, seen - j), work.first_column = j;
      if (j >= seen) break;
      if (factored) {
        work.left = {left.data() + i * D, HEADS * M * D, M * D, D}, work.right = {right.data() + j * D, HEADS * N * D, N * D, D}, work.d = D;
      } else {
        work.cells = {cells.data() + i * N + j, HEADS * M * N, M * N, N};
      }
      work.type = sizeof(T) == 4 ? attlas::FLOAT32 : attlas::FLOAT64, work.threads = threads;
      work.mass = mass.data(), work.top_values = values.data(), work.top_keys = keys.data(), work.k_largest = K;
      work.column_mass = column_mass.data(), work.column_max = column_max.data(), work.offsets = offsets.data();
      work.picture_sum = sums.data(), work.picture_max = largest.data();
      work.row_edges = row_edges.data(), work.column_edges = column_edges.data(), work.picture_rows = high, work.picture_columns = wide;
      if (j + 140 >= seen) work.zero_keys = zero_keys.data(), work.zeros = K;
      CHECK(attlas_cell_sums(&work, set) == attlas::DONE);
    }
  for (int64_t head = 0; head < all; ++head) {
    const T* at = cells.data() + head * M * N;
    const auto weight = [&](int64_t i, int64_t j) { return j < seen ? double(at[i * N + j]) : 0.0; };
    for (int64_t i = 0; i < M; ++i) {
      double sum = 0;
      std::vector<double> row;
      for (int64_t j = 0; j < N; ++j) sum += weight(i, j), row.push_back(weight(i, j));
      CHECK(close(mass[size_t(head * M + i)], sum, tolerance * 10));
      std::sort(row.rbegin(), row.rend());
      for (int64_t x = 0; x < K; ++x) {
        const size_t place = size_t((head * M + i) * K + x);
        CHECK(close(values[place], row[size_t(x)], tolerance));
        CHECK(keys[place] >= 0 && close(values[place], weight(i, keys[place]), tolerance));
        for (int64_t y = 0; y < x; ++y) CHECK(keys[place] != keys[place - size_t(x - y)]);
      }
    }
    for (int64_t j = 0; j < seen; ++j) {
      double sum = 0, top = -INFINITY;
      for (int64_t i = 0; i < M; ++i) sum += weight(i, j), top = std::max(top, weight(i, j));
      CHECK(close(column_mass[size_t(head * N + j)], sum, tolerance * 10));
      CHECK(close(column_max[size_t(head * N + j)], top, tolerance));
    }
    for (int64_t t = 1 - M; t < N; ++t) {
      double sum = 0;
      for (int64_t i = std::max<int64_t>(0, -t); i < M && i + t < N; ++i) sum += weight(i, i + t);
      CHECK(close(offsets[size_t(head * (M + N - 1) + t + M - 1)], sum, tolerance * 10));
    }
    for (int64_t a = 0; a < high; ++a)
      for (int64_t b = 0; b < wide; ++b) {
        double sum = 0, most = 0;
        for (int64_t i = row_edges[size_t(a)]; i < row_edges[size_t(a + 1)]; ++i)
          for (int64_t j = column_edges[size_t(b)]; j < column_edges[size_t(b + 1)]; ++j) {
            sum += weight(i, j);
            if (std::abs(weight(i, j)) > std::abs(most)) most = weight(i, j);
          }
        const size_t place = size_t((head * high + a) * wide + b);
        CHECK(close(sums[place], sum, tolerance * 100));
        CHECK(close(largest[place], most, tolerance));
      }
  }
}

}  // namespace

int main() {
  every_set_from_threads([](int32_t set) {
    for (bool factored : {false, true})
      for (int32_t threads : {1, 3}) {
        compare<float>(set, threads, factored, 1e-5);
        compare<double>(set, threads, factored, 1e-12);
      }
    std::vector<float> cells(40, 1.0f);
    std::vector<double> mass(4);
    cells[33] = NAN;
    attlas::CellSums work{};
    work.batch = work.heads = work.all_heads = 1, work.rows = work.m = 4, work.columns = work.n = 10, work.threads = 1;
    work.cells = {cells.data(), 0, 0, 10}, work.mass = mass.data(), work.type = attlas::FLOAT32;
    CHECK(attlas_cell_sums(&work, set) == attlas::NOT_FINITE);
    work.type = attlas::BFLOAT16;
    CHECK(attlas_cell_sums(&work, set) == attlas::UNSUPPORTED);
  }, 2);
  std::puts("cells: ok");
}
