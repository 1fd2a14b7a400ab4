// Rows of the matrix of a linear attention layer.
#pragma once

#include "abi.h"

namespace attlas {

// Vectors of tokens, (batch, own heads, tokens, size); null where there are none. `group` heads of the matrix share one of
// its heads, and the stride of an axis whose one number stands for all is 0.
struct OfTokens {
  Tensor4 of;
  int64_t group, size;
};

// Cells write_j q' M_i ... M_{j+1} k_j of some rows i, with M = (I + p r') diag(exp decay), or (I - erase k k') diag(exp decay).
struct TransportRows {
  int64_t batch, heads, d;
  int64_t count;        // rows
  const int64_t* rows;  // their tokens, ascending
  int64_t first, stop;  // tokens of the columns
  const void* queries;  // (batch, heads, count, d) contiguous, with their scale
  OfTokens k, decay, write, erase, p, r;
  int32_t type;     // of k; all else is in the dtype of the sums
  int32_t threads;
  void* out;        // (batch, heads, count, stop - first) contiguous, 0 at first
};

}  // namespace attlas
