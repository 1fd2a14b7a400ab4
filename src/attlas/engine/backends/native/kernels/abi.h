// What Python hands over: plain numbers and pointers. library.py reads the text of this file and makes its ctypes
// structures from it: fields are `TYPE name, name;` with a type of <cstdint>, double, a pointer or a structure above.
#pragma once

#include <cstdint>

namespace attlas {

enum Type : int32_t { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

// A tensor of four axes (batch, heads, rows, size); its last axis is contiguous. Strides count elements.
struct Tensor4 {
  const void* data;
  int64_t batch, head, row;  // strides; 0 where an axis is expanded
};

// A term of the logits that depends on places: a strided tensor (batch, heads, m, n), times a factor. The strides of a
// number of each distance cancel: what column adds, row takes back.
struct Bias {
  const void* data;  // of the first query and key; null where there is no such term
  int64_t batch, head, row, column;
  double factor;
  int32_t type;
};

// A term of each query or key in float64, (batch, heads, m) or (batch, heads, n); null where there is none.
struct TokenBias {
  const double* data;
  int64_t batch, head;
};

// Statistics of each row, (batch, heads, m), in the dtype of the sums: sums of -p log p, p^2 and p (less than 1 with a
// sink, or where lse is partial); largest, mean and variance of the allowed logits. RowStatistics computes them by name.
#define ATTLAS_ROW_STATISTICS(X) X(entropy) X(squares) X(mass) X(max_logit) X(mean) X(variance)
#define ATTLAS_POINTER(name) void* name;

// softmax(scale * q . k), capped, plus terms of places, masked, with a sink; what is not wanted is null.
struct AttentionParams {
  int64_t batch, heads, key_heads, m, n, d, e;
  Tensor4 q, k, v;
  int32_t type;     // of q, k and v
  int32_t threads;
  double scale;
  double cap;       // bound of the logits, 0 for none
  const void* sink;  // (heads,), in the dtype of the sums
  // Terms that are added after the cap.
  Bias by_distance, by_cell;
  TokenBias by_query, by_key;
  // Keys low <= j < high may be seen by a row; strides count elements, rows are contiguous.
  const int32_t* low;
  const int32_t* high;
  int64_t span_batch, span_head;
  // Further cells, one byte each, 0 = may not attend; keys are contiguous.
  const uint8_t* allowed;
  int64_t allowed_batch, allowed_head, allowed_row;
  // Results, contiguous, in the dtype of the sums: float32, or float64 for float64 tokens.
  void* out;         // (batch, heads, m, e)
  double* lse;       // (batch, heads, m); read where lse_known
  int32_t lse_known;
  int32_t k_largest;
  int32_t rounded;   // whether the caller rounds the output to the type of the tokens
  int32_t partial;   // whether a known lse counts keys or a sink that are not here
  ATTLAS_ROW_STATISTICS(ATTLAS_POINTER)
  void* top_values;  // (batch, heads, m, k_largest), weights
  int64_t* top_keys;
  void* column_mass;  // (batch, heads, n)
  void* column_max;
  void* offsets;      // (batch, heads, m + n - 1)
  // Sums and maxima over blocks, 0 at first: (batch, heads, picture_rows, picture_columns), with the first row and column of
  // each block and one more at the end.
  void* picture_sum;
  void* picture_max;
  const int64_t* row_edges;
  const int64_t* column_edges;
  int64_t picture_rows, picture_columns;
  // How many of the largest weights hold each share of a row's mass: (batch, heads, m, levels).
  int64_t* coverage;
  const double* levels;
  int64_t level_count;
};

// Gradients of terms of places: what the gradients of the logits sum up to is added to them. Null where none is wanted.
// Batch after batch, the heads lie so many numbers apart as is said here.
struct PlaceGradients {
  double* distance;  // of the first query and key: number j - i is that of key j and query i
  double* query;     // (batch, heads, m)
  double* key;       // (batch, heads, n) contiguous
  void* cell;        // (batch, heads, m, n) in the dtype of the sums; rows are contiguous
  int64_t distance_head, query_head;
  int64_t cell_batch, cell_head;  // strides; 0 where batches or heads share their numbers
};

// Gradients of an output whose log-sum-exp is known; `of` has no results of its own. All tensors are in the dtype of the
// sums; the type of the tokens says how many of their digits count.
struct AttentionBackwardParams {
  AttentionParams of;
  Tensor4 grad;       // of the output, (batch, heads, m, e)
  const void* delta;  // (batch, heads, m) contiguous: sum of P dP of each row, where dP is the gradient in a weight
  // Further terms, contiguous, null where there are none. In a weight: column + log * ln P + square * P. In the logit of a
  // key that may be seen: mean + linear * (S - centre). Of columns (batch, heads, n), else of rows (batch, heads, m); log
  // and square come together, and so do mean, linear and centre.
  const void* column;
  const void* log;
  const void* square;
  const void* mean;
  const void* linear;
  const void* centre;
  void* column_sums;  // (batch, heads, m): a result, sum of P column of each row, with column; the rest counts it to delta
  // Results, contiguous, in the dtype of the sums; d_k and d_v are 0 at first.
  void* d_q;  // (batch, heads, m, d)
  void* d_k;  // (batch, key_heads, n, d)
  void* d_v;  // (batch, key_heads, n, e)
  PlaceGradients places;
};

// A function of simd.h over an array.
enum Function : int32_t { EXP = 0, TANH = 1, LOG2 = 2 };

struct Elementary {
  const void* in;
  void* out;
  int64_t count;
  int32_t function;
  int32_t type;
};

enum Status : int32_t { DONE = 0, NOT_FINITE = 1, NO_MEMORY = 2, UNSUPPORTED = 3, INTERRUPTED = 4 };

}  // namespace attlas
