// Sums and maxima of columns and of the blocks of a picture, and sums of diagonals: those of the rows of a task, which
// are then merged over the tasks of a head in their order.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "abi.h"
#include "whole.h"

namespace ATTLAS_ISA {

// The two ways to join numbers, by their sum or by their maximum: join() joins two numbers or two vectors lane by lane,
// join_pairs() neighbours in two vectors, join_lanes() the lanes of one vector. The tasks' numbers are joined as Total.
template <class T>
struct Sums {
  using Total = double;
  template <class X>
  static ATTLAS_INLINE X join(X a, X b) {
    return a + b;
  }
  static ATTLAS_INLINE Vec<T> join_pairs(Vec<T> a, Vec<T> b) { return sum_of_pairs<T>(a, b); }
  static T join_lanes(Vec<T> x) { return sum<T>(x); }
};
template <class T>
struct Maxima {
  using Total = T;
  static ATTLAS_INLINE Vec<T> join(Vec<T> a, Vec<T> b) { return larger<T>(a, b); }
  template <class X>
  static ATTLAS_INLINE X join(X a, X b) {
    return std::max(a, b);
  }
  static ATTLAS_INLINE Vec<T> join_pairs(Vec<T> a, Vec<T> b) { return most_of_pairs<T>(a, b); }
  static T join_lanes(Vec<T> x) { return most<T>(x); }
};

// The results of one task; what is not wanted is empty. Not here is what the task alone completes: a row of the picture
// whose queries all belong to it, which is written to the picture at once.
template <class T>
struct TaskColumns {
  struct Results {
    std::vector<T> columns;
    std::vector<T> blocks[2];  // the row of the picture that an earlier task began, and the one that a later task ends
  };
  Results sums, maxima;
  std::vector<double> diagonals;  // from the one that begins at the last query of the task and key 0
};

// Adds the weights of a task's rows to its TaskColumns, for one span of columns after another and strip by strip.
template <class M>
class ColumnAccumulator {
  using T = typename M::T;
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;

 public:
  // Rows [from, to) of a strip, which lie in one row of the picture, and the slot of memory for their sums. Without a
  // picture, all rows of a task are one part.
  struct Part {
    int64_t from, to, block_row, slot;
  };

  ColumnAccumulator(const attlas::AttentionParams& p, int64_t span)
      : p_(p),
        span_(span),
        picture_(p.picture_sum || p.picture_max),
        slots_(picture_ ? M::ROWS + 1 : 1),
        sums_(size_t(slots_) * span + 2 * W),
        maxima_(size_t(slots_) * span + 2 * W) {}

  // Begins a task: queries [first, first + count) of a head.
  void begin(int64_t head, int64_t first, int64_t count, TaskColumns<T>& task) {
    head_ = head;
    first_ = first;
    count_ = count;
    task_ = &task;
    const size_t columns = size_t(round_up(p_.n, M::COLUMNS));  // whole vectors
    if (p_.column_mass) task.sums.columns.resize(columns);
    if (p_.column_max) task.maxima.columns.resize(columns);
    if (p_.offsets) task.diagonals.resize(size_t(count + p_.n - 1));
  }

  // Begins a span: columns [start, stop), until end_span().
  void begin_span(int64_t start, int64_t stop) {
    start_ = start;
    stop_ = stop;
  }
  void end_span() {
    for (const Part& part : parts_) add_to_results(part);
    parts_.clear();
  }

  // Begins a strip, rows [r, r + rows) of the task, and divides it into parts. The last part of the strip before goes on
  // if its row of the picture does; all its other parts are complete. `maxima` says whether maxima are computed too.
  void begin_strip(int64_t r, int64_t rows, bool maxima) {
    int64_t row = block_row_of(first_ + r), slot = parts_.empty() ? 0 : parts_.back().slot;
    const bool continues = !parts_.empty() && parts_.back().block_row == row;
    for (const Part& part : parts_)
      if (part.block_row != row) add_to_results(part);
    parts_.clear();
    for (int64_t from = 0, to; from < rows; from = to) {
      while (first_ + r + from >= block_row_end(row)) ++row;
      to = std::min(rows, block_row_end(row) - first_ - r);
      if (from > 0 || !continues) clear(slot = (slot + 1) % slots_, maxima);
      parts_.push_back({from, to, row, slot});
    }
  }

  // The part that row i of the strip lies in.
  const Part& part_of(int64_t i) const {
    const Part* part = parts_.data();
    while (part->to <= i) ++part;
    return *part;
  }
  T* sums(const Part& part, int64_t column) const { return sums_.at(size_t(part.slot * span_ + column - start_)); }
  T* maxima(const Part& part, int64_t column) const { return maxima_.at(size_t(part.slot * span_ + column - start_)); }

 private:
  int64_t block_row_of(int64_t query) const {
    return picture_ ? std::upper_bound(p_.row_edges, p_.row_edges + p_.picture_rows + 1, query) - p_.row_edges - 1 : 0;
  }
  int64_t block_row_end(int64_t block_row) const { return picture_ ? p_.row_edges[block_row + 1] : p_.m; }

  void clear(int64_t slot, bool maxima) const {
    std::fill_n(sums_.at(size_t(slot * span_)), stop_ - start_, T(0));
    if (maxima) std::fill_n(maxima_.at(size_t(slot * span_)), stop_ - start_, T(0));
  }

  // Adds the numbers of a part over this span, all rows of which were processed, to the results of the task.
  void add_to_results(const Part& part) const {
    add_to_results<Sums<T>>(sums(part, start_), part, task_->sums, p_.picture_sum);
    add_to_results<Maxima<T>>(maxima(part, start_), part, task_->maxima, p_.picture_max);
  }

