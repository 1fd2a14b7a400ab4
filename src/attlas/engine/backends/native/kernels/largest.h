// The k largest logits of a row in descending order; of equal ones the first keys.
#pragma once

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "simd.h"

namespace ATTLAS_ISA {

template <class T>
struct Largest {
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  T* values;
  int32_t* keys;
  int k;

  // Some logits of the row, side by side: the first of them, its key, and how many there are.
  struct Stretch {
    const T* logits;
    int64_t key, size;
  };

  // Takes the logits of `places` stretches, which where(place) gives. Lane l of a stretch has the logits l, l + step,
  // l + 2 step and so on, and peaks[place] the largest of each lane: only a lane whose largest can be among the k largest is
  // read. The keys of a call come after those of earlier calls.
  template <class Where>
  void take(const V* peaks, int places, int step, Where where) const {
    // What is no larger than the last of the calls before is not looked at: its key is later.
    const T floor = values[k - 1];
    V peak = peaks[0], second = all(-INF<T>);
    for (int x = 1; x < places; ++x) {
      second = larger<T>(second, smaller<T>(peak, peaks[x]));
      peak = larger<T>(peak, peaks[x]);
    }
    if (!above<T>(peak, all(floor))) return;
#if defined(__AVX2__)
    if constexpr (std::is_same_v<T, float>)
      if (k <= W) return take_few(peaks, places, step, floor, peak, where);
#endif
    T bound = floor;
    if (floor == -INF<T> && k <= 2 * W) {
      // At least k logits reach the k-th largest of the two largest maxima of each lane: nothing below it is among the k
      // largest.
      T sorted[2 * W];
      store(sorted, peak);
      store(sorted + W, second);
      std::nth_element(sorted, sorted + k - 1, sorted + 2 * W, std::greater<T>());
      bound = sorted[k - 1];
    }
    for (int place = 0; place < places; ++place) {
      const Stretch stretch = where(place);
      for (uint32_t found = reach(peaks[place], floor, bound); found; found &= found - 1) {
        const int64_t lane = __builtin_ctz(found);
        for (uint64_t large = reach(stretch, lane, step, bound); large; large &= large - 1) {
          const int64_t j = lane + __builtin_ctzll(large) * step;
          offer(stretch.logits[j], int32_t(stretch.key + j));
        }
      }
      bound = std::max(bound, values[k - 1]);
    }
  }

 private:
  // One bit for each lane that is above the floor and not below the bound.
  static ATTLAS_INLINE uint32_t reach(V x, T floor, T bound) { return above<T>(x, all(floor)) & ~above<T>(all(bound), x); }

  // One bit for each logit of a lane that is not below the bound. There is no branch: which one is large cannot be foreseen.
  static ATTLAS_INLINE uint64_t reach(const Stretch& stretch, int64_t lane, int step, T bound) {
    const T* logits = stretch.logits + lane;
    const int64_t size = stretch.size - lane;
    uint64_t found = 0;
    int64_t x = 0;
    for (; (x + W - 1) * step < size; x += W) {
      V some;
      for (int y = 0; y < W; ++y) some[y] = logits[(x + y) * step];
      found |= uint64_t(~above<T>(all(bound), some) & ((1u << W) - 1)) << x;
    }
    for (; x * step < size; ++x) found |= uint64_t(logits[x * step] >= bound) << x;
    return found;
  }

  // Puts a logit where it belongs among the k largest, unless it is smaller; of equal logits the smaller key comes first.
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
  // A vector of logits and one of their keys.
  struct Ranked {
    __m512 values;
    __m512i keys;

    // Whether each lane stands before that of another: it is larger, or as large and its key comes first.
    static ATTLAS_INLINE __mmask16 before(const Ranked& a, const Ranked& b) {
      const __mmask16 same = _mm512_cmp_ps_mask(a.values, b.values, _CMP_EQ_OQ);
      return _mm512_cmp_ps_mask(a.values, b.values, _CMP_GT_OQ) | _mm512_mask_cmplt_epi32_mask(same, a.keys, b.keys);
    }
    ATTLAS_INLINE Ranked moved(__m512i lanes) const {
      return {_mm512_permutexvar_ps(lanes, values), _mm512_permutexvar_epi32(lanes, keys)};
    }
    ATTLAS_INLINE void take(__mmask16 where, const Ranked& other) {
      values = _mm512_mask_mov_ps(values, where, other.values);
      keys = _mm512_mask_mov_epi32(keys, where, other.keys);
    }
  };
  static ATTLAS_INLINE __m512i numbered() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

