// A kernel of the distance between query and key.
#pragma once

#include "abi_pairs.h"

namespace attlas {

enum Kernel : int32_t { GAUSSIAN = 0, LAPLACE = 1, BOXCAR = 2, EPANECHNIKOV = 3, TRIANGULAR = 4 };

struct Distance {
  PairwiseParams pairs;
  int32_t kernel;
  const void* scale;  // (d,): one over the bandwidth of each coordinate
};

struct DistanceBackward {
  Distance of;
  Slopes slopes;
  // For each row and coordinate c: the sum over columns of slope * (row - column), its sign for LAPLACE, and of
  // slope * (row - column)^2, |row - column| for LAPLACE. (batch, heads, m, d)
  void* first;
  void* second;  // null where the bandwidth wants no gradient
};

}  // namespace attlas
