// The additive score: rows and columns are the projected tokens, d the number of hidden units.
#pragma once

#include "abi_pairs.h"

namespace attlas {

struct Additive {
  PairwiseParams pairs;
  const void* weight;  // (d,)
};

struct AdditiveBackward {
  Additive of;
  Slopes slopes;
  void* d_rows;     // (batch, heads, m, d)
  void* d_columns;  // (batch, heads, n, d)
  void* d_values;   // (batch, heads, n, e)
  void* d_weight;   // (d,)
};

}  // namespace attlas
