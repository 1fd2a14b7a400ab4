// Hidden units of the additive score as reciprocals: w tanh(a + b) = w - 2 w / (1 + e^2a e^2b).
#pragma once

#include <numeric>

#include "abi_additive.h"
#include "pairs.h"

namespace ATTLAS_ISA {

// One over a number that is far from either end of the range.
ATTLAS_INLINE Vec<float> reciprocal(Vec<float> x) {
#if defined(__AVX512F__)
  const Vec<float> r = (Vec<float>)_mm512_maskz_rcp14_ps(__mmask16(-1), (__m512)x);
  return r * (all(2.0f) - x * r);
#else
  return all(1.0f) / x;
#endif
}
ATTLAS_INLINE Vec<double> reciprocal(Vec<double> x) {
#if defined(__AVX512F__)
  Vec<double> r = (Vec<double>)_mm512_maskz_rcp14_pd(__mmask8(-1), (__m512d)x);
  r = r * (all(2.0) - x * r);
  return r * (all(2.0) - x * r);
#else
  return all(1.0) / x;
#endif
}

ATTLAS_INLINE Vec<double> tanh_(Vec<double> x) {
  const Vec<double> zero{}, one = all(1.0), size = x < zero ? -x : x;
  const Vec<double> y = one - all(2.0) / (one + exp_(size + size));
  return x < zero ? -y : y;
}

// Four units share one reciprocal. With d_u = (1 + A_u B_u) / w_u the sum of four is
// ((d1 + d2) d3 d4 + (d3 + d4) d1 d2) / (d1 d2 d3 d4): one multiply-add a unit, seven more, and one reciprocal.
constexpr int SHARED = 4;

// The units of one call, brought into an order in which each four has weights of all sizes: then no product of four
// d_u is much larger than another. What is missing of the last four counts as 1; a weight so small that no logit shows
// it is taken as FAINT of the largest where it divides.
template <class T>
struct Units {
  static constexpr double FAINT = sizeof(T) == 4 ? 1e-8 : 1e-17;
  int64_t groups = 0, slots = 0;
  std::vector<int64_t> unit;  // of a slot, -1 for none
  std::vector<T> weight;      // of a slot, as a part of the largest
  std::vector<T> inverse;     // one over it
  std::vector<T> size;        // log of the inverse, as [place in the four][group]
  double largest = 0, total = 0, fillers = 0, most_size = 0;

  Units(const T* w, int64_t count) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), int64_t(0));
    for (int64_t u = 0; u < count; ++u) {
      largest = std::max(largest, std::fabs(double(w[u])));
      total += double(w[u]);
    }
    std::stable_sort(order.begin(), order.end(),
                     [w](int64_t a, int64_t b) { return std::fabs(double(w[a])) > std::fabs(double(w[b])); });
    groups = (count + SHARED - 1) / SHARED;
    slots = groups * SHARED;
    unit.assign(size_t(slots), -1);
    weight.assign(size_t(slots), T(0));
    inverse.assign(size_t(slots), T(1));
    size.assign(size_t(slots), T(0));
    for (int64_t place = 0; place < count; ++place) {
      const int64_t layer = place / groups, g = layer % 2 ? groups - 1 - place % groups : place % groups;
      const size_t slot = size_t(g * SHARED + layer);
      const double x = largest > 0 ? double(w[order[size_t(place)]]) / largest : 1;
      const double at_least_faint = std::fabs(x) > FAINT ? x : FAINT;
      unit[slot] = order[size_t(place)];
      weight[slot] = T(x);
      inverse[slot] = T(1 / at_least_faint);
      size[size_t(layer * groups + g)] = T(-std::log(std::fabs(at_least_faint)));
    }
    fillers = double(slots - count);
    for (int64_t g = 0; g < groups; ++g) {
      double sum = 0;
      for (int k = 0; k < SHARED; ++k) sum += double(size[size_t(k * groups + g)]);
      most_size = std::max(most_size, sum);
    }
  }
};

// Where 2a or 2b is larger than SINGLE, or the log of a product of four d_u may exceed PRODUCT, tanh is taken instead.
template <class T>
constexpr T SINGLE = sizeof(T) == 4 ? T(40) : T(300);
template <class T>
constexpr T PRODUCT = sizeof(T) == 4 ? T(82) : T(650);

