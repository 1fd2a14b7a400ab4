// Statistics of weights that are handed over tile by tile, signed ones too: each weight is read once, where plain torch
// takes some ten passes over a tile.
//
// A tile may also be given as a product of two factors: then a task multiplies its rows, and reads the weights while they
// are in the cache.
//
// A task has a strip of rows of one head. What it finds of columns, diagonals and blocks is a partial sum; those of a tile
// are added up in the order of the strips, in float64. The division into strips does not depend on the number of threads,
// so neither do results.
#include "abi_cells.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "largest.h"
#include "parallel.h"
#include "whole.h"

namespace ATTLAS_ISA {

namespace {

using attlas::CellSums;

constexpr int64_t STRIP = 60;   // rows of a task
constexpr int64_t CHUNK = 128;  // columns that are multiplied with all rows of a strip before the next ones
constexpr int TOGETHER = 4;     // rows whose sums are added to those of columns at once
constexpr int64_t SEGMENTS = 16;  // segments of a row whose largest weights are looked at together, as many as KLargest takes

template <class T>
using Multiply = Whole<T, VECTOR_BYTES == 64 ? 1 : 2>;

// The one of two weights that is larger by its size; the first where both are alike.
template <class T>
T larger_by_size(T a, T b) {
  return std::abs(b) > std::abs(a) ? b : a;
}

// What a strip finds besides the numbers of its rows.
template <class T>
struct Found {
  // Part of one row of the picture: the blocks that it touches, from the first one of the tile on.
  struct Band {
    int64_t row;
    std::vector<double> sums;
    std::vector<T> largest;
  };
  std::vector<T> columns, maxima, diagonals;
  std::vector<Band> bands;
};

// The right factors of all heads, as products read them.
template <class T>
class Right {
  using M = Multiply<T>;

 public:
  explicit Right(const CellSums& p)
      : size_(p.cells.data ? 0 : int64_t(M::right_size(p.d, p.columns, 1))), packed_(size_t(p.batch * p.heads * size_)) {
    if (!size_) return;
    const int64_t blocks = round_up(p.columns, M::COLUMNS) / M::COLUMNS;
    attlas::share(size_t(p.batch * p.heads * blocks), p.threads, [&](size_t task, int) {
      const int64_t head = int64_t(task) / blocks, first = int64_t(task) % blocks * M::COLUMNS;
      const T* from = static_cast<const T*>(p.right.data) + head / p.heads * p.right.batch + head % p.heads * p.right.head;
      T* to = packed_.at(size_t(head * size_ + first * p.d));
      const int64_t d = p.d, row = p.right.row, count = std::min<int64_t>(M::COLUMNS, p.columns - first);
      from += first * row;
      for (int64_t t = 0; t < d; ++t, to += M::COLUMNS) {
        if (count == M::COLUMNS) {
#pragma GCC unroll 16
          for (int64_t j = 0; j < M::COLUMNS; ++j) to[j] = from[j * row + t];
        } else {
          for (int64_t j = 0; j < M::COLUMNS; ++j) to[j] = j < count ? from[j * row + t] : T(0);
        }
      }
    });
  }
  const T* of(int64_t head) const { return packed_.at(size_t(head * size_)); }

 private:
  const int64_t size_;
  const Aligned<T> packed_;
};

// Runs one strip after the other.
template <class T>
class StripPass {
  using V = Vec<T>;
  using M = Multiply<T>;
  static_assert(STRIP % M::ROWS == 0);
  static constexpr int W = WIDTH<T>;
  static constexpr int64_t SEGMENT = VECTOR_BYTES == 64 ? 8 * W : 32 * W;  // columns; KLargest takes so many of a lane

 public:
  StripPass(const CellSums& p, const Right<T>& right)
      : p_(p),
        right_(right),
        size_((p.columns + W - 1) / W * W),
        segments_((p.columns + SEGMENT - 1) / SEGMENT),
        slant_(size_ + STRIP + W),
        picture_(p.picture_sum || p.picture_max),
        extremes_(p.top_keys || p.column_max || p.picture_max),
        sums_(size_t(size_)),
        high_(size_t(extremes_ ? size_ : 0)),
        low_(size_t(extremes_ ? size_ : 0)),
        stride_(p.cells.data ? p.cells.row : round_up(p.columns, M::COLUMNS) + 16),
        left_(size_t(p.cells.data ? 0 : STRIP * p.d)),
        products_(size_t(p.cells.data ? 0 : STRIP * stride_)),
        peaks_(size_t(extremes_ ? TOGETHER * segments_ * W : 0)),
        slants_(size_t(p.offsets ? TOGETHER * slant_ : 0)) {}

