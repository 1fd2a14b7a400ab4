// What Python hands over for scores that are no dot product: the same layout as the ctypes structures in pairwise.py.
#pragma once

#include "abi.h"

namespace attlas {

// A matrix of rows against columns. For A @ v rows are queries and columns keys; for A.mT @ x the other way round, and
// then the log-sum-exp belongs to the columns.
struct PairwiseParams {
  int64_t batch, heads, token_heads, value_heads;  // heads of the columns and of their values divide those of the rows
  int64_t m, n, d, e;                              // rows, columns, sizes of tokens and values
  Tensor4 rows, columns, values;
  int32_t type;     // FLOAT32 or FLOAT64, of all numbers
  int32_t threads;
  int32_t by_column;  // the log-sum-exp, and the mask, are given for each column and not for each row
  // Cells low <= other < high may attend, for each row (or column); strides count elements.
  const int32_t* low;
  const int32_t* high;
  int64_t span_batch, span_head;
  // Further cells, one byte each, 0 = may not attend, (query, key) whatever the rows are.
  const uint8_t* allowed;
  int64_t allowed_batch, allowed_head, allowed_row;
  // Log-sum-exp in nats: of rows for gradients, of columns where by_column; null where it is found here.
  const double* known;
  // Results, contiguous; what is not wanted is null.
  void* out;        // (batch, heads, m, e)
  double* lse;      // (batch, heads, m)
  void* entropy;    // (batch, heads, m)
  void* max_logit;  // (batch, heads, m)
  // What is wanted of the weights with their log-sum-exp known, instead of the results above; null for none.
  const AttentionParams* statistics;
  // Terms of places, which are added to the logits, with the sizes of these rows and columns; null for none.
  const AttentionParams* places;
};

// Gradients through sum_ij A_ij (left_i . right_j): slope_ij = A_ij (left_i . right_j - delta_i).
struct Slopes {
  const void* left;   // (batch, heads, m, e) contiguous; the values of the columns are the other side
  const void* delta;  // (batch, heads, rows), or (batch, heads, columns) where by_column
};

}  // namespace attlas
