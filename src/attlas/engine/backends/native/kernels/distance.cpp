// Kernels of the distance between query and key for tokens of few coordinates, by differences of coordinates or by products.
#include "abi_distance.h"
#include "pairs.h"
#include "products.h"

namespace ATTLAS_ISA {

using namespace attlas;

template <class T>
ATTLAS_INLINE Vec<T> absolute(Vec<T> x) {
  return (Vec<T>)((Ints<T>)x & std::numeric_limits<typename Kind<T>::whole>::max());
}

#if defined(__AVX512F__)
ATTLAS_INLINE Vec<float> root(Vec<float> x) { return (Vec<float>)_mm512_maskz_sqrt_ps(__mmask16(-1), (__m512)x); }
ATTLAS_INLINE Vec<double> root(Vec<double> x) { return (Vec<double>)_mm512_maskz_sqrt_pd(__mmask8(-1), (__m512d)x); }
#else
template <class V>
ATTLAS_INLINE V root(V x) {
  for (size_t i = 0; i < sizeof(V) / sizeof(x[0]); ++i) x[i] = std::sqrt(x[i]);
  return x;
}
#endif

// A score with tokens packed for differences of coordinates: `size` coordinates each, those that are missing are 0.
template <class T>
struct DifferenceScore : Score<T> {
  static constexpr int W = WIDTH<T>;
  const PairwiseParams& p;
  const int size;
  T scale[16] = {};
  int64_t length;  // numbers of the packed columns of one head
  Aligned<T> packed;

  DifferenceScore(const Distance& x, int size_) : p(x.pairs), size(size_), length(padded<T>(x.pairs.n) * size_) {
    this->never_positive = true;
    this->row_numbers = size_t(ROWS * size);
    for (int c = 0; c < int(p.d); ++c) scale[c] = static_cast<const T*>(x.scale)[c];
    packed = Aligned<T>(size_t(p.batch * p.token_heads * length));
    share(size_t(p.batch * p.token_heads), p.threads, [&](size_t item, int) {
      T* to = packed.data + int64_t(item) * length;
      std::fill(to, to + length, T(0));
      for (int64_t j = 0; j < p.n; ++j) {
        const T* x = token<T>(p.columns, int64_t(item) / p.token_heads, int64_t(item) % p.token_heads, j);
        T* chunk = to + j / COLS<T> * COLS<T> * size + j % COLS<T>;
        for (int c = 0; c < int(p.d); ++c) chunk[c * COLS<T>] = x[c];
      }
    });
  }

  // The packed columns of a head from column j0 on.
  const T* columns(int64_t b, int64_t h, int64_t j0) const {
    return packed.data + (b * p.token_heads + h / (p.heads / p.token_heads)) * length + j0 / COLS<T> * COLS<T> * size +
           j0 % COLS<T>;
  }

  void prepare_rows(int64_t b, int64_t h, int64_t i0, int rows, Scratch<T>& s) const override {
    for (int r = 0; r < ROWS; ++r) {
      const T* x = token<T>(p.rows, b, h, i0 + std::min(r, rows - 1));
      for (int c = 0; c < size; ++c) s.rows[size_t(r * size + c)] = c < int(p.d) ? x[c] : T(0);
    }
  }

  // Adds to `first` and `second`, [row][coordinate], the sums over the columns of slope * difference and of slope * its
  // square; for LAPLACIAN, of slope * its sign and of slope * its absolute value.
  template <bool LAPLACIAN>
  void gradients(int64_t b, int64_t h, int64_t j0, int vectors, const T* slope, Vec<T>* first, Vec<T>* second,
                 Scratch<T>& s) const {
    const T* k = columns(b, h, j0);
    for (int r = 0; r < ROWS; r += 4) {
      for (int c = 0; c < int(p.d); ++c) {
        Vec<T> first_sums[4] = {}, second_sums[4] = {};
        for (int x = 0; x < vectors; ++x) {
          const Vec<T> key = load(k + c * COLS<T> + x * W);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            const Vec<T> difference = all(s.rows[size_t((r + i) * size + c)]) - key;
            const Vec<T> slopes = load(slope + (r + i) * COLS<T> + x * W);
            if constexpr (LAPLACIAN) {
              const Vec<T> zero{}, one = all(T(1));
              first_sums[i] += slopes * (difference > zero ? one : difference < zero ? -one : zero);
              if (second) second_sums[i] += slopes * absolute<T>(difference);
            } else {
              const Vec<T> product = slopes * difference;
              first_sums[i] += product;
              if (second) second_sums[i] += product * difference;
            }
          }
        }
        for (int i = 0; i < 4; ++i) {
          first[(r + i) * size + c] += first_sums[i];
          if (second) second[(r + i) * size + c] += second_sums[i];
        }
      }
    }
  }
};

