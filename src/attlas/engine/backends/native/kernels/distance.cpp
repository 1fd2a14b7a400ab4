// Kernels of the distance between query and key for tokens of few coordinates: by direct differences, or by products.
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

// Tokens as differences of them are taken: `size` coordinates each, those that are missing 0.
template <class T>
struct Points : Score<T> {
  static constexpr int W = WIDTH<T>;
  const PairwiseParams& p;
  const int size;
  T scale[16] = {};
  int64_t length;  // of the packed columns of one head
  Aligned<T> packed;

  Points(const Distance& x, int size_) : p(x.pairs), size(size_), length(padded<T>(x.pairs.n) * size_) {
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

  const T* columns(int64_t b, int64_t h, int64_t j0) const {
    return packed.data + (b * p.token_heads + h / (p.heads / p.token_heads)) * length + j0 / COLS<T> * COLS<T> * size +
           j0 % COLS<T>;
  }

  void take_rows(int64_t b, int64_t h, int64_t i0, int rows, Scratch<T>& s) const override {
    for (int r = 0; r < ROWS; ++r) {
      const T* x = token<T>(p.rows, b, h, i0 + std::min(r, rows - 1));
      for (int c = 0; c < size; ++c) s.rows[size_t(r * size + c)] = c < int(p.d) ? x[c] : T(0);
    }
  }

  // Sums over the columns of slope * difference, and of slope * its square, for each row and coordinate.
  template <bool LAPLACIAN>
  void gradients(int64_t b, int64_t h, int64_t j0, int vectors, const T* slope, Vec<T>* first, Vec<T>* second,
                 Scratch<T>& s) const {
    const T* k = columns(b, h, j0);
    for (int r = 0; r < ROWS; r += 4) {
      for (int c = 0; c < int(p.d); ++c) {
        Vec<T> ones[4] = {}, twos[4] = {};
        for (int x = 0; x < vectors; ++x) {
          const Vec<T> key = load(k + c * COLS<T> + x * W);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            const Vec<T> gap = all(s.rows[size_t((r + i) * size + c)]) - key;
            const Vec<T> part = load(slope + (r + i) * COLS<T> + x * W);
            if constexpr (LAPLACIAN) {
              const Vec<T> zero{}, one = all(T(1));
              ones[i] += part * (gap > zero ? one : gap < zero ? -one : zero);
              if (second) twos[i] += part * absolute<T>(gap);
            } else {
              const Vec<T> moved = part * gap;
              ones[i] += moved;
              if (second) twos[i] += moved * gap;
            }
          }
        }
        for (int i = 0; i < 4; ++i) {
          first[(r + i) * size + c] += ones[i];
          if (second) second[(r + i) * size + c] += twos[i];
        }
      }
    }
  }
};

constexpr int BOUNDED = 100;  // the kernels that are 0 from a distance of 1 on: which one is asked at run time

// Distances of R rows to one vector of columns: squares summed, or absolute differences. SCALED: differences are scaled
// one by one. Without, one factor serves the whole distance: one operation fewer each. D: how many coordinates; with 0
// the number is asked at run time, which is a little slower and takes less time to compile.
template <class T, int KERNEL, bool SCALED, int D, int R>
ATTLAS_INLINE void measure(const T* q, int size, const T* k, const T* scale, Vec<T> (&total)[R]) {
  const int count = D ? D : size;
  const auto part = [&](int c, int r, Vec<T> key) {
    Vec<T> gap = all(q[r * count + c]) - key;
    if (SCALED) gap *= all(scale[c]);
    return KERNEL == LAPLACE ? absolute<T>(gap) : gap;
  };
  const Vec<T> first = load(k);
  for (int r = 0; r < R; ++r) {
    const Vec<T> x = part(0, r, first);
    total[r] = KERNEL == LAPLACE ? x : x * x;
  }
#pragma GCC unroll 8
  for (int c = 1; c < count; ++c) {
    const Vec<T> key = load(k + c * COLS<T>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec<T> x = part(c, r, key);
      total[r] = KERNEL == LAPLACE ? total[r] + x : total[r] + x * x;
    }
  }
}

template <class T, int KERNEL, bool SCALED, int D>
struct Distances : Points<T> {
  using Points<T>::W;
  using Points<T>::scale;
  T factor;             // of the distance, in powers of 2
  const int32_t shape;  // which of the kernels that end, where this is one

  explicit Distances(const Distance& x) : Points<T>(x, int(x.pairs.d)), shape(x.kernel) {
    this->linear = KERNEL == BOUNDED;
    const double unit = SCALED ? 1.0 : double(scale[0]);
    factor = T(KERNEL == LAPLACE ? -LOG2E * unit : -0.5 * LOG2E * unit * unit);
  }

