// The walk along the columns, with the log-sum-exp of each row known: sums and maxima of columns, diagonals, pictures.
//
// A task owns some columns of one head, so that nothing has to be shared and sums come in one order.
#pragma once

#include "forward.h"

namespace ATTLAS_ISA {

template <class M>
class Columns {
  using T = typename M::T;
  using Number = typename M::Number;
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;

 public:
  static constexpr int64_t SPAN = M::COLUMNS * (1024 / M::COLUMNS);  // columns of a task
  static constexpr int64_t CHUNK = M::COLUMNS * (256 / M::COLUMNS);  // of them, those whose logits are in the cache
  static constexpr int64_t STRIDE = CHUNK + 16;

  explicit Columns(const attlas::Dot& problem, int q_parts, int k_parts)
      : p_(problem),
        q_parts_(q_parts),
        k_parts_(k_parts),
        logits_(M::ROWS * STRIDE),
        diagonal_(CHUNK + M::ROWS + 2 * W),
        mass_(SPAN),
        peaks_(SPAN),
        block_mass_(SPAN),
        block_peaks_(SPAN),
        part_mass_(SPAN),
        part_peaks_(SPAN) {}

  // What one task leaves behind, to be joined with the other tasks of its head in their order.
  struct Found {
    std::vector<double> diagonals;  // sums over j - i, from start - (m - 1) on
    int64_t block = 0, blocks = 0;  // the first column of the picture that it touches, and how many
    std::vector<double> sums;       // (picture rows, blocks)
    std::vector<T> tops;
  };

  // Columns [start, stop) of one head; `queries` are its packed queries, `right` its packed keys.
  void run(int64_t b, int64_t h, int64_t start, int64_t stop, const Number* queries, const Number* right, Found& found) {
    head_ = b * p_.heads + h;
    start_ = start;
    stop_ = stop;
    std::fill(mass_.begin(), mass_.end(), 0.0);
    std::fill(peaks_.begin(), peaks_.end(), T(0));
    clear_block();
    block_row_ = 0;
    const Seen seen(p_, b, h);
    const bool picture = p_.picture_sum || p_.picture_max;
    if (p_.offsets) found.diagonals.assign(size_t(p_.m + SPAN), 0.0);
    if (picture) {
      const int64_t* edges = p_.column_edges;
      found.block = std::upper_bound(edges, edges + p_.picture_columns + 1, start) - edges - 1;
      const int64_t last = std::lower_bound(edges, edges + p_.picture_columns + 1, stop) - edges;
      found.blocks = last - found.block;
      found.sums.assign(size_t(found.blocks * p_.picture_rows), 0.0);
      found.tops.assign(size_t(found.blocks * p_.picture_rows), T(0));
    }
    for (int64_t first = 0; first < p_.m; first += M::ROWS) {
      const int64_t some = std::min<int64_t>(p_.m - first, M::ROWS);
      int64_t left, end;
      seen.hull(first, first + some, left, end);
      left = std::max(left / M::COLUMNS * M::COLUMNS, start);
      end = std::min(round_up(end, M::COLUMNS), round_up(stop, M::COLUMNS));
      if (picture) divide_rows(first, some);
      for (; left < end; left += CHUNK)
        chunk(seen, first, some, left, std::min(left + CHUNK, end), queries, right, found);
      if (picture) take_parts(found);
    }
    if (picture) give_block(found, block_row_);
    for (int64_t j = start; j < stop; ++j) {
      if (p_.column_mass) static_cast<T*>(p_.column_mass)[head_ * p_.n + j] = T(mass_[j - start]);
      if (p_.column_max) static_cast<T*>(p_.column_max)[head_ * p_.n + j] = peaks_[j - start];
    }
  }