constexpr int BOUNDED = 100;  // in the place of a Kernel: one of those that are 0 from a distance of 1 on; `shape` says which

// Distances of R rows from one vector of columns: sums of squared, or for LAPLACE of absolute differences. SCALED: each
// difference is scaled by itself. Without, the caller applies one factor to the whole distance, one operation fewer for
// each coordinate. D: the number of coordinates; 0 where it is known at run time only, which is a little slower and
// faster to compile.
template <class T, int KERNEL, bool SCALED, int D, int R>
ATTLAS_INLINE void distances(const T* q, int size, const T* k, const T* scale, Vec<T> (&total)[R]) {
  const int count = D ? D : size;
  const auto difference_in = [&](int c, int r, Vec<T> key) {
    Vec<T> difference = all(q[r * count + c]) - key;
    if (SCALED) difference *= all(scale[c]);
    return KERNEL == LAPLACE ? absolute<T>(difference) : difference;
  };
  const Vec<T> first = load(k);
  for (int r = 0; r < R; ++r) {
    const Vec<T> x = difference_in(0, r, first);
    total[r] = KERNEL == LAPLACE ? x : x * x;
  }
#pragma GCC unroll 8
  for (int c = 1; c < count; ++c) {
    const Vec<T> key = load(k + c * COLS<T>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec<T> x = difference_in(c, r, key);
      total[r] = KERNEL == LAPLACE ? total[r] + x : total[r] + x * x;
    }
  }
}

template <class T, int KERNEL, bool SCALED, int D>
struct DistanceKernel : DifferenceScore<T> {
  using DifferenceScore<T>::W;
  using DifferenceScore<T>::scale;
  T factor;             // what a distance is multiplied by to become a logit, in powers of 2
  const int32_t shape;  // which of the bounded kernels, where KERNEL is BOUNDED

  explicit DistanceKernel(const Distance& x) : DifferenceScore<T>(x, int(x.pairs.d)), shape(x.kernel) {
    this->gives_weights = KERNEL == BOUNDED;
    const double shared_scale = SCALED ? 1.0 : double(scale[0]);
    factor = T(KERNEL == LAPLACE ? -LOG2E * shared_scale : -0.5 * LOG2E * shared_scale * shared_scale);
  }

  // The logit of a distance, in powers of 2, less the shift of its row; the weight where KERNEL is BOUNDED.
  static ATTLAS_INLINE Vec<T> logit_or_weight(Vec<T> distance, T factor, int32_t shape, T shift = 0) {
    const Vec<T> one = all(T(1)), zero{};
    if (KERNEL != BOUNDED) return distance * all(factor) - all(shift);
    if (shape == BOXCAR) return distance < one ? one : zero;
    return distance < one ? one - (shape == EPANECHNIKOV ? distance : root(distance)) : zero;
  }

  using Score<T>::tile;
  void tile(int64_t b, int64_t h, int64_t j0, int vectors, T* to, int64_t stride, int rows, Scratch<T>& s) const override {
    const T* k = this->columns(b, h, j0);
    const int size = this->size;
    for (int r = 0; r < rows; r += 4) {
      for (int x = 0; x < vectors; ++x) {
        Vec<T> distance[4];
        distances<T, KERNEL, SCALED, D>(s.rows.data + r * size, size, k + x * W, scale, distance);
        for (int i = 0; i < 4; ++i) store(to + (r + i) * stride + x * W, logit_or_weight(distance[i], factor, shape));
      }
    }
  }

