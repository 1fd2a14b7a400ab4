// The k largest logits of a row, in descending order; of equal logits those of the first keys.
#pragma once

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "simd.h"

namespace ATTLAS_ISA {

template <class T>
struct KLargest {
  using V = Vec<T>;
  static constexpr int W = WIDTH<T>;
  T* values;
  int32_t* keys;
  int k;

  // Logits of consecutive keys of the row, from key `first_key` on.
  struct Segment {
    const T* logits;
    int64_t first_key, size;
  };

  // Adds the logits of some segments, which segment_at(0) to segment_at(segments - 1) return. The keys of a call come
  // after those of earlier calls. Lane l of a segment has its logits l, l + step, l + 2 step and so on, and
  // lane_maxima[i] the largest logit of each lane of segment i: only lanes whose largest may be among the k largest are
  // read.
  template <class At>
  void add(const V* lane_maxima, int segments, int step, At segment_at) const {
    // A logit no larger than the smallest of the k so far does not count: its key is later.
    const T floor = values[k - 1];
    V peak = lane_maxima[0], second = all(-INF<T>);
    for (int x = 1; x < segments; ++x) {
      second = larger<T>(second, smaller<T>(peak, lane_maxima[x]));
      peak = larger<T>(peak, lane_maxima[x]);
    }
    if (!above<T>(peak, all(floor))) return;
#if defined(__AVX2__)
    if constexpr (std::is_same_v<T, float>)
      if (k <= W) return add_in_register(lane_maxima, segments, step, floor, peak, segment_at);
#endif
    T bound = floor;
    if (floor == -INF<T> && k <= 2 * W) {
      // Take the two largest maxima of each lane: at least k logits reach the k-th largest of these numbers, so none
      // below it is among the k largest.
      T sorted[2 * W];
      store(sorted, peak);
      store(sorted + W, second);
      std::nth_element(sorted, sorted + k - 1, sorted + 2 * W, std::greater<T>());
      bound = sorted[k - 1];
    }
    for (int index = 0; index < segments; ++index) {
      const Segment segment = segment_at(index);
      for (uint32_t lanes = candidate_lanes(lane_maxima[index], floor, bound); lanes; lanes &= lanes - 1) {
        const int64_t lane = __builtin_ctz(lanes);
        for (uint64_t large = candidates_of_lane(segment, lane, step, bound); large; large &= large - 1) {
          const int64_t j = lane + __builtin_ctzll(large) * step;
          insert(segment.logits[j], int32_t(segment.first_key + j));
        }
      }
      bound = std::max(bound, values[k - 1]);
    }
  }

  // Inserts a logit into the k largest unless it is smaller than all; of equal logits the smaller key comes first.
  void insert(T x, int32_t key) const {
    if (!(x > -INF<T>) || x < values[k - 1] || (x == values[k - 1] && key > keys[k - 1])) return;
    int rank = k - 1;
    for (; rank > 0 && (values[rank - 1] < x || (values[rank - 1] == x && keys[rank - 1] > key)); --rank) {
      values[rank] = values[rank - 1];
      keys[rank] = keys[rank - 1];
    }
    values[rank] = x;
    keys[rank] = key;
  }

 private:
  // One bit for each lane whose largest logit is above the floor and not below the bound.
  static ATTLAS_INLINE uint32_t candidate_lanes(V x, T floor, T bound) { return above<T>(x, all(floor)) & ~above<T>(all(bound), x); }

  // One bit for each logit of a lane that is not below the bound, without a branch: processors cannot predict which one is.
  static ATTLAS_INLINE uint64_t candidates_of_lane(const Segment& segment, int64_t lane, int step, T bound) {
    const T* logits = segment.logits + lane;
    const int64_t size = segment.size - lane;
    uint64_t candidates = 0;
    int64_t x = 0;
    for (; (x + W - 1) * step < size; x += W) {
      V some;
      for (int y = 0; y < W; ++y) some[y] = logits[(x + y) * step];
      candidates |= uint64_t(~above<T>(all(bound), some) & ((1u << W) - 1)) << x;
    }
    for (; x * step < size; ++x) candidates |= uint64_t(logits[x * step] >= bound) << x;
    return candidates;
  }

#if defined(__AVX512F__)
  // A vector of logits and one of their keys.
  struct Ranked {
    __m512 values;
    __m512i keys;

    // One bit for each lane of a that comes before that of b: it is larger, or as large and its key is smaller.
    static ATTLAS_INLINE __mmask16 before(const Ranked& a, const Ranked& b) {
      const __mmask16 same = _mm512_cmp_ps_mask(a.values, b.values, _CMP_EQ_OQ);
      return _mm512_cmp_ps_mask(a.values, b.values, _CMP_GT_OQ) | _mm512_mask_cmplt_epi32_mask(same, a.keys, b.keys);
    }
    ATTLAS_INLINE Ranked permuted(__m512i lanes) const {
      return {_mm512_permutexvar_ps(lanes, values), _mm512_permutexvar_epi32(lanes, keys)};
    }
    ATTLAS_INLINE void replace(__mmask16 lanes, const Ranked& other) {
      values = _mm512_mask_mov_ps(values, lanes, other.values);
      keys = _mm512_mask_mov_epi32(keys, lanes, other.keys);
    }
  };
  static ATTLAS_INLINE __m512i lane_numbers() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