  // What the tasks of one head found, added up in their order.
  static void join(const attlas::Dot& p, int64_t head, const Found* found, int64_t tasks) {
    if (p.offsets) {
      std::vector<double> whole(size_t(p.m + p.n - 1), 0.0);
      for (int64_t task = 0; task < tasks; ++task)
        for (int64_t x = 0; x < p.m + SPAN && task * SPAN + x < p.m + p.n - 1; ++x)
          whole[task * SPAN + x] += found[task].diagonals[x];
      T* out = static_cast<T*>(p.offsets) + head * (p.m + p.n - 1);
      for (size_t x = 0; x < whole.size(); ++x) out[x] = T(whole[x]);
    }
    std::vector<double> sums(size_t(p.picture_columns));
    std::vector<T> tops(size_t(p.picture_columns));
    for (int64_t row = 0; (p.picture_sum || p.picture_max) && row < p.picture_rows; ++row) {
      std::fill(sums.begin(), sums.end(), 0.0);
      std::fill(tops.begin(), tops.end(), T(0));
      for (int64_t task = 0; task < tasks; ++task) {
        const Found& part = found[task];
        for (int64_t x = 0; x < part.blocks; ++x) {
          sums[part.block + x] += part.sums[row * part.blocks + x];
          tops[part.block + x] = std::max(tops[part.block + x], part.tops[row * part.blocks + x]);
        }
      }
      const int64_t at = (head * p.picture_rows + row) * p.picture_columns;
      for (int64_t x = 0; x < p.picture_columns; ++x) {
        if (p.picture_sum) static_cast<T*>(p.picture_sum)[at + x] = T(sums[x]);
        if (p.picture_max) static_cast<T*>(p.picture_max)[at + x] = tops[x];
      }
    }
  }

 private:
  // Columns [left, end) of some rows: their logits, and what becomes of them.
  void chunk(const Seen& seen, int64_t first, int64_t some, int64_t left, int64_t end, const Number* queries,
             const Number* right, Found& found) {
    for (int64_t j = left; j < end; j += M::COLUMNS)
      M::template multiply<false>(M::left_at(queries, first, p_.d, q_parts_), q_parts_, p_.d,
                                  M::right_at(right, j, 0, p_.d, k_parts_), k_parts_, M::depth_of(p_.d),
                                  logits_.at(j - left), STRIDE);
    for (int64_t i = 0; i < some; ++i)
      finish_row<T>(logits_.at(size_t(i) * STRIDE), seen, first + i, left, end, T(p_.scale), T(p_.cap));
    if (p_.picture_sum || p_.picture_max) {
      for (size_t x = 0; x < parts_.size(); ++x) gather(first, parts_[x].from, parts_[x].to, left, end, x);
    } else {
      gather(first, 0, some, left, end, 0);
    }
    if (p_.offsets) give_diagonals(found.diagonals.data(), first, some, left, end);
  }

  // Rows of a strip that lie in one row of the picture.
  struct Part {
    int64_t from, to, block_row;
  };

  void divide_rows(int64_t first, int64_t some) {
    parts_.clear();
    int64_t row = block_row_;
    for (int64_t from = 0; from < some;) {
      while (first + from >= p_.row_edges[row + 1]) ++row;
      const int64_t to = std::min(some, p_.row_edges[row + 1] - first);
      parts_.push_back({from, to, row});
      from = to;
    }
    part_mass_.assign(parts_.size() * SPAN, T(0));
    part_peaks_.assign(parts_.size() * SPAN, T(0));
  }

  void take_parts(Found& found) {
    for (size_t x = 0; x < parts_.size(); ++x) {
      for (; block_row_ < parts_[x].block_row; ++block_row_) give_block(found, block_row_);
      for (int64_t j = 0; j < SPAN; ++j) {
        block_mass_[j] += part_mass_[x * SPAN + j];
        block_peaks_[j] = std::max(block_peaks_[j], part_peaks_[x * SPAN + j]);
      }
    }
  }

  void gather(int64_t first, int64_t from, int64_t to, int64_t left, int64_t end, size_t part) {
    const bool largest = p_.column_max || p_.picture_max;
    if (largest) return gather_with<true>(first, from, to, left, end, part);
    gather_with<false>(first, from, to, left, end, part);
  }