  // One step of a bitonic sort: each lane and the one `apart` from it, of which those in `later` keep what stands behind.
  static ATTLAS_INLINE void compare(Ranked& x, int apart, __mmask16 later) {
    const Ranked other = x.moved(_mm512_xor_si512(numbered(), _mm512_set1_epi32(apart)));
    x.take(Ranked::before(other, x) ^ later, other);
  }
  static ATTLAS_INLINE void compare(__m512& x, int apart, __mmask16 later) {
    const __m512 other = _mm512_permutexvar_ps(_mm512_xor_si512(numbered(), _mm512_set1_epi32(apart)), x);
    x = _mm512_mask_mov_ps(_mm512_max_ps(x, other), later, _mm512_min_ps(x, other));
  }
  // Merges a bitonic vector, as one whose first half descends and whose second ascends, into descending order.
  template <class X>
  static ATTLAS_INLINE void merge(X& x) {
    compare(x, 8, 0xff00), compare(x, 4, 0xf0f0), compare(x, 2, 0xcccc), compare(x, 1, 0xaaaa);
  }
  template <class X>
  static ATTLAS_INLINE void sort(X& x) {
    compare(x, 1, 0x6666);
    compare(x, 2, 0x3c3c), compare(x, 1, 0x5a5a);
    compare(x, 4, 0x0ff0), compare(x, 2, 0x33cc), compare(x, 1, 0x55aa);
    merge(x);
  }