  // A logit in powers of 2, less what its row is shifted by, or a weight.
  static ATTLAS_INLINE Vec<T> value(Vec<T> distance, T factor, int32_t shape, T shift = 0) {
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
        Vec<T> gap[4];
        measure<T, KERNEL, SCALED, D>(s.rows.data + r * size, size, k + x * W, scale, gap);
        for (int i = 0; i < 4; ++i) store(to + (r + i) * stride + x * W, value(gap[i], factor, shape));
      }
    }
  }

  // No logit is compared with its row's shift first, which may be below some. A sum that tells that one was far above, or
  // that the first of a row are all far below 0, is made again.
  bool fused(int64_t b, int64_t h, int64_t j0, const T* values, const Values<T>& form, Running<T>& run,
             Scratch<T>& s) const override {
    const T *k = this->columns(b, h, j0), *only = form.e == 1 ? values + j0 : nullptr;
    const int size = this->size;
    const T by = factor;
    T* weights = form.e > 1 ? s.tile.data : nullptr;
    for (int r = 0; r < ROWS; r += 4) {
      T q[4 * (D ? D : 16)], shift[4];  // copies that no store below can change
      for (int i = 0; i < 4 * size; ++i) q[i] = s.rows[size_t(r * size + i)];
      for (int i = 0; i < 4; ++i) shift[i] = finite(run.shift[r + i]);
      Vec<T> total[4] = {}, part[4] = {};
      for (int x = 0; x < COLS<T> / W; ++x) {
        Vec<T> w[4];
        measure<T, KERNEL, SCALED, D>(q, size, k + x * W, scale, w);
        const Vec<T> v = only ? load(only + x * W) : Vec<T>{};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          w[i] = value(w[i], by, shape, shift[i]);
          if (KERNEL != BOUNDED) w[i] = exp2_(in_reach<T>(w[i]));
          total[i] += w[i];
          part[i] += w[i] * v;
        }
        if (weights)
          for (int i = 0; i < 4; ++i) store(weights + (r + i) * COLS<T> + x * W, w[i]);
      }
      for (int i = 0; i < 4; ++i) {
        if (KERNEL != BOUNDED && !settled(run.shift[r + i], total[i]))
          again(r + i, k, only, form, run, s, total[i], part[i]);
        run.total[r + i] += total[i];
        s.lanes[size_t(r + i) * FEW_VALUES] += part[i];
      }
    }
    if (weights) pool(weights, values, padded<T>(this->p.n), j0, COLS<T> / W, form, s);
    return true;
  }

  // Whether a sum that was made with this shift, or with 0 where there was none yet, has all its digits; then it stays.
  static bool settled(T& shift, Vec<T> total) {
    if (above<T>(all(T(1 << 30)), total) != (1u << W) - 1) return false;  // NaN is none below
    if (shift == -INF<T> && !(sum<T>(total) > T(0x1p-60))) return false;
    shift = finite(shift);
    return true;
  }

  // The sums of one row of a tile with a shift that is its largest logit.
  __attribute__((noinline)) void again(int r, const T* k, const T* only, const Values<T>& form, Running<T>& run,
                                       Scratch<T>& s, Vec<T>& total, Vec<T>& part) const {
    T* row = s.tile.data + r * COLS<T>;
    Vec<T> top = all(-INF<T>);
    for (int x = 0; x < COLS<T> / W; ++x) {
      Vec<T> gap[1];
      measure<T, KERNEL, SCALED, 0>(s.rows.data + r * this->size, this->size, k + x * W, scale, gap);
      const Vec<T> z = value(gap[0], factor, shape);
      store(row + x * W, z);
      top = larger<T>(top, z);
    }
    rescale(*this, run, r, most<T>(top), form, s);
    const Vec<T> shift = all(finite(run.shift[r]));
    total = part = Vec<T>{};
    for (int x = 0; x < COLS<T> / W; ++x) {
      const Vec<T> w = exp2_(load(row + x * W) - shift);
      store(row + x * W, w);
      total += w;
      if (only) part += w * load(only + x * W);
    }
  }
};

// As dot products where that is exact enough, else as differences.
struct GaussianProducts final : Distances<double, GAUSSIAN, true, 0> {
  using Differences = Distances<double, GAUSSIAN, true, 0>;
  const Products products;
  const size_t place;  // of the numbers of a row