  // Rows [from, to) of the strip, columns [left, end): weights, and what they add up to. Weights stay in the place of
  // the logits.
  template <bool LARGEST>
  void gather_with(int64_t first, int64_t from, int64_t to, int64_t left, int64_t end, size_t part) {
    const T scale = factor_of<T>(p_);
    const bool diagonals = p_.offsets;
    const T* lse = static_cast<const T*>(p_.lse) + head_ * p_.m + first;
    T shift[M::ROWS];
    for (int64_t i = from; i < to; ++i) shift[i] = lse[i] == -INF<T> ? std::numeric_limits<T>::max() : lse[i];
    for (int64_t j = 0; j < end - left; j += W) {
      V total = {}, top = {};
      T* at = logits_.at(j);
      for (int64_t i = from; i < to; ++i) {
        const V e = exp_below(load(at + i * STRIDE) * scale - shift[i]);
        total += e;
        if (LARGEST) top = larger<T>(top, e);
        if (diagonals) store(at + i * STRIDE, e);
      }
      const int64_t column = left - start_ + j;
      for (int lane = 0; lane < W; ++lane) mass_[column + lane] += total[lane];
      if (p_.column_max) store(&peaks_[column], larger<T>(load(&peaks_[column]), top));
      if (p_.picture_sum || p_.picture_max) {
        T* mass = &part_mass_[part * SPAN + column];
        T* peaks = &part_peaks_[part * SPAN + column];
        store(mass, load(mass) + total);
        if (LARGEST) store(peaks, larger<T>(load(peaks), top));
      }
    }
  }

  // diagonal_[x] holds the cells with j - i = left - first - (ROWS - 1) + x; in `to`, x counts from start - (m - 1).
  void give_diagonals(double* to, int64_t first, int64_t some, int64_t left, int64_t end) {
    std::memset(diagonal_.data, 0, sizeof(T) * (CHUNK + M::ROWS + 2 * W));
    for (int64_t i = 0; i < some; ++i) {
      const T* row = logits_.at(size_t(i) * STRIDE);
      T* at = diagonal_.at(M::ROWS - 1 - i);
      for (int64_t j = 0; j < end - left; j += W) store(at + j, load(at + j) + load(row + j));
    }
    const int64_t shift = left - first - (M::ROWS - 1) - (start_ - (p_.m - 1));
    for (int64_t x = std::max<int64_t>(0, -shift); x < end - left + M::ROWS - 1; ++x) to[shift + x] += diagonal_.data[x];
  }

  void clear_block() {
    std::fill(block_mass_.begin(), block_mass_.end(), T(0));
    std::fill(block_peaks_.begin(), block_peaks_.end(), T(0));
  }

  // One row of the picture is full.
  void give_block(Found& found, int64_t row) {
    for (int64_t x = 0; x < found.blocks; ++x) {
      const int64_t from = std::max(p_.column_edges[found.block + x], start_);
      const int64_t to = std::min(p_.column_edges[found.block + x + 1], stop_);
      double total = 0;
      T top = 0;
      for (int64_t j = from; j < to; ++j) {
        total += block_mass_[j - start_];
        top = std::max(top, block_peaks_[j - start_]);
      }
      found.sums[row * found.blocks + x] += total;
      T& old = found.tops[row * found.blocks + x];
      old = std::max(old, top);
    }
    clear_block();
  }

  const attlas::Dot& p_;
  const int q_parts_, k_parts_;
  int64_t head_ = 0, start_ = 0, stop_ = 0;
  Aligned<T> logits_, diagonal_;
  std::vector<double> mass_;
  std::vector<T> peaks_, block_mass_, block_peaks_, part_mass_, part_peaks_;
  std::vector<Part> parts_;
  int64_t block_row_ = 0;
};

}  // namespace ATTLAS_ISA