  // Returns whether all weights are finite.
  bool run(int64_t head, int64_t first, int64_t count, Found<T>& found) {
    first_ = first;
    count_ = count;
    cells_ = p_.cells.data ? at(p_.cells, head) : multiply(head);
    place_ = (head / p_.heads * p_.all_heads + head % p_.heads) * p_.m + p_.first_row + first;
    found.columns.assign(size_t(size_), T(0));
    if (p_.column_max) found.maxima.assign(size_t(size_), -INF<T>);
    if (p_.offsets) std::fill_n(slants_.data, TOGETHER * slant_, T(0));
    bool finite = true;
    for (int64_t from = 0, to; from < count_; from = to) {
      const int64_t band = picture_ ? band_of(p_.first_row + first_ + from) : 0;
      to = picture_ ? band_end(band) : count_;
      clear();
      int64_t i = from;
      for (; i + TOGETHER <= to; i += TOGETHER) finite &= add<TOGETHER>(i);
      for (; i < to; ++i) finite &= add<1>(i);
      end_band(band, found);
    }
    if (p_.offsets) {
      // Number x is the sum of the cells with column - row = x - (count - 1), counted within the strip.
      found.diagonals.assign(size_t(p_.columns + count_ - 1), T(0));
      for (int r = 0; r < TOGETHER; ++r) {
        const T* from = slants_.at(size_t(r * slant_ + STRIP - count_));
        for (size_t x = 0; x < found.diagonals.size(); ++x) found.diagonals[x] += from[x];
      }
    }
    return finite;
  }

 private:
  // The first row of the strip in a tensor.
  const T* at(const attlas::Tensor4& t, int64_t head) const {
    return static_cast<const T*>(t.data) + head / p_.heads * t.batch + head % p_.heads * t.head + first_ * t.row;
  }

  // Computes the weights of the strip.
  const T* multiply(int64_t head) const {
    const T *rows = at(p_.left, head), *right = right_.of(head);
    const int64_t whole = round_up(count_, M::ROWS);
    for (int64_t i = 0; i < count_; ++i) std::copy_n(rows + i * p_.left.row, p_.d, left_.at(size_t(i * p_.d)));
    std::fill_n(left_.at(size_t(count_ * p_.d)), (whole - count_) * p_.d, T(0));
    // Some columns stay in the second cache for all rows.
    for (int64_t start = 0; start < p_.columns; start += CHUNK)
      for (int64_t i = 0; i < whole; i += M::ROWS)
        for (int64_t j = start; j < std::min(start + CHUNK, p_.columns); j += M::COLUMNS)
          M::template multiply<false>(left_.at(size_t(i * p_.d)), 1, p_.d, right + j * p_.d, 1, p_.d,
                                      products_.at(size_t(i * stride_ + j)), stride_);
    return products_.data;
  }

  int64_t band_of(int64_t row) const {
    if (row < p_.row_edges[0]) return -1;
    return std::upper_bound(p_.row_edges, p_.row_edges + p_.picture_rows + 1, row) - p_.row_edges - 1;
  }
  // The first row of the strip that does not belong to a band.
  int64_t band_end(int64_t band) const {
    const int64_t stop = band + 1 <= p_.picture_rows ? p_.row_edges[band + 1] : p_.m;
    return std::min(count_, stop - p_.first_row - first_);
  }

  void clear() {
    std::fill_n(sums_.data, size_, T(0));
    if (!extremes_) return;
    std::fill_n(high_.data, size_, -INF<T>);
    std::fill_n(low_.data, size_, INF<T>);
  }

  // Adds R rows from row i of the strip on to all sums.
  template <int R>
  bool add(int64_t i) {
    if (extremes_) return p_.offsets ? add<R, true, true>(i) : add<R, true, false>(i);
    return p_.offsets ? add<R, false, true>(i) : add<R, false, false>(i);
  }