  // Logits are not compared with the shift of their row beforehand, so that some may be above it. A row is summed again
  // where its sum shows that one was far above, or that all of its first tile were far below 0. Values of one coordinate
  // are pooled on the way, longer ones afterwards.
  bool add_whole_tile(int64_t b, int64_t h, int64_t j0, const T* values, const PackedValues<T>& layout, BlockSums<T>& sums,
                      Scratch<T>& s) const override {
    const T *k = this->columns(b, h, j0), *single_values = layout.e == 1 ? values + j0 : nullptr;
    const int size = this->size;
    const T logit_factor = factor;
    T* weights = layout.e > 1 ? s.tile.data : nullptr;
    for (int r = 0; r < ROWS; r += 4) {
      T q[4 * (D ? D : 16)], shift[4];  // copies that no store below can change
      for (int i = 0; i < 4 * size; ++i) q[i] = s.rows[size_t(r * size + i)];
      for (int i = 0; i < 4; ++i) shift[i] = finite_or_zero(sums.shift[r + i]);
      Vec<T> total[4] = {}, pooled[4] = {};
      for (int x = 0; x < COLS<T> / W; ++x) {
        Vec<T> w[4];  // distances, then weights
        distances<T, KERNEL, SCALED, D>(q, size, k + x * W, scale, w);
        const Vec<T> v = single_values ? load(single_values + x * W) : Vec<T>{};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          w[i] = logit_or_weight(w[i], logit_factor, shape, shift[i]);
          if (KERNEL != BOUNDED) w[i] = exp2_(clamp_exponent<T>(w[i]));
          total[i] += w[i];
          pooled[i] += w[i] * v;
        }
        if (weights)
          for (int i = 0; i < 4; ++i) store(weights + (r + i) * COLS<T> + x * W, w[i]);
      }
      for (int i = 0; i < 4; ++i) {
        if (KERNEL != BOUNDED && !accept_shift(sums.shift[r + i], total[i]))
          sum_with_max_shift(r + i, k, single_values, layout, sums, s, total[i], pooled[i]);
        sums.total[r + i] += total[i];
        s.pooled_lanes[size_t(r + i) * FEW_VALUES] += pooled[i];
      }
    }
    if (weights) pool(weights, values, padded<T>(this->p.n), j0, COLS<T> / W, layout, s);
    return true;
  }

  // Whether a sum with this shift, 0 where there was none yet, has all its digits; if so, the shift is kept.
  static bool accept_shift(T& shift, Vec<T> total) {
    if (above<T>(all(T(1 << 30)), total) != (1u << W) - 1) return false;  // NaN is not below
    if (shift == -INF<T> && !(sum<T>(total) > T(0x1p-60))) return false;
    shift = finite_or_zero(shift);
    return true;
  }

  // Sums one row of a tile again, with a shift that is its largest logit.
  __attribute__((noinline)) void sum_with_max_shift(int r, const T* k, const T* single_values, const PackedValues<T>& layout,
                                                    BlockSums<T>& sums, Scratch<T>& s, Vec<T>& total, Vec<T>& pooled) const {
    T* row = s.tile.data + r * COLS<T>;
    Vec<T> max_logit = all(-INF<T>);
    for (int x = 0; x < COLS<T> / W; ++x) {
      Vec<T> distance[1];
      distances<T, KERNEL, SCALED, 0>(s.rows.data + r * this->size, this->size, k + x * W, scale, distance);
      const Vec<T> logit = logit_or_weight(distance[0], factor, shape);
      store(row + x * W, logit);
      max_logit = larger<T>(max_logit, logit);
    }
    rescale(*this, sums, r, most<T>(max_logit), layout, s);
    const Vec<T> shift = all(finite_or_zero(sums.shift[r]));
    total = pooled = Vec<T>{};
    for (int x = 0; x < COLS<T> / W; ++x) {
      const Vec<T> w = exp2_(load(row + x * W) - shift);
      store(row + x * W, w);
      total += w;
      if (single_values) pooled += w * load(single_values + x * W);
    }
  }
};

// The Gaussian kernel by products of coordinates where that is exact enough, else by differences.
struct GaussianProducts final : DistanceKernel<double, GAUSSIAN, true, 0> {
  using Differences = DistanceKernel<double, GAUSSIAN, true, 0>;
  const Products products;
  const size_t offset;  // of what Products keeps of the rows, in Scratch::rows

  explicit GaussianProducts(const Distance& x)
      : Differences(x), products(x.pairs, static_cast<const double*>(x.scale)), offset(this->row_numbers) {
    this->row_numbers += Products::ROW_NUMBERS;
  }

  void prepare_rows(int64_t b, int64_t h, int64_t i0, int rows, Scratch<double>& s) const override {
    Differences::prepare_rows(b, h, i0, rows, s);
    products.prepare_rows(b, h, i0, rows, s.rows.data + offset);
  }