// What a block of rows keeps in Scratch::rows; a is a hidden unit of a row, A = e^2a, and b one of a column.
template <class T>
struct RowParts {
  T *shared, *plain, *raw;  // A / w, A and a as [row][slot]
  T* most;                  // largest 2a as [place in the four][group]
  T* block;                 // b of one vector of columns as [slot][lane]
  T* ends;                  // least and largest 2a of all
  static size_t numbers(int64_t slots) { return size_t((3 * ROWS + 1 + WIDTH<T>) * slots + 2); }
  RowParts(T* at, int64_t slots)
      : shared(at),
        plain(at + ROWS * slots),
        raw(at + 2 * ROWS * slots),
        most(at + 3 * ROWS * slots),
        block(most + slots),
        ends(block + WIDTH<T> * slots) {}
};

template <class T>
struct AdditiveScore final : Score<T> {
  static constexpr int W = WIDTH<T>;
  const PairwiseParams& p;
  const Units<T> units;
  const int64_t slots, stride, blocks;  // numbers from one vector of columns to the next; vectors of columns of a head
  Aligned<T> packed;                     // e^2b as [vector of columns][slot][lane]
  Aligned<T> most;                       // largest 2b as [vector of columns][place in the four][group], then both ends

  explicit AdditiveScore(const attlas::Additive& x)
      : p(x.pairs),
        units(static_cast<const T*>(x.weight), x.pairs.d),
        slots(units.slots),
        // Not a power of 2 apart: they would meet in the same lines of the cache.
        stride((slots + SHARED) * W),
        blocks((x.pairs.n + W - 1) / W) {
    this->row_numbers = RowParts<T>::numbers(slots);
    const int64_t heads = p.batch * p.token_heads;
    packed = Aligned<T>(size_t(heads * blocks * stride));
    most = Aligned<T>(size_t(heads * blocks * (slots + 2)));
    const int64_t some = 64;  // vectors of one piece of work
    const int64_t pieces = (blocks + some - 1) / some;
    attlas::share(size_t(heads * pieces), p.threads, [&](size_t item, int) {
      const Flush flush;
      const int64_t head = int64_t(item) / pieces, start = int64_t(item) % pieces * some;
      for (int64_t x = start; x < std::min(blocks, start + some); ++x) pack(head, x);
    });
  }

  void pack(int64_t head, int64_t x) {
    T* to = packed.data + (head * blocks + x) * stride;
    T* tops = most.data + (head * blocks + x) * (slots + 2);
    raw_columns(head / p.token_heads, head % p.token_heads, x * W, to);
    Vec<T> low{}, high{};
    for (int64_t slot = 0; slot < slots; ++slot) {
      const Vec<T> b = load(to + slot * W), twice = b + b;
      low = twice < low ? twice : low;
      high = twice > high ? twice : high;
      tops[slot % SHARED * units.groups + slot / SHARED] = ::ATTLAS_ISA::most<T>(twice);
      store(to + slot * W, exp_(twice));
    }
    tops[slots] = -::ATTLAS_ISA::most<T>(-low);
    tops[slots + 1] = ::ATTLAS_ISA::most<T>(high);
  }

  // b as [slot][lane]; columns beyond the last repeat it.
  void raw_columns(int64_t b, int64_t h, int64_t j0, T* to) const {
    for (int j = 0; j < W; ++j) {
      const T* x = token<T>(p.columns, b, h, std::min(j0 + j, p.n - 1));
      for (int64_t slot = 0; slot < slots; ++slot)
        to[slot * W + j] = units.unit[size_t(slot)] < 0 ? T(0) : x[units.unit[size_t(slot)]];
    }
  }

  int64_t token_head(int64_t b, int64_t h) const { return b * p.token_heads + h / (p.heads / p.token_heads); }
  const T* columns(int64_t b, int64_t h, int64_t x) const {
    return packed.data + (token_head(b, h) * blocks + x) * stride;
  }