  template <class Join>
  void add_to_results(T* numbers, const Part& part, typename TaskColumns<T>::Results& results, void* picture) const {
    for (int64_t j = 0; !results.columns.empty() && j < stop_ - start_; j += W) {
      T* to = results.columns.data() + start_ + j;
      store(to, Join::join(load(to), load(numbers + j)));
    }
    if (!picture) return;
    T* to = static_cast<T*>(picture) + (head_ * p_.picture_rows + part.block_row) * p_.picture_columns;
    const bool begun_before = p_.row_edges[part.block_row] < first_;  // by an earlier task
    if (begun_before || block_row_end(part.block_row) > first_ + count_) {
      std::vector<T>& blocks = results.blocks[begun_before ? 0 : 1];
      blocks.resize(size_t(p_.picture_columns));
      to = blocks.data();
    }
    const int64_t *edges = p_.column_edges, *last = edges + p_.picture_columns, stop = std::min(stop_, p_.n);
    for (int64_t x = std::upper_bound(edges, last + 1, start_) - edges - 1; x < p_.picture_columns && edges[x] < stop;) {
      const int64_t from = std::max(edges[x], start_), end = std::min(edges[x + 1], stop), width = end - from;
      int64_t blocks = 1;  // of equal width, a power of two below W: these are joined together
      const bool narrow = width < W && !(width & (width - 1));
      while (narrow && x + blocks < p_.picture_columns && edges[x + blocks + 1] == end + blocks * width &&
             edges[x + blocks + 1] <= stop)
        ++blocks;
      if (narrow && blocks * width >= 2 * W) {
        join_neighbours<Join>(numbers + (from - start_), width, blocks);
        for (int64_t block = 0; block < blocks; ++block)
          to[x + block] = Join::join(to[x + block], numbers[from - start_ + block]);
      } else {
        blocks = 1;
        to[x] = Join::join(to[x], T(join_all<Join>(numbers + (from - start_), width)));
      }
      x += blocks;
    }
  }

  // Joins each of `blocks` blocks of `width` numbers, a power of two, to one number: pairs of neighbours until one is left.
  template <class Join>
  static ATTLAS_INLINE void join_neighbours(T* numbers, int64_t width, int64_t blocks) {
    for (; width > 1; width /= 2)
      for (int64_t j = 0; j < blocks * width / 2; j += W)
        store(numbers + j, Join::join_pairs(load(numbers + 2 * j), load(numbers + 2 * j + W)));
  }

  // All numbers joined to one.
  template <class Join>
  static double join_all(const T* numbers, int64_t size) {
    V lanes{};
    int64_t j = 0;
    for (; j + W <= size; j += W) lanes = Join::join(lanes, load(numbers + j));
    double total = j ? double(Join::join_lanes(lanes)) : 0;
    for (; j < size; ++j) total = Join::join(total, double(numbers[j]));
    return total;
  }

  const attlas::AttentionParams& p_;
  const int64_t span_;
  const bool picture_;
  const int64_t slots_;  // as many as a strip has parts at most, and one for the part that goes on from the strip before
  const Aligned<T> sums_, maxima_;
  int64_t head_ = 0, first_ = 0, count_ = 0, start_ = 0, stop_ = 0;
  TaskColumns<T>* task_ = nullptr;
  std::vector<Part> parts_;
};

// Merges the TaskColumns of a head's tasks, which have `block` queries each, and writes the results.
template <class T>
void merge_tasks(const attlas::AttentionParams& p, int64_t head, int64_t block, const TaskColumns<T>* task_columns,
                 int64_t tasks) {
  // Writes row `row` of a result, joined from tasks [first, last]; numbers_of(task) returns the numbers of a task and the
  // place of their first one in the row.
  const auto merge = [&](auto join, void* result, int64_t row, int64_t size, int64_t first, int64_t last, auto numbers_of) {
    std::vector<typename decltype(join)::Total> merged(static_cast<size_t>(size));
    for (int64_t task = first; task <= last; ++task) {
      const auto [numbers, place] = numbers_of(task);
      const int64_t count = std::min(int64_t(numbers->size()), size - place);
      const auto* from = numbers->data();
      auto* to = merged.data() + place;
      for (int64_t x = 0; x < count; ++x) to[x] = join.join(to[x], typename decltype(join)::Total(from[x]));
    }
    std::copy(merged.begin(), merged.end(), static_cast<T*>(result) + row * size);
  };
  const auto merge_columns = [&](auto join, auto results, void* columns, void* picture) {
    if (columns)
      merge(join, columns, head, p.n, 0, tasks - 1,
            [&](int64_t task) { return std::pair{&(task_columns[task].*results).columns, int64_t(0)}; });
    for (int64_t row = 0; picture && row < p.picture_rows; ++row) {
      const int64_t first = p.row_edges[row] / block, last = (p.row_edges[row + 1] - 1) / block;
      if (first < last)
        merge(join, picture, head * p.picture_rows + row, p.picture_columns, first, last, [&](int64_t task) {
          return std::pair{&(task_columns[task].*results).blocks[task > first ? 0 : 1], int64_t(0)};
        });
    }
  };
  merge_columns(Sums<T>(), &TaskColumns<T>::sums, p.column_mass, p.picture_sum);
  merge_columns(Maxima<T>(), &TaskColumns<T>::maxima, p.column_max, p.picture_max);
  if (p.offsets)
    merge(Sums<T>(), p.offsets, head, p.m + p.n - 1, 0, tasks - 1,
          [&](int64_t task) { return std::pair{&task_columns[task].diagonals, p.m - std::min(p.m, (task + 1) * block)}; });
}

}  // namespace ATTLAS_ISA
