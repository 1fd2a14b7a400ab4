// Tokens as the kernels of dot products read them.
#pragma once

#include <algorithm>
#include <atomic>

#include "abi.h"
#include "parallel.h"
#include "reader.h"

namespace ATTLAS_ISA {

// The rows of one head from row `first` on.
template <class T, class Source>
Reader<T, Source> rows_of(const attlas::Tensor4& t, int64_t b, int64_t h, int64_t first = 0) {
  return {static_cast<const Source*>(t.data) + b * t.batch + h * t.head + first * t.row, t.row};
}

// Rows beyond the last one are 0.
template <class T, class Source>
struct Limited {
  Reader<T, Source> read;
  int64_t rows;
  ATTLAS_INLINE T operator()(int64_t i, int64_t t) const { return i < rows ? read(i, t) : T(0); }
  ATTLAS_INLINE Vec<T> vector(int64_t i, int64_t first, int64_t count) const {
    return read.vector(i, first, i < rows ? count : 0);
  }
};

// Whether all numbers of some rows are finite and so small that no product of two overflows.
template <class T, class Source>
__attribute__((noinline)) bool in_range(Reader<T, Source> read, int64_t rows, int64_t size) {
  const T limit = sizeof(T) == 8 ? T(1e150) : T(1e17);
  Ints<T> inside = Ints<T>{} - 1;
  bool good = true;
  for (int64_t i = 0; i < rows; ++i) {
    int64_t t = 0;
    for (; t + WIDTH<T> <= size; t += WIDTH<T>) {
      const Vec<T> x = read.vector(i, t, WIDTH<T>);
      inside &= (x < all(limit)) & (x > all(-limit));
    }
    for (; t < size; ++t) good &= std::fabs(read(i, t)) < limit;
  }
  for (int x = 0; x < WIDTH<T>; ++x) good &= inside[x] != 0;
  return good;
}

// The same for `count` heads from `first` on, batch after batch.
template <class T, class Source>
bool in_range(const attlas::Tensor4& t, int64_t heads, int64_t first, int64_t count, int64_t rows, int64_t size, int threads) {
  std::atomic<bool> good{true};
  const int64_t some = 1024, blocks = (rows + some - 1) / some;
  attlas::share(size_t(count * blocks), threads, [&](size_t task, int) {
    const int64_t row = task % blocks * some, which = first + task / blocks;
    const auto read = rows_of<T, Source>(t, which / heads, which % heads, row);
    if (!in_range(read, std::min(some, rows - row), size)) good = false;
  });
  return good;
}

}  // namespace ATTLAS_ISA