  explicit GaussianProducts(const Distance& x)
      : Differences(x), products(x.pairs, static_cast<const double*>(x.scale)), place(this->row_numbers) {
    this->row_numbers += Products::ROW_NUMBERS;
  }

  void take_rows(int64_t b, int64_t h, int64_t i0, int rows, Scratch<double>& s) const override {
    Differences::take_rows(b, h, i0, rows, s);
    products.take_rows(b, h, i0, rows, s.rows.data + place);
  }

  bool fused(int64_t b, int64_t h, int64_t j0, const double* values, const Values<double>& form, Running<double>& run,
             Scratch<double>& s) const override {
    const double* rows = s.rows.data + place;
    if (!products.exact_enough(rows, b, h, j0)) return Differences::fused(b, h, j0, values, form, run, s);
    Vec<double> sums[ROWS], pooled[ROWS];
    double* weights = form.e > 1 ? s.tile.data : nullptr;
    products.sum(rows, b, h, j0, form.e == 1 ? values + j0 : nullptr, sums, pooled, weights);
    const double* power = products.powers(rows);
    for (int r = 0; r < ROWS; ++r) {
      if (run.shift[r] == -INF<double>) run.shift[r] = power[r];
      if (run.shift[r] < power[r] - 400) rescale<double>(*this, run, r, power[r], form, s);
      if (run.shift[r] != power[r]) {
        const Vec<double> by = all(std::exp2(power[r] - run.shift[r]));
        sums[r] *= by;
        pooled[r] *= by;
        for (int x = 0; weights && x < COLS<double>; x += W)
          store(weights + r * COLS<double> + x, load(weights + r * COLS<double> + x) * by);
      }
      run.total[r] += sums[r];
      s.lanes[size_t(r) * FEW_VALUES] += pooled[r];
    }
    if (weights) pool(weights, values, padded<double>(p.n), j0, COLS<double> / W, form, s);
    return true;
  }
};

template <class T>
struct Backward {
  static constexpr int W = WIDTH<T>;
  const DistanceBackward& x;
  const PairwiseParams& p;
  const Points<T>& kernel;
  const Values<T> pooled, right;
  const Aligned<T> shifts;
  const int64_t whole;
  Aligned<T> deltas;

  Backward(const DistanceBackward& given, const Points<T>& points)
      : x(given),
        p(given.of.pairs),
        kernel(points),
        pooled(p, false),
        right(p, true),
        shifts(column_shifts<T>(p, false)),
        whole(padded<T>(p.n)) {
    if (!p.by_column) return;
    deltas = Aligned<T>(size_t(p.batch * p.heads * whole));
    const T* given_deltas = static_cast<const T*>(x.slopes.delta);
    for (int64_t i = 0; i < p.batch * p.heads; ++i)
      for (int64_t j = 0; j < whole; ++j) deltas[size_t(i * whole + j)] = j < p.n ? given_deltas[i * p.n + j] : T(0);
  }

  void rows(int64_t b, int64_t h, int64_t i0, Scratch<T>& s, Aligned<Vec<T>>& lanes, SlopeRows<T>& given) const {
    const int D = kernel.size;
    const int count = int(std::min<int64_t>(ROWS, p.m - i0));
    const int64_t head = b * p.heads + h, row0 = head * p.m + i0;
    Vec<T>*first = lanes.data, *second = x.second ? first + ROWS * D : nullptr;
    for (int i = 0; i < 2 * ROWS * D; ++i) first[i] = Vec<T>{};
    s.clear(pooled);
    given.take(p, x.slopes, row0, count);
    const PairwiseMaskView<T> mask(p, b, h);
    kernel.take_rows(b, h, i0, count, s);
    for (int64_t j0 = 0; j0 < p.n; j0 += COLS<T>) {
      const int columns = int(std::min<int64_t>(COLS<T>, p.n - j0)), vectors = (columns + W - 1) / W;
      const auto cover = mask.cover(i0, count, j0, columns);
      if (cover == PairwiseMaskView<T>::NONE) continue;
      kernel.tile(b, h, j0, vectors, s.tile.data, s);
      if (cover == PairwiseMaskView<T>::SOME) mask.apply(s.tile.data, i0, count, j0, columns, -INF<T>);
      slopes_of<T>(given, p.e, right.head(p, b, h) + j0 * p.e, p.by_column ? shifts.data + head * 2 * whole + j0 : nullptr, whole,
                   p.by_column ? deltas.data + head * whole + j0 : nullptr, vectors, s);
      if (x.of.kernel == LAPLACE)
        kernel.template gradients<true>(b, h, j0, vectors, s.other.data, first, second, s);
      else
        kernel.template gradients<false>(b, h, j0, vectors, s.other.data, first, second, s);
      if (pooled.e) pool(s.tile.data, pooled.head(p, b, h), whole, j0, vectors, pooled, s);
    }
    for (int r = 0; r < count; ++r) {
      for (int c = 0; c < int(p.d); ++c) {
        static_cast<T*>(x.first)[(row0 + r) * p.d + c] = sum<T>(first[r * D + c]);
        if (second) static_cast<T*>(x.second)[(row0 + r) * p.d + c] = sum<T>(second[r * D + c]);
      }
      for (int64_t c = 0; c < pooled.e; ++c) static_cast<T*>(p.out)[(row0 + r) * p.e + c] = s.sum_of(pooled, r, c);
    }
  }

