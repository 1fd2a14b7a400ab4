// Matrix products with the vectors of any instruction set: C (rows x columns) += A (rows x depth) B (depth x columns).
#pragma once

#include "simd.h"

namespace ATTLAS_ISA {

template <class T_>
struct Plain {
  using T = T_;
  using Part = T;                  // what a packed number is kept in
  static constexpr bool SPLIT = false;
#if defined(__AVX512F__)
  static constexpr int MR = 12;
#elif defined(__AVX2__)
  static constexpr int MR = 6;
#else
  static constexpr int MR = 6;
#endif
  static constexpr int VECTORS = 2;
  static constexpr int NR = VECTORS * WIDTH<T>;
  static constexpr int ROWS = MR;      // rows of A that are multiplied together
  static constexpr int COLUMNS = NR;   // columns of B that are multiplied together
  static constexpr int DEPTH = 1;      // depth is padded to a multiple of this
  static constexpr int BLOCK_ROWS = MR * (96 / MR);

  int depth_parts;  // unused here: numbers are kept whole

  // Packed sizes in numbers. B lies as [column block][depth][NR], A as [row][depth].
  static size_t right_size(int64_t depth, int64_t columns) { return size_t(depth) * round_up(columns, NR); }
  static size_t left_size(int64_t rows, int64_t depth) { return size_t(round_up(rows, MR)) * depth; }
  static int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

  // B = the transpose of `columns` rows of length `depth`; read(row, index) gives a number.
  template <class Read>
  static void pack_transposed(Part* to, int64_t depth, int64_t first, int64_t columns, Read read) {
    for (int64_t j = first; j < first + round_up(columns, NR); ++j) {
      Part* base = to + (j / NR) * NR * depth + j % NR;
      const bool inside = j < first + columns;
      for (int64_t t = 0; t < depth; ++t) base[t * NR] = inside ? T(read(j, t)) : T(0);
    }
  }
  // B = `depth` rows of `columns` numbers; rows from `first` on, of `whole` in all.
  template <class Read>
  static void pack_rows(Part* to, int64_t whole, int64_t first, int64_t rows, int64_t columns, Read read) {
    for (int64_t i = first; i < first + rows; ++i)
      for (int64_t j = 0; j < round_up(columns, NR); ++j)
        to[(j / NR) * NR * whole + i * NR + j % NR] = j < columns ? T(read(i, j)) : T(0);
  }
  template <class Read>
  static void pack_left(Part* to, int64_t rows, int64_t depth, Read read) {
    for (int64_t i = 0; i < round_up(rows, MR); ++i)
      for (int64_t t = 0; t < depth; ++t) to[i * depth + t] = i < rows ? T(read(i, t)) : T(0);
  }

  // C[MR x NR], rows `stride` apart.
  template <bool ADD>
  static ATTLAS_INLINE void tile(const T* a, int64_t a_stride, const T* b, int64_t depth, T* c, int64_t stride) {
    Vec<T> sums[MR][VECTORS];
    for (int r = 0; r < MR; ++r)
      for (int x = 0; x < VECTORS; ++x) sums[r][x] = ADD ? load(c + r * stride + x * WIDTH<T>) : Vec<T>{};
    for (int64_t t = 0; t < depth; ++t) {
      Vec<T> right[VECTORS];
      for (int x = 0; x < VECTORS; ++x) right[x] = load(b + t * NR + x * WIDTH<T>);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const Vec<T> left = all(a[r * a_stride + t]);
#pragma GCC unroll 2
        for (int x = 0; x < VECTORS; ++x) sums[r][x] += left * right[x];
      }
    }
    for (int r = 0; r < MR; ++r)
      for (int x = 0; x < VECTORS; ++x) store(c + r * stride + x * WIDTH<T>, sums[r][x]);
  }
};

}  // namespace ATTLAS_ISA
