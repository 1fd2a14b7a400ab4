// The k largest logits of a row in descending order; of equal ones the first keys.
#pragma once

#include <algorithm>
#include <functional>
#include <type_traits>

#include "simd.h"

namespace ATTLAS_ISA {

template <class T>
struct Largest {
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  T* values;
  int32_t* keys;
  int k;

  // Logits lie in `places` stretches, and of each the largest logit in each lane is known: only where that is among the
  // k largest, the keys of the lane are looked at. where(place, row, key, size) says where a stretch begins, the key of
  // its first logit, and its size; from one logit of a lane to the next it is `step`. Stretches come in the order of
  // their keys or side by side, after those of earlier calls.
  template <class Where>
  void take(const V* peaks, int places, int step, Where where) const {
    // What is no larger than the last of the calls before is not looked at: its key is later.
    const T floor = values[k - 1];
    V peak = peaks[0];
    for (int x = 1; x < places; ++x) peak = larger<T>(peak, peaks[x]);
    if (!above<T>(peak, all(floor))) return;
    T bound = floor;
    if (floor == -INF<T> && k <= W) {
      // At least k logits reach the k-th largest of these maxima: nothing below it is among the k largest.
      T sorted[W];
      store(sorted, peak);
      std::nth_element(sorted, sorted + k - 1, sorted + W, std::greater<T>());
      bound = sorted[k - 1];
    }
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, float>)
      if (k <= W) return take_few(peaks, places, step, floor, bound, where);
#endif
    for (int place = 0; place < places; ++place) {
      const T* row;
      int64_t key, size;
      where(place, row, key, size);
      for (uint32_t found = reach(peaks[place], floor, bound); found; found &= found - 1)
        for (int64_t j = __builtin_ctz(found); j < size; j += step) offer(row[j], int32_t(key + j));
      bound = std::max(bound, values[k - 1]);
    }
  }

 private:
  // One bit for each lane that is above the floor and not below the bound.
  static ATTLAS_INLINE uint32_t reach(V x, T floor, T bound) { return above<T>(x, all(floor)) & ~above<T>(all(bound), x); }

  // Keys do not come in order here.
  void offer(T x, int32_t key) const {
    if (!(x > -INF<T>) || x < values[k - 1] || (x == values[k - 1] && key > keys[k - 1])) return;
    int at = k - 1;
    for (; at > 0 && (values[at - 1] < x || (values[at - 1] == x && keys[at - 1] > key)); --at) {
      values[at] = values[at - 1];
      keys[at] = keys[at - 1];
    }
    values[at] = x;
    keys[at] = key;
  }

#if defined(__AVX512F__)
  // No more than a vector of them stay in order in one register.
  template <class Where>
  void take_few(const V* peaks, int places, int step, float floor, float bound, Where where) const {
    constexpr int MOST = 16;  // places
    const __mmask16 used = __mmask16((1u << k) - 1);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i steps = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(step));
    __m512 best = _mm512_mask_loadu_ps(_mm512_set1_ps(-INF<float>), used, values);
    __m512i best_keys = _mm512_mask_loadu_epi32(_mm512_set1_epi32(-1), used, keys);
    // Lanes that reach the bound, found without a branch for each.
    alignas(64) int32_t reached[MOST * W + W];
    int count = 0;
    for (int place = 0; place < places; ++place) {
      const __mmask16 found = __mmask16(reach(peaks[place], floor, bound));
      const __m512i names = _mm512_add_epi32(lanes, _mm512_set1_epi32(place * W));
      _mm512_storeu_si512(reached + count, _mm512_maskz_compress_epi32(found, names));
      count += __builtin_popcount(found);
    }
    for (int x = 0; x < count; ++x) {
      const float* row;
      int64_t first, size;
      where(reached[x] / W, row, first, size);
      const int lane = reached[x] % W;
      const __mmask16 there = _mm512_cmplt_epi32_mask(steps, _mm512_set1_epi32(int(size) - lane));
      const __m512 own = _mm512_mask_i32gather_ps(_mm512_set1_ps(-INF<float>), there, steps, row + lane, 4);
      for (uint32_t found = reach((V)own, floor, bound); found; found &= found - 1) {
        const int j = lane + __builtin_ctz(found) * step;
        const __m512 value = _mm512_set1_ps(row[j]);
        const __m512i key = _mm512_set1_epi32(int(first) + j);
        // Before it stand larger ones, and of equal ones those of earlier keys.
        const __mmask16 same = _mm512_cmp_ps_mask(best, value, _CMP_EQ_OQ);
        const __mmask16 before =
            _mm512_cmp_ps_mask(best, value, _CMP_GT_OQ) | _mm512_mask_cmplt_epi32_mask(same, best_keys, key);
        const __mmask16 rest = __mmask16(~(1u << __builtin_popcount(before)));
        best = _mm512_mask_expand_ps(value, rest, best);
        best_keys = _mm512_mask_expand_epi32(key, rest, best_keys);
      }
    }
    _mm512_mask_storeu_ps(values, used, best);
    _mm512_mask_storeu_epi32(keys, used, best_keys);
  }
#endif
};

}  // namespace ATTLAS_ISA
