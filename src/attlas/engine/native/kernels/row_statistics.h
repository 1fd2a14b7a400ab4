// The statistics of rows that abi.h lists: which are wanted, and where they are stored.
#pragma once

#include "abi.h"

namespace ATTLAS_ISA {

inline bool wants_row_statistics(const attlas::AttentionParams& p) {
#define ATTLAS_WANTED(name) p.name ||
  return ATTLAS_ROW_STATISTICS(ATTLAS_WANTED) p.top_keys;
#undef ATTLAS_WANTED
}

inline bool wants_column_statistics(const attlas::AttentionParams& p) {
  return p.column_mass || p.column_max || p.offsets || p.picture_sum || p.picture_max;
}

inline void forget_row_statistics(attlas::AttentionParams& p) {
#define ATTLAS_FORGET(name) p.name = nullptr;
  ATTLAS_ROW_STATISTICS(ATTLAS_FORGET)
#undef ATTLAS_FORGET
  p.top_values = nullptr, p.top_keys = nullptr, p.k_largest = 0;
}

// A number that must be given: a structure of these does not compile where one is left out.
template <class T>
struct Required {
  T value;
  Required(T x) : value(x) {}
};

// The statistics of one row.
template <class T>
struct RowStatistics {
#define ATTLAS_MEMBER(name) Required<T> name;
  ATTLAS_ROW_STATISTICS(ATTLAS_MEMBER)
#undef ATTLAS_MEMBER

  void store(const attlas::AttentionParams& p, int64_t row) const {
#define ATTLAS_STORE(name) \
  if (p.name) static_cast<T*>(p.name)[row] = name.value;
    ATTLAS_ROW_STATISTICS(ATTLAS_STORE)
#undef ATTLAS_STORE
  }
};

}  // namespace ATTLAS_ISA