  template <int R, bool EXTREMES, bool OFFSETS>
  bool add(int64_t i) {
    const T* row[R];
    T* diagonal[R];
    V total[R] = {};
    for (int r = 0; r < R; ++r) {
      row[r] = cells_ + (i + r) * stride_;
      // Rows next to each other have sums of their own: none is read right after the row before has stored it.
      diagonal[r] = OFFSETS ? slants_.at(size_t((i + r) % TOGETHER * slant_ + STRIP - 1 - (i + r))) : nullptr;
    }
    for (int64_t segment = 0; segment < segments_; ++segment) {
      const int64_t stop = std::min(p_.columns, (segment + 1) * SEGMENT);
      V peak[R];
      for (int r = 0; r < R; ++r) peak[r] = all(-INF<T>);
      // A vector of each row, and the same with what counts nowhere in the lanes beyond the last column.
      const auto step = [&](int64_t j, const V(&x)[R], const V(&top)[R], const V(&bottom)[R]) __attribute__((always_inline)) {
        V sums = x[0], high = top[0], low = bottom[0];
        for (int r = 0; r < R; ++r) {
          total[r] += x[r];
          if (EXTREMES) peak[r] = larger<T>(top[r], peak[r]);
          if (OFFSETS) store(diagonal[r] + j, load(diagonal[r] + j) + x[r]);
          if (r == 0) continue;
          sums += x[r];
          if (EXTREMES) high = larger<T>(top[r], high), low = smaller<T>(bottom[r], low);
        }
        store(sums_.at(size_t(j)), load(sums_.at(size_t(j))) + sums);
        if (EXTREMES) {
          store(high_.at(size_t(j)), larger<T>(high, load(high_.at(size_t(j)))));
          store(low_.at(size_t(j)), smaller<T>(low, load(low_.at(size_t(j)))));
        }
      };
      int64_t j = segment * SEGMENT;
      V x[R];
      for (; j + W <= stop; j += W) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) x[r] = load(row[r] + j);
        step(j, x, x, x);
      }
      if (j < stop) {
        V top[R], bottom[R];
        for (int r = 0; r < R; ++r) {
          x[r] = V{}, top[r] = all(-INF<T>), bottom[r] = all(INF<T>);
          for (int64_t lane = 0; j + lane < stop; ++lane) x[r][lane] = top[r][lane] = bottom[r][lane] = row[r][j + lane];
        }
        step(j, x, top, bottom);
      }
      if (EXTREMES)
        for (int r = 0; r < R; ++r) store(peaks_.at(size_t((r * segments_ + segment) * W)), peak[r]);
    }
    bool finite = true;
    for (int r = 0; r < R; ++r) {
      const double sum_of_row = double(sum<T>(total[r]));
      finite &= std::isfinite(sum_of_row);
      p_.mass[place_ + i + r] += sum_of_row;
    }
    if (EXTREMES && p_.top_keys && finite)
      for (int r = 0; r < R; ++r) keep_largest(place_ + i + r, row[r], peaks_.at(size_t(r * segments_ * W)));
    return finite;
  }

  void keep_largest(int64_t place, const T* row, const T* peaks) const {
    const KLargest<T> largest{static_cast<T*>(p_.top_values) + place * p_.k_largest, p_.top_keys + place * p_.k_largest,
                              int(p_.k_largest)};
    for (int64_t from = 0; from < segments_; from += SEGMENTS) {
      const auto segment_at = [&](int index) {
        const int64_t j = (from + index) * SEGMENT;
        return typename KLargest<T>::Segment{row + j, p_.first_column + j, std::min(SEGMENT, p_.columns - j)};
      };
      largest.add(reinterpret_cast<const V*>(peaks + from * W), int(std::min(SEGMENTS, segments_ - from)), W, segment_at);
    }
    for (int64_t x = 0; x < p_.zeros; ++x) largest.insert(T(0), p_.zero_keys[x]);
  }

  // Adds the sums of the rows so far, which lie in one row of the picture, to those of the strip.
  void end_band(int64_t band, Found<T>& result) {
    T *columns = result.columns.data(), *maxima = result.maxima.data();
    for (int64_t j = 0; j < size_; j += W) store(columns + j, load(columns + j) + load(sums_.at(size_t(j))));
    for (int64_t j = 0; p_.column_max && j < size_; j += W)
      store(maxima + j, larger<T>(load(high_.at(size_t(j))), load(maxima + j)));
    if (!picture_ || band < 0 || band >= p_.picture_rows) return;
    typename Found<T>::Band& found = result.bands.emplace_back();
    found.row = band;
    const int64_t *edges = p_.column_edges, *end = edges + p_.picture_columns + 1;
    const int64_t left = std::max(p_.first_column, edges[0]), stop = std::min(p_.first_column + p_.columns, end[-1]);
    if (left >= stop) return;
    for (int64_t x = std::upper_bound(edges, end, left) - edges - 1; x < p_.picture_columns && edges[x] < stop; ++x) {
      const int64_t from = std::max(edges[x], left) - p_.first_column, to = std::min(edges[x + 1], stop) - p_.first_column;
      if (p_.picture_sum) {
        double total = 0;
        int64_t j = from;
        V some{};
        for (; j + W <= to; j += W) some += load(sums_.at(size_t(j)));
        total = double(sum<T>(some));
        for (; j < to; ++j) total += double(sums_[size_t(j)]);
        found.sums.push_back(total);
      }
      if (p_.picture_max) {
        int64_t j = from;
        V high = all(-INF<T>), low = all(INF<T>);
        for (; j + W <= to; j += W) {
          high = larger<T>(load(high_.at(size_t(j))), high);
          low = smaller<T>(load(low_.at(size_t(j))), low);
        }
        T highest = most<T>(high), lowest = -most<T>(-low);
        for (; j < to; ++j) highest = std::max(highest, high_[size_t(j)]), lowest = std::min(lowest, low_[size_t(j)]);
        found.largest.push_back(larger_by_size(highest, lowest));
      }
    }
  }