  bool add_whole_tile(int64_t b, int64_t h, int64_t j0, const double* values, const PackedValues<double>& layout,
                      BlockSums<double>& sums, Scratch<double>& s) const override {
    const double* rows = s.rows.data + offset;
    if (!products.exact_enough(rows, b, h, j0)) return Differences::add_whole_tile(b, h, j0, values, layout, sums, s);
    Vec<double> tile_sums[ROWS], tile_pooled[ROWS];
    double* weights = layout.e > 1 ? s.tile.data : nullptr;
    products.sum(rows, b, h, j0, layout.e == 1 ? values + j0 : nullptr, tile_sums, tile_pooled, weights);
    const double* power = products.powers(rows);
    for (int r = 0; r < ROWS; ++r) {
      if (sums.shift[r] == -INF<double>) sums.shift[r] = power[r];
      if (sums.shift[r] < power[r] - 400) rescale<double>(*this, sums, r, power[r], layout, s);
      if (sums.shift[r] != power[r]) {
        const Vec<double> change = all(std::exp2(power[r] - sums.shift[r]));
        tile_sums[r] *= change;
        tile_pooled[r] *= change;
        for (int x = 0; weights && x < COLS<double>; x += W)
          store(weights + r * COLS<double> + x, load(weights + r * COLS<double> + x) * change);
      }
      sums.total[r] += tile_sums[r];
      s.pooled_lanes[size_t(r) * FEW_VALUES] += tile_pooled[r];
    }
    if (weights) pool(weights, values, padded<double>(p.n), j0, COLS<double> / W, layout, s);
    return true;
  }
};

// Gradients of a distance kernel: sums over the columns for each row, and the pooled values where these are wanted too.
template <class T>
struct Backward {
  static constexpr int W = WIDTH<T>;
  const DistanceBackward& x;
  const PairwiseParams& p;
  const DifferenceScore<T>& kernel;
  const PackedValues<T> pooled, right;  // the values as out pools them, and as slopes_of() reads them
  const Aligned<T> shifts;              // of the columns, where the log-sum-exp belongs to these, and their padded deltas below
  const int64_t padded_n;
  Aligned<T> deltas;

  Backward(const DistanceBackward& given, const DifferenceScore<T>& score)
      : x(given),
        p(given.of.pairs),
        kernel(score),
        pooled(p, false),
        right(p, true),
        shifts(column_shifts<T>(p, false)),
        padded_n(padded<T>(p.n)) {
    if (!p.by_column) return;
    deltas = Aligned<T>(size_t(p.batch * p.heads * padded_n));
    const T* given_deltas = static_cast<const T*>(x.slopes.delta);
    for (int64_t i = 0; i < p.batch * p.heads; ++i)
      for (int64_t j = 0; j < padded_n; ++j) deltas[size_t(i * padded_n + j)] = j < p.n ? given_deltas[i * p.n + j] : T(0);
  }

  // One block of rows, from row i0 of a head on.
  void run_block(int64_t b, int64_t h, int64_t i0, Scratch<T>& s, Aligned<Vec<T>>& lanes, SlopeRows<T>& slope_rows) const {
    const int D = kernel.size;
    const int count = int(std::min<int64_t>(ROWS, p.m - i0));
    const int64_t head = b * p.heads + h, row0 = head * p.m + i0;
    Vec<T>*first = lanes.data, *second = x.second ? first + ROWS * D : nullptr;
    for (int i = 0; i < 2 * ROWS * D; ++i) first[i] = Vec<T>{};
    s.clear(pooled);
    slope_rows.read(p, x.slopes, row0, count);
    const PairwiseMaskView<T> mask(p, b, h);
    kernel.prepare_rows(b, h, i0, count, s);
    for (int64_t j0 = 0; j0 < p.n; j0 += COLS<T>) {
      attlas::checkpoint();
      const int columns = int(std::min<int64_t>(COLS<T>, p.n - j0)), vectors = (columns + W - 1) / W;
      const auto cover = mask.cover(i0, count, j0, columns);
      if (cover == PairwiseMaskView<T>::NONE) continue;
      kernel.tile(b, h, j0, vectors, s.tile.data, s);
      if (p.places) add_places(p, b, h, i0, count, j0, columns, s.tile.data, COLS<T>);
      if (cover == PairwiseMaskView<T>::SOME) mask.apply(s.tile.data, i0, count, j0, columns, -INF<T>);
      slopes_of<T>(slope_rows, p.e, right.head(p, b, h) + j0 * p.e,
                   p.by_column ? shifts.data + head * 2 * padded_n + j0 : nullptr, padded_n,
                   p.by_column ? deltas.data + head * padded_n + j0 : nullptr, vectors, s);
      if (x.of.kernel == LAPLACE)
        kernel.template gradients<true>(b, h, j0, vectors, s.slopes.data, first, second, s);
      else
        kernel.template gradients<false>(b, h, j0, vectors, s.slopes.data, first, second, s);
      if (pooled.e) pool(s.tile.data, pooled.head(p, b, h), padded_n, j0, vectors, pooled, s);
    }
    for (int r = 0; r < count; ++r) {
      for (int c = 0; c < int(p.d); ++c) {
        static_cast<T*>(x.first)[(row0 + r) * p.d + c] = sum<T>(first[r * D + c]);
        if (second) static_cast<T*>(x.second)[(row0 + r) * p.d + c] = sum<T>(second[r * D + c]);
      }
      for (int64_t c = 0; c < pooled.e; ++c) static_cast<T*>(p.out)[(row0 + r) * p.e + c] = s.pooled_value(pooled, r, c);
    }
  }