  // One step of a bitonic sort: compares each lane with the one `apart` from it; the lanes in `later` keep what comes later.
  static ATTLAS_INLINE void compare_exchange(Ranked& x, int apart, __mmask16 later) {
    const Ranked other = x.permuted(_mm512_xor_si512(lane_numbers(), _mm512_set1_epi32(apart)));
    x.replace(Ranked::before(other, x) ^ later, other);
  }
  static ATTLAS_INLINE void compare_exchange(__m512& x, int apart, __mmask16 later) {
    const __m512 other = _mm512_permutexvar_ps(_mm512_xor_si512(lane_numbers(), _mm512_set1_epi32(apart)), x);
    x = _mm512_mask_mov_ps(_mm512_max_ps(x, other), later, _mm512_min_ps(x, other));
  }
  // Sorts a bitonic vector, such as one whose first half descends and whose second half ascends, into descending order.
  template <class X>
  static ATTLAS_INLINE void merge(X& x) {
    compare_exchange(x, 8, 0xff00), compare_exchange(x, 4, 0xf0f0), compare_exchange(x, 2, 0xcccc), compare_exchange(x, 1, 0xaaaa);
  }
  template <class X>
  static ATTLAS_INLINE void sort(X& x) {
    compare_exchange(x, 1, 0x6666);
    compare_exchange(x, 2, 0x3c3c), compare_exchange(x, 1, 0x5a5a);
    compare_exchange(x, 4, 0x0ff0), compare_exchange(x, 2, 0x33cc), compare_exchange(x, 1, 0x55aa);
    merge(x);
  }