  // Where k is at most W, the k largest stay sorted in one register. There is no branch for a logit: which one is large cannot
  // be foreseen.
  template <class Where>
  void take_few(const V* peaks, int places, int step, float floor, V peak, Where where) const {
    constexpr int MOST = 16, DEPTH = 8;  // places, and logits that a lane has in each
    const bool empty = values[0] == -INF<float>;  // fewer than k may have been found so far, or none
    float bound = floor;
    if (floor == -INF<float>) {
      __m512 sorted = (__m512)peak;
      sort(sorted);
      alignas(64) float lanes[W];
      _mm512_store_ps(lanes, sorted);
      bound = lanes[k - 1];
    }
    // Lanes that reach the bound.
    alignas(64) int32_t reached[MOST * W + W];
    int lanes = 0;
    for (int place = 0; place < places; ++place) {
      const __mmask16 found = __mmask16(reach(peaks[place], floor, bound));
      const __m512i names = _mm512_add_epi32(numbered(), _mm512_set1_epi32(place * W));
      _mm512_storeu_si512(reached + lanes, _mm512_maskz_compress_epi32(found, names));
      lanes += __builtin_popcount(found);
    }
    // Their logits that reach it.
    alignas(64) float large[MOST * W * DEPTH + W];
    alignas(64) int32_t large_keys[MOST * W * DEPTH + W];
    int count = 0;
    const __m256i steps = _mm256_mullo_epi32(_mm512_castsi512_si256(numbered()), _mm256_set1_epi32(step));
    for (int x = 0; x < lanes; ++x) {
      const Stretch stretch = where(reached[x] / W);
      const int lane = reached[x] % W;
      const __mmask8 there = _mm256_cmplt_epi32_mask(steps, _mm256_set1_epi32(int(stretch.size) - lane));
      const __m256 own = _mm256_mmask_i32gather_ps(_mm256_set1_ps(-INF<float>), there, steps, stretch.logits + lane, 4);
      const __mmask8 found = _mm256_cmp_ps_mask(own, _mm256_set1_ps(bound), _CMP_GE_OQ) &
                             _mm256_cmp_ps_mask(own, _mm256_set1_ps(floor), _CMP_GT_OQ);
      _mm256_storeu_ps(large + count, _mm256_maskz_compress_ps(found, own));
      _mm256_storeu_si256((__m256i*)(large_keys + count),
                          _mm256_maskz_compress_epi32(found, _mm256_add_epi32(steps, _mm256_set1_epi32(int(stretch.key) + lane))));
      count += __builtin_popcount(found);
    }
    const __mmask16 used = __mmask16((1u << k) - 1);
    auto read = [](__mmask16 there, const float* from, const int32_t* from_keys) {
      return Ranked{_mm512_mask_loadu_ps(_mm512_set1_ps(-INF<float>), there, from),
                    _mm512_mask_loadu_epi32(_mm512_set1_epi32(-1), there, from_keys)};
    };
    Ranked best = read(used, values, keys);
    for (int x = 0; x < count; x += W) {
      const __mmask16 there = count - x >= W ? 0xffff : __mmask16((1u << (count - x)) - 1);
      Ranked more = read(there, large + x, large_keys + x);
      sort(more);
      if (x == 0 && empty) {
        best = more;
        continue;
      }
      more = more.moved(_mm512_sub_epi32(_mm512_set1_epi32(15), numbered()));
      best.take(Ranked::before(more, best), more);
      merge(best);
    }
    _mm512_mask_storeu_ps(values, used, best.values);
    _mm512_mask_storeu_epi32(keys, used, best.keys);
  }
#elif defined(__AVX2__)
  static ATTLAS_INLINE __m256 moved(__m256 x) { return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6)); }

  // Puts a logit in its place among those in descending order, without a branch; the last of them goes.
  static ATTLAS_INLINE void insert(__m256& best, __m256& best_keys, float logit, int32_t its_key) {
    const __m256 x = _mm256_set1_ps(logit), key = _mm256_castsi256_ps(_mm256_set1_epi32(its_key));
    const __m256i later = _mm256_cmpgt_epi32(_mm256_castps_si256(key), _mm256_castps_si256(best_keys));
    const __m256 same = _mm256_and_ps(_mm256_cmp_ps(best, x, _CMP_EQ_OQ), _mm256_castsi256_ps(later));
    const __m256 stays = _mm256_or_ps(_mm256_cmp_ps(best, x, _CMP_GT_OQ), same);
    const __m256 first = _mm256_castsi256_ps(_mm256_setr_epi32(-1, 0, 0, 0, 0, 0, 0, 0));
    const __m256 after_one_that_stays = _mm256_or_ps(moved(stays), first);
    best = _mm256_blendv_ps(_mm256_blendv_ps(moved(best), x, after_one_that_stays), best, stays);
    best_keys = _mm256_blendv_ps(_mm256_blendv_ps(moved(best_keys), key, after_one_that_stays), best_keys, stays);
  }

  // Where k is at most W, the k largest stay sorted in one register.
  template <class Where>
  void take_few(const V* peaks, int places, int step, float floor, V peak, Where where) const {
    constexpr int GROUP = 64 / W;  // places whose lanes have a bit each in one number
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), last = _mm256_set1_epi32(k - 1);
    const __m256i used = _mm256_cmpgt_epi32(_mm256_set1_epi32(k), lanes);
    __m256 best = _mm256_maskload_ps(values, used), best_keys = _mm256_maskload_ps((const float*)keys, used);
    // At least k logits reach the smallest of the lanes' largest.
    float bound = std::max(floor, -most<float>(-peak));
    for (int group = 0; group < places; group += GROUP) {
      uint64_t found = 0;
      for (int place = group; place < std::min(places, group + GROUP); ++place)
        found |= uint64_t(reach(peaks[place], floor, bound)) << ((place - group) * W);
      for (; found; found &= found - 1) {
        const int at = __builtin_ctzll(found), lane = at % W;
        const Stretch stretch = where(group + at / W);
        for (uint64_t large = reach(stretch, lane, step, bound); large; large &= large - 1) {
          const int64_t j = lane + __builtin_ctzll(large) * step;
          insert(best, best_keys, stretch.logits[j], int32_t(stretch.key + j));
        }
        bound = std::max(bound, _mm256_cvtss_f32(_mm256_permutevar8x32_ps(best, last)));
      }
    }
    _mm256_maskstore_ps(values, used, best);
    _mm256_maskstore_ps((float*)keys, used, best_keys);
  }
#endif
};

// The k largest of each row of a task.
template <class T>
class LargestOfRows {
 public:
  LargestOfRows(int64_t rows, int k) : k_(k), values_(size_t(rows * k)), keys_(size_t(rows * k)) {}

  void clear() {
    std::fill(values_.begin(), values_.end(), -INF<T>);
    std::fill(keys_.begin(), keys_.end(), -1);
  }
  Largest<T> row(int64_t row) { return {values_.data() + row * k_, keys_.data() + row * k_, k_}; }

  // Writes the weights of a row, whose logits are still without the scale, and their keys to row `to` of the results.
  void store(const attlas::AttentionParams& p, int64_t row, int64_t to, T scale, double lse) const {
    for (int64_t x = 0; p.top_keys && x < k_; ++x) {
      const double logit = double(values_[size_t(row * k_ + x)]) * double(scale);
      static_cast<T*>(p.top_values)[to * k_ + x] = logit == -INF<double> ? T(0) : T(std::exp(logit - lse));
      p.top_keys[to * k_ + x] = keys_[size_t(row * k_ + x)];
    }
  }

 private:
  const int k_;
  std::vector<T> values_;
  std::vector<int32_t> keys_;
};

}  // namespace ATTLAS_ISA