  void run() const {
    const int threads = std::max(1, p.threads);
    const int64_t blocks = (p.m + ROWS - 1) / ROWS;
    std::vector<Scratch<T>> scratch;
    std::vector<Aligned<Vec<T>>> lanes;
    std::vector<SlopeRows<T>> slope_rows;
    for (int t = 0; t < threads; ++t) {
      scratch.emplace_back(pooled.width, kernel.row_numbers);
      lanes.emplace_back(2 * kernel.row_numbers);
      slope_rows.emplace_back(p.e);
    }
    share(size_t(p.batch * p.heads * blocks), threads, [&](size_t item, int thread) {
      const Flush flush;
      const int64_t head = int64_t(item) / blocks;
      const size_t t = size_t(thread);
      run_block(head / p.heads, head % p.heads, int64_t(item) % blocks * ROWS, scratch[t], lanes[t], slope_rows[t]);
    });
  }
};

// Calls run<Score>() with the score of a kernel for the size of the tokens. Each constant size takes time to compile, so
// only the most frequent kernel has them.
template <class T, int KERNEL, bool SCALED, class Run>
int32_t with_score(const Distance& x, Run run) {
  const int64_t d = x.pairs.d;
  if (d > 16) return UNSUPPORTED;
  if constexpr (KERNEL == GAUSSIAN && !SCALED) {
    int32_t status = DONE;
    if (with_constant<6>(d, [&]<int D>() { status = run.template operator()<DistanceKernel<T, KERNEL, SCALED, D>>(); }))
      return status;
  }
  return run.template operator()<DistanceKernel<T, KERNEL, SCALED, 0>>();
}

// Whether all coordinates have the same bandwidth, and its square neither overflows nor underflows.
template <class T>
bool one_scale(const Distance& x) {
  const T* scale = static_cast<const T*>(x.scale);
  for (int64_t c = 1; c < x.pairs.d; ++c)
    if (scale[c] != scale[0]) return false;
  return scale[0] > T(1e-12) && scale[0] < T(1e12);
}

template <class T>
int32_t sums(const Distance& x) {
  if (!places_in_range<T>(x.pairs)) return NOT_FINITE;
  const auto run = [&]<class Kernel>() {
    run_score<T>(x.pairs, Kernel(x));
    return int32_t(DONE);
  };
  if constexpr (std::is_same_v<T, double>)
    if (x.kernel == GAUSSIAN && x.pairs.d <= Products::LARGEST && wants_only_sums(x.pairs))
      return run.template operator()<GaussianProducts>();
  // The choice is the same for the log-sum-exp and for all that uses it: rounding errors that they share cancel.
  if constexpr (std::is_same_v<T, float>)
    if (x.kernel == GAUSSIAN && one_scale<T>(x)) return with_score<T, GAUSSIAN, false>(x, run);
  if (x.kernel == GAUSSIAN) return with_score<T, GAUSSIAN, true>(x, run);
  if (x.kernel == LAPLACE) return with_score<T, LAPLACE, true>(x, run);
  return with_score<T, BOUNDED, true>(x, run);
}

template <class T>
int32_t gradients(const DistanceBackward& x) {
  if (!places_in_range<T>(x.of.pairs)) return NOT_FINITE;
  const auto run = [&]<class Kernel>() {
    const Kernel kernel(x.of);
    Backward<T>(x, kernel).run();
    return int32_t(DONE);
  };
  if (x.of.kernel == GAUSSIAN) return with_score<T, GAUSSIAN, true>(x.of, run);
  if (x.of.kernel == LAPLACE) return with_score<T, LAPLACE, true>(x.of, run);
  return UNSUPPORTED;
}

int32_t run_distance(const Distance& x) {
  return x.pairs.type == FLOAT64 ? sums<double>(x) : sums<float>(x);
}

int32_t run_distance_backward(const DistanceBackward& x) {
  return x.of.pairs.type == FLOAT64 ? gradients<double>(x) : gradients<float>(x);
}

}  // namespace ATTLAS_ISA