  void run() const {
    const int threads = std::max(1, p.threads);
    const int64_t blocks = (p.m + ROWS - 1) / ROWS;
    std::vector<Scratch<T>> scratch;
    std::vector<Aligned<Vec<T>>> lanes;
    std::vector<SlopeRows<T>> given;
    for (int t = 0; t < threads; ++t) {
      scratch.emplace_back(pooled.width, kernel.row_numbers);
      lanes.emplace_back(2 * kernel.row_numbers);
      given.emplace_back(p.e);
    }
    share(size_t(p.batch * p.heads * blocks), threads, [&](size_t item, int thread) {
      const Flush flush;
      const int64_t head = int64_t(item) / blocks;
      const size_t t = size_t(thread);
      rows(head / p.heads, head % p.heads, int64_t(item) % blocks * ROWS, scratch[t], lanes[t], given[t]);
    });
  }
};

// Call run with the kernel that fits: its type, its form and its size. Each size that is a constant takes its time to
// compile: only the form that is used most has them.
template <class T, int KERNEL, bool SCALED, class Run>
int32_t with_size(const Distance& x, Run run) {
  const int64_t d = x.pairs.d;
  if (d > 16) return UNSUPPORTED;
  if constexpr (KERNEL == GAUSSIAN && !SCALED) {
    int32_t status = DONE;
    if (with_constant<6>(d, [&]<int D>() { status = run.template operator()<Distances<T, KERNEL, SCALED, D>>(); })) return status;
  }
  return run.template operator()<Distances<T, KERNEL, SCALED, 0>>();
}

// One factor serves where the bandwidth is the same for all coordinates, and its square is far from any end.
template <class T>
bool one_scale(const Distance& x) {
  const T* scale = static_cast<const T*>(x.scale);
  for (int64_t c = 1; c < x.pairs.d; ++c)
    if (scale[c] != scale[0]) return false;
  return scale[0] > T(1e-12) && scale[0] < T(1e12);
}

template <class T>
int32_t sums(const Distance& x) {
  const auto run = [&]<class Kernel>() {
    run_score<T>(x.pairs, Kernel(x));
    return int32_t(DONE);
  };
  if constexpr (std::is_same_v<T, double>)
    if (x.kernel == GAUSSIAN && x.pairs.d <= Products::LARGEST && simple(x.pairs))
      return run.template operator()<GaussianProducts>();
  // The same form for the log-sum-exp and for what is made with it: rounding that they share does no harm.
  if constexpr (std::is_same_v<T, float>)
    if (x.kernel == GAUSSIAN && one_scale<T>(x)) return with_size<T, GAUSSIAN, false>(x, run);
  if (x.kernel == GAUSSIAN) return with_size<T, GAUSSIAN, true>(x, run);
  if (x.kernel == LAPLACE) return with_size<T, LAPLACE, true>(x, run);
  return with_size<T, BOUNDED, true>(x, run);
}

template <class T>
int32_t gradients(const DistanceBackward& x) {
  const auto run = [&]<class Kernel>() {
    const Kernel kernel(x.of);
    Backward<T>(x, kernel).run();
    return int32_t(DONE);
  };
  if (x.of.kernel == GAUSSIAN) return with_size<T, GAUSSIAN, true>(x.of, run);
  if (x.of.kernel == LAPLACE) return with_size<T, LAPLACE, true>(x.of, run);
  return UNSUPPORTED;
}

int32_t run_distance(const Distance& x) {
  return x.pairs.type == FLOAT64 ? sums<double>(x) : sums<float>(x);
}

int32_t run_distance_backward(const DistanceBackward& x) {
  return x.of.pairs.type == FLOAT64 ? gradients<double>(x) : gradients<float>(x);
}

}  // namespace ATTLAS_ISA
