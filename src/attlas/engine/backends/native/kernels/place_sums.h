// The gradients of the terms of places: what the gradients Z of the logits sum up to, strip by strip.
#pragma once

#include <algorithm>

#include "abi.h"
#include "reader.h"

namespace ATTLAS_ISA {

inline bool wants_places(const attlas::PlaceGradients& g) { return g.distance || g.key || g.query || g.cell; }

// The sums of one block of ROWS queries and KEYS keys, in the dtype of the sums, and where they go. Sums of up to ROWS or KEYS
// numbers are made in registers and nearest memory; those of blocks are added up in double.
template <class T, int64_t ROWS, int64_t KEYS, int64_t STRIDE>
class PlaceSums {
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  static constexpr int64_t START = ROWS + W, DIAGONALS = START + KEYS + W;
  static_assert(STRIDE - KEYS >= W && KEYS % W == 0);

 public:
  explicit PlaceSums(const attlas::AttentionBackwardParams& work)
      : g_(work.places), p_(work.of), wanted_(wants_places(g_)), diagonals_(size_t(wanted_ ? DIAGONALS : 0)) {}

  bool wanted() const { return wanted_; }
  // Sums of the rows that are taken, over the keys of the task.
  const T* rows() const { return rows_; }

  // Queries [row, row + some) of a head from here on. Number j - i of `distances` is that of key j of the task and query i of
  // those that are taken.
  void begin(int64_t b, int64_t h, int64_t row, double* distances) {
    head_ = b * p_.heads + h;
    row_ = row;
    distances_ = distances;
    cells_ = g_.cell ? static_cast<T*>(g_.cell) + b * g_.cell_batch + h * g_.cell_head + row * p_.n : nullptr;
    std::fill_n(rows_, ROWS, T(0));
  }

  void begin_block() {
    if (g_.key) std::fill_n(columns_, KEYS, T(0));
    if (g_.distance) std::fill_n(diagonals_.data, DIAGONALS, T(0));
  }

  // Rows [r, r + some) of the block whose first key is `key`; only columns [first, stop) are not 0, and what lies between
  // the rows is 0.
  void add(const T* z, int64_t r, int64_t some, int64_t key, int64_t first, int64_t stop) {
    if (g_.query)
      for (int64_t i = 0; i < some; ++i) {
        V total{};
        for (int64_t j = first; j < stop; j += W) total += load(z + i * STRIDE + j);
        rows_[r + i] += sum<T>(total);
      }
    if (g_.key)
      for (int64_t j = first; j < stop; j += W) {
        V total = load(columns_ + j);
        for (int64_t i = 0; i < some; ++i) total += load(z + i * STRIDE + j);
        store(columns_ + j, total);
      }
    if (g_.distance) add_diagonals(z, r, some, first, stop);
    if (!cells_) return;
    const int64_t last = std::min(stop, p_.n - key);
    for (int64_t i = 0; i < some; ++i) {
      T* to = cells_ + (r + i) * p_.n + key;
      const T* from = z + i * STRIDE;
      int64_t j = first;
      for (; j + W <= last; j += W) store(to + j, load(to + j) + load(from + j));
      for (; j < last; ++j) to[j] += from[j];
    }
  }

  // The block is done: its first key is `key`, which is number `place` of the task.
  void finish_block(int64_t key, int64_t place) const {
    if (g_.key) {
      double* to = g_.key + head_ * p_.n + key;
      for (int64_t j = 0; j < std::min(KEYS, p_.n - key); ++j) to[j] += double(columns_[j]);
    }
    if (g_.distance) {
      double* to = distances_ + place;
      for (int64_t x = 1 - ROWS; x < KEYS; ++x) to[x] += double(diagonals_.data[START + x]);
    }
  }

 private:
  // Each row is read one column further than the row above, so that a vector stays with its distances.
  void add_diagonals(const T* z, int64_t r, int64_t some, int64_t first, int64_t stop) {
    for (int64_t i = 0; i < some; i += W) {
      const int64_t rows = std::min<int64_t>(W, some - i);
      for (int64_t j = first - W; j < stop; j += W) {
        T* to = diagonals_.data + START + j - (r + i);
        V total = j < 0 ? V{} : load(z + i * STRIDE + j);
        for (int64_t x = 1; x < rows; ++x) total += load(z + (i + x) * STRIDE + j + x);
        store(to, load(to) + total);
      }
    }
  }

  const attlas::PlaceGradients& g_;
  const attlas::AttentionParams& p_;
  const bool wanted_;
  Aligned<T> diagonals_;  // number START is that of the first query and the first key
  int64_t head_ = 0, row_ = 0;
  double* distances_ = nullptr;
  T* cells_ = nullptr;
  T rows_[ROWS] = {};
  T columns_[KEYS] = {};
};

}  // namespace ATTLAS_ISA
