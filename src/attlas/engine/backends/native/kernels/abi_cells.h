// Statistics of cells that are handed over tile by tile.
#pragma once

#include "abi.h"

namespace attlas {

// A tile of weights, which may be negative: some batches and heads, rows from first_row on and columns from first_column on.
// The tiles of a row come from left to right. Results are those of all tiles so far; what is not wanted is null. They begin
// at the first batch and head of the tile, and one batch has the results of `all_heads` heads.
struct CellSums {
  int64_t batch, heads, rows, columns;
  Tensor4 cells;        // the tile, or null where it is a product of its rows and columns, of d numbers each
  Tensor4 left, right;  // (batch, heads, rows, d) and (batch, heads, columns, d)
  int64_t d;
  int32_t type, threads;
  int64_t all_heads, m, n, first_row, first_column;
  double* mass;          // (m,), always wanted
  void* top_values;      // (m, k_largest), -infinity at first
  int32_t* top_keys;     // (m, k_largest), -1 at first
  int64_t k_largest;
  double* column_mass;   // (n,)
  void* column_max;      // (n,), -infinity at first
  double* offsets;       // (m + n - 1,)
  // Sums of blocks, and of each the weight that is the largest by its size: (picture_rows, picture_columns).
  double* picture_sum;
  void* picture_max;
  const int64_t* row_edges;
  const int64_t* column_edges;
  int64_t picture_rows, picture_columns;
  // Keys of weight 0 that no tile of these rows has, given with the last tile: k_largest of them are enough.
  const int32_t* zero_keys;
  int64_t zeros;
};

}  // namespace attlas