  void prepare_rows(int64_t b, int64_t h, int64_t i0, int rows, Scratch<T>& s) const override {
    const RowParts<T> part(s.rows.data, slots);
    T low = 0, high = 0;
    for (int r = 0; r < ROWS; ++r) {
      const T* x = token<T>(p.rows, b, h, i0 + std::min(r, rows - 1));
      for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t u = units.unit[size_t(slot)];
        const T a = u < 0 ? T(0) : x[u];
        T& top = part.most[slot % SHARED * units.groups + slot / SHARED];
        part.raw[r * slots + slot] = a;
        top = r && top > 2 * a ? top : 2 * a;
        low = std::min(low, 2 * a);
        high = std::max(high, 2 * a);
      }
    }
    part.ends[0] = low;
    part.ends[1] = high;
    for (int64_t i = 0; i < ROWS * slots; i += W) {  // ROWS * slots is a multiple of 48
      const Vec<T> a = load(part.raw + i);
      store(part.plain + i, exp_(a + a));
    }
    for (int r = 0; r < ROWS; ++r)
      for (int64_t slot = 0; slot < slots; ++slot) {
        T& plain = part.plain[r * slots + slot];
        if (units.unit[size_t(slot)] < 0) plain = 0;
        part.shared[r * slots + slot] = plain * units.inverse[size_t(slot)];
      }
  }

  // Whether a block of rows and a vector of columns stay in the range of the reciprocals.
  bool in_range(const RowParts<T>& part, int64_t b, int64_t h, int64_t x) const {
    const T* tops = most.data + (token_head(b, h) * blocks + x) * (slots + 2);
    const T low = std::min(part.ends[0], tops[slots]), high = std::max(part.ends[1], tops[slots + 1]);
    if (!(low >= -SINGLE<T> && high <= SINGLE<T>)) return false;
    const T doubled = T(0.6931472) * SHARED;  // 1 + AB is at most twice the larger
    if ((part.ends[1] + tops[slots + 1]) * SHARED + T(units.most_size) + doubled <= PRODUCT<T>) return true;
    bool fits = true;
    for (int64_t g = 0; g < units.groups; ++g) {
      T bound = doubled;
      for (int k = 0; k < SHARED; ++k) {
        const int64_t at = k * units.groups + g;
        const T top = part.most[at] + tops[at];
        bound += units.size[size_t(at)] + (top > 0 ? top : T(0));
      }
      fits &= bound <= PRODUCT<T>;
    }
    return fits;
  }

  using Score<T>::tile;
  void tile(int64_t b, int64_t h, int64_t j0, int vectors, T* to, int64_t stride, int rows, Scratch<T>& s) const override {
    const RowParts<T> part(s.rows.data, slots);
    // The logit in powers of 2 is start + slope * sum of w / (1 + AB).
    const Vec<T> start = all(T(LOG2E * (units.total + 2 * units.largest * units.fillers)));
    const Vec<T> slope = all(T(-2 * LOG2E * units.largest)), unit = all(T(LOG2E * units.largest));
    for (int x = 0; x < vectors; ++x) {
      if (!in_range(part, b, h, j0 / W + x)) {
        exact(part, b, h, j0 + x * W, unit, to + x * W, stride, rows);
        continue;
      }
      const T* column = columns(b, h, j0 / W + x);
      for (int r = 0; r < rows; r += 4) {
        Vec<T> sums[4] = {};
        four_rows(part.shared + r * slots, column, sums);
        for (int i = 0; i < 4; ++i) store(to + (r + i) * stride + x * W, start + slope * sums[i]);
      }
    }
  }

  ATTLAS_INLINE void four_rows(const T* rows, const T* column, Vec<T> (&sums)[4]) const {
    const T* inverse = units.inverse.data();
    for (int64_t slot = 0; slot < slots; slot += SHARED) {
      Vec<T> k[SHARED], one[SHARED];
      for (int u = 0; u < SHARED; ++u) {
        k[u] = load(column + (slot + u) * W);
        one[u] = all(inverse[slot + u]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const T* a = rows + i * slots + slot;
        const Vec<T> d0 = all(a[0]) * k[0] + one[0], d1 = all(a[1]) * k[1] + one[1];
        const Vec<T> d2 = all(a[2]) * k[2] + one[2], d3 = all(a[3]) * k[3] + one[3];
        const Vec<T> left = d0 * d1, right = d2 * d3;
        sums[i] += ((d0 + d1) * right + (d2 + d3) * left) * reciprocal(left * right);
      }
    }
  }

  // The logits of one vector of columns from tanh itself.
  __attribute__((noinline)) void exact(const RowParts<T>& part, int64_t b, int64_t h, int64_t j0, Vec<T> unit, T* to,
                                       int64_t stride, int rows) const {
    raw_columns(b, h / (p.heads / p.token_heads), j0, part.block);
    for (int r = 0; r < rows; ++r) {
      Vec<T> total{};
      for (int64_t slot = 0; slot < slots; ++slot)
        if (units.unit[size_t(slot)] >= 0)
          total += all(units.weight[size_t(slot)]) * tanh_(all(part.raw[r * slots + slot]) + load(part.block + slot * W));
      store(to + r * stride, total * unit);
    }
  }
};

}  // namespace ATTLAS_ISA