  // add() where k is at most W: the k largest stay sorted in one register. No branch depends on a logit, as processors
  // cannot predict which one is large.
  template <class At>
  void add_in_register(const V* lane_maxima, int segments, int step, float floor, V peak, At segment_at) const {
    constexpr int MOST = 16, DEPTH = 8;  // most segments, and most logits of a lane of a segment
    const bool empty = values[0] == -INF<float>;  // no logit was added yet
    float bound = floor;
    if (floor == -INF<float>) {
      __m512 sorted = (__m512)peak;
      sort(sorted);
      alignas(64) float lanes[W];
      _mm512_store_ps(lanes, sorted);
      bound = lanes[k - 1];
    }
    // Numbers of the lanes that reach the bound; a segment has W lanes.
    alignas(64) int32_t reached[MOST * W + W];
    int reached_count = 0;
    for (int index = 0; index < segments; ++index) {
      const __mmask16 candidates = __mmask16(candidate_lanes(lane_maxima[index], floor, bound));
      const __m512i numbers = _mm512_add_epi32(lane_numbers(), _mm512_set1_epi32(index * W));
      _mm512_storeu_si512(reached + reached_count, _mm512_maskz_compress_epi32(candidates, numbers));
      reached_count += __builtin_popcount(candidates);
    }
    // The logits of these lanes that reach the bound.
    alignas(64) float large[MOST * W * DEPTH + W];
    alignas(64) int32_t large_keys[MOST * W * DEPTH + W];
    int count = 0;
    const __m256i steps = _mm256_mullo_epi32(_mm512_castsi512_si256(lane_numbers()), _mm256_set1_epi32(step));
    for (int x = 0; x < reached_count; ++x) {
      const Segment segment = segment_at(reached[x] / W);
      const int lane = reached[x] % W;
      const __mmask8 valid = _mm256_cmplt_epi32_mask(steps, _mm256_set1_epi32(int(segment.size) - lane));
      const __m256 logits = _mm256_mmask_i32gather_ps(_mm256_set1_ps(-INF<float>), valid, steps, segment.logits + lane, 4);
      const __mmask8 candidates = _mm256_cmp_ps_mask(logits, _mm256_set1_ps(bound), _CMP_GE_OQ) &
                                  _mm256_cmp_ps_mask(logits, _mm256_set1_ps(floor), _CMP_GT_OQ);
      _mm256_storeu_ps(large + count, _mm256_maskz_compress_ps(candidates, logits));
      _mm256_storeu_si256(
          (__m256i*)(large_keys + count),
          _mm256_maskz_compress_epi32(candidates, _mm256_add_epi32(steps, _mm256_set1_epi32(int(segment.first_key) + lane))));
      count += __builtin_popcount(candidates);
    }
    const __mmask16 first_k = __mmask16((1u << k) - 1);
    auto read = [](__mmask16 valid, const float* from, const int32_t* from_keys) {
      return Ranked{_mm512_mask_loadu_ps(_mm512_set1_ps(-INF<float>), valid, from),
                    _mm512_mask_loadu_epi32(_mm512_set1_epi32(-1), valid, from_keys)};
    };
    Ranked best = read(first_k, values, keys);
    for (int x = 0; x < count; x += W) {
      const __mmask16 valid = count - x >= W ? 0xffff : __mmask16((1u << (count - x)) - 1);
      Ranked next = read(valid, large + x, large_keys + x);
      sort(next);
      if (x == 0 && empty) {
        best = next;
        continue;
      }
      next = next.permuted(_mm512_sub_epi32(_mm512_set1_epi32(15), lane_numbers()));  // ascending
      best.replace(Ranked::before(next, best), next);
      merge(best);
    }
    _mm512_mask_storeu_ps(values, first_k, best.values);
    _mm512_mask_storeu_epi32(keys, first_k, best.keys);
  }
#elif defined(__AVX2__)
  // Each lane of x in the place of the next one.
  static ATTLAS_INLINE __m256 shifted(__m256 x) { return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6)); }

  // Inserts a logit into those in descending order, without a branch; the last one drops out.
  static ATTLAS_INLINE void insert_in_register(__m256& best, __m256& best_keys, float logit, int32_t logit_key) {
    const __m256 x = _mm256_set1_ps(logit), key = _mm256_castsi256_ps(_mm256_set1_epi32(logit_key));
    const __m256i later = _mm256_cmpgt_epi32(_mm256_castps_si256(key), _mm256_castps_si256(best_keys));
    const __m256 same = _mm256_and_ps(_mm256_cmp_ps(best, x, _CMP_EQ_OQ), _mm256_castsi256_ps(later));
    const __m256 stays = _mm256_or_ps(_mm256_cmp_ps(best, x, _CMP_GT_OQ), same);
    const __m256 first = _mm256_castsi256_ps(_mm256_setr_epi32(-1, 0, 0, 0, 0, 0, 0, 0));
    const __m256 after_one_that_stays = _mm256_or_ps(shifted(stays), first);
    best = _mm256_blendv_ps(_mm256_blendv_ps(shifted(best), x, after_one_that_stays), best, stays);
    best_keys = _mm256_blendv_ps(_mm256_blendv_ps(shifted(best_keys), key, after_one_that_stays), best_keys, stays);
  }

  // add() where k is at most W: the k largest stay sorted in one register.
  template <class At>
  void add_in_register(const V* lane_maxima, int segments, int step, float floor, V peak, At segment_at) const {
    constexpr int GROUP = 64 / W;  // segments of which one number holds a bit for each lane
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), last = _mm256_set1_epi32(k - 1);
    const __m256i first_k = _mm256_cmpgt_epi32(_mm256_set1_epi32(k), lanes);
    __m256 best = _mm256_maskload_ps(values, first_k), best_keys = _mm256_maskload_ps((const float*)keys, first_k);
    // Every lane has a logit that reaches the smallest of the lanes' maxima: these are k or more.
    float bound = std::max(floor, -most<float>(-peak));
    for (int group = 0; group < segments; group += GROUP) {
      uint64_t candidates = 0;
      for (int index = group; index < std::min(segments, group + GROUP); ++index)
        candidates |= uint64_t(candidate_lanes(lane_maxima[index], floor, bound)) << ((index - group) * W);
      for (; candidates; candidates &= candidates - 1) {
        const int bit = __builtin_ctzll(candidates), lane = bit % W;
        const Segment segment = segment_at(group + bit / W);
        for (uint64_t large = candidates_of_lane(segment, lane, step, bound); large; large &= large - 1) {
          const int64_t j = lane + __builtin_ctzll(large) * step;
          insert_in_register(best, best_keys, segment.logits[j], int32_t(segment.first_key + j));
        }
        bound = std::max(bound, _mm256_cvtss_f32(_mm256_permutevar8x32_ps(best, last)));
      }
    }
    _mm256_maskstore_ps(values, first_k, best);
    _mm256_maskstore_ps((float*)keys, first_k, best_keys);
  }
#endif
};

// The k largest logits of each row of a task.
template <class T>
class KLargestOfRows {
 public:
  KLargestOfRows(int64_t rows, int k) : k_(k), values_(size_t(rows * k)), keys_(size_t(rows * k)) {}

  void clear() {
    std::fill(values_.begin(), values_.end(), -INF<T>);
    std::fill(keys_.begin(), keys_.end(), -1);
  }
  KLargest<T> row(int64_t row) { return {values_.data() + row * k_, keys_.data() + row * k_, k_}; }

  // Adds the k largest logits of row `from`, whose keys are later, to those of row `to`.
  void merge(int64_t to, int64_t from) {
    const std::vector<T> values(values_.begin() + to * k_, values_.begin() + (to + 1) * k_);
    const std::vector<int32_t> keys(keys_.begin() + to * k_, keys_.begin() + (to + 1) * k_);
    int64_t left = 0, right = 0;
    for (int64_t x = 0; x < k_; ++x) {
      const bool first = values[size_t(left)] >= values_[size_t(from * k_ + right)];
      values_[size_t(to * k_ + x)] = first ? values[size_t(left)] : values_[size_t(from * k_ + right)];
      keys_[size_t(to * k_ + x)] = first ? keys[size_t(left)] : keys_[size_t(from * k_ + right)];
      ++(first ? left : right);
    }
  }

  // Writes the k largest weights of a row and their keys to row `to` of the results; logits are still without the scale.
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