  const CellSums& p_;
  const Right<T>& right_;
  const int64_t size_;      // columns, in whole vectors
  const int64_t segments_;  // of the columns
  const int64_t slant_;     // room for the diagonals of every fourth row
  const bool picture_, extremes_;
  const Aligned<T> sums_, high_, low_;  // of the columns, over the rows of one row of the picture
  const int64_t stride_;                // from one row of weights to the next
  const Aligned<T> left_, products_;    // the rows of the strip, and their products
  const Aligned<T> peaks_, slants_;     // the largest weights of each lane of a segment; sums of diagonals
  int64_t first_ = 0, count_ = 0;       // the strip: rows of the tile
  const T* cells_ = nullptr;
  int64_t place_ = 0;  // of its first row in results of rows
};

// Adds what the strips of one head found, in their order.
template <class T>
void merge(const CellSums& p, int64_t head, const Found<T>* strips, int64_t count) {
  const int64_t place = head / p.heads * p.all_heads + head % p.heads, columns = p.columns;
  for (int64_t s = 0; s < count; ++s) {
    const Found<T>& strip = strips[s];
    if (p.column_mass) {
      double* to = p.column_mass + place * p.n + p.first_column;
      for (int64_t j = 0; j < columns; ++j) to[j] += double(strip.columns[size_t(j)]);
    }
    if (p.column_max) {
      T* to = static_cast<T*>(p.column_max) + place * p.n + p.first_column;
      for (int64_t j = 0; j < columns; ++j) to[j] = std::max(to[j], strip.maxima[size_t(j)]);
    }
    if (p.offsets) {
      const int64_t last = std::min((s + 1) * STRIP, p.rows) - 1;  // row of the strip
      double* to = p.offsets + place * (p.m + p.n - 1) + p.m - 1 + p.first_column - (p.first_row + last);
      for (size_t x = 0; x < strip.diagonals.size(); ++x) to[x] += double(strip.diagonals[x]);
    }
    for (const auto& band : strip.bands) {
      const int64_t *edges = p.column_edges, *end = edges + p.picture_columns + 1;
      const int64_t left = std::max(p.first_column, edges[0]), x = std::upper_bound(edges, end, left) - edges - 1;
      const int64_t at = (place * p.picture_rows + band.row) * p.picture_columns + x;
      for (size_t c = 0; c < band.sums.size(); ++c) p.picture_sum[at + int64_t(c)] += band.sums[c];
      for (size_t c = 0; c < band.largest.size(); ++c) {
        T& to = static_cast<T*>(p.picture_max)[at + int64_t(c)];
        to = larger_by_size(to, band.largest[c]);
      }
    }
  }
}

template <class T>
int32_t sums(const CellSums& p) {
  const int64_t strips = (p.rows + STRIP - 1) / STRIP, heads = p.batch * p.heads;
  std::vector<Found<T>> found(size_t(heads * strips));
  std::vector<std::unique_ptr<StripPass<T>>> workers(size_t(std::max(p.threads, 1)));
  const Right<T> right(p);
  std::atomic<bool> finite{true};
  attlas::share(found.size(), p.threads, [&](size_t task, int thread) {
    auto& worker = workers[size_t(thread)];
    if (!worker) worker = std::make_unique<StripPass<T>>(p, right);
    const int64_t first = int64_t(task) % strips * STRIP;
    if (!worker->run(int64_t(task) / strips, first, std::min(STRIP, p.rows - first), found[task])) finite = false;
  });
  if (!finite) return attlas::NOT_FINITE;
  for (int64_t head = 0; head < heads; ++head) merge<T>(p, head, found.data() + head * strips, strips);
  return attlas::DONE;
}

}  // namespace

int32_t run_cell_sums(const CellSums& p) {
  if (p.type == attlas::FLOAT32) return sums<float>(p);
  if (p.type == attlas::FLOAT64) return sums<double>(p);
  return attlas::UNSUPPORTED;
}

}  // namespace ATTLAS_ISA
