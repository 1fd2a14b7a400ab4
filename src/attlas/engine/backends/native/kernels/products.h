// Gaussian weights of float64 tokens as dot products: half the operations of differences, where rounding allows it.
#pragma once

#include "abi_distance.h"
#include "pairs.h"

namespace ATTLAS_ISA {

// 2^x where that is no number below the normal ones, within 2e-14 of itself: less than its exponent may be wrong here.
ATTLAS_INLINE Vec<double> normal_power(Vec<double> x) {
#if defined(__AVX512F__)
  return exp2_(x);
#else
  using V = Vec<double>;
  const V magic = all(6755399441055744.0), rounded = x + magic;  // 1.5 * 2^52: adding it rounds to a whole number
  const V r = x - (rounded - magic);
  const V p = polynomial(r, 1.0148341268202081e-07, 1.3258335398449777e-06, 1.5252990011882775e-05, 0.0001540344088448824,
                         0.0013333557625477476, 0.009618129181163879, 0.05550410866841569, 0.2402265069572282,
                         0.6931471805598851, 1.0);
  return (V)((Ints<double>)p + ((Ints<double>)rounded << 52));
#endif
}

// With u and w the tokens less the keys' mean, in units in which a logit in powers of 2 is -|u - w|^2 / 2, that logit is
// u.w - |w|^2 / 2 - |u|^2 / 2. The last term belongs to the row: it multiplies the sums of a tile, not each cell.
//
// So is computed a tile of rows with |u| <= R and keys with |w| <= S where R S + S^2 / 2 <= MOST and R^2 <= SQUARE. Then no
// cell leaves the normal numbers, and the rounding error of a logit, at most about (d + 6) 2^-53 (R + S)^2 / 2, changes no
// weight by more than 1e-12 of itself.
class Products {
 public:
  static constexpr int LARGEST = 8;  // coordinates
  static constexpr size_t ROW_NUMBERS = size_t(ROWS) * (LARGEST + 1) + 1;

  Products(const PairwiseParams& pairs, const double* scale)
      : p_(pairs),
        d_(int(pairs.d)),
        chunks_(padded<double>(pairs.n) / TILE),
        packed_(size_t(pairs.batch * pairs.token_heads * chunks_ * TILE * (pairs.d + 1))),
        far_(size_t(pairs.batch * pairs.token_heads * chunks_)),
        mean_(size_t(pairs.batch * pairs.token_heads * pairs.d)) {
    for (int c = 0; c < d_; ++c) unit_[c] = scale[c] * std::sqrt(LOG2E);
    const int64_t heads = p_.batch * p_.token_heads;
    attlas::share(size_t(heads), p_.threads, [&](size_t head, int) { take_mean(int64_t(head)); });
    attlas::share(size_t(heads * chunks_), p_.threads, [&](size_t item, int) { pack(int64_t(item)); });
  }

  // Coordinates of a block of rows, what their sums are multiplied by as a power of 2, and the largest |u|.
  void prepare_rows(int64_t b, int64_t h, int64_t i0, int rows, double* to) const {
    double *power = to + ROWS * d_, *farthest = power + ROWS;
    const double* mean = mean_.data + head_of(b, h) * d_;
    *farthest = 0;
    for (int r = 0; r < ROWS; ++r) {
      const double* x = token<double>(p_.rows, b, h, i0 + std::min(r, rows - 1));
      double square = 0;
      for (int c = 0; c < d_; ++c) {
        const double u = (x[c] - mean[c]) * unit_[c];
        to[r * d_ + c] = u;
        square += u * u;
      }
      power[r] = -0.5 * square;
      *farthest = at_least(*farthest, std::sqrt(square));
    }
  }
  const double* powers(const double* rows) const { return rows + ROWS * d_; }

  bool exact_enough(const double* rows, int64_t b, int64_t h, int64_t j0) const {
    const double r = powers(rows)[ROWS], s = far_[size_t(head_of(b, h) * chunks_ + j0 / TILE)];
    return r * s + 0.5 * s * s <= MOST && r * r <= SQUARE;  // false for NaN
  }

  // Sums of 2^(u.w - |w|^2 / 2) of a whole tile, and of that times the value, where there is one; the weights themselves
  // where they are wanted.
  void sum(const double* rows, int64_t b, int64_t h, int64_t j0, const double* values, Vec<double>* sums,
           Vec<double>* pooled, double* weights) const {
    const double* keys = packed_.data + (head_of(b, h) * chunks_ * TILE + j0) * (d_ + 1);
    with_constant<LARGEST>(d_, [&]<int D>() { pass<D>(rows, keys, values, sums, pooled, weights); });
  }

 private:
  static constexpr int W = WIDTH<double>, TILE = COLS<double>;
  static constexpr double MOST = 600, SQUARE = 750;
  const PairwiseParams& p_;
  const int d_;
  const int64_t chunks_;  // tiles of the columns of one head
  double unit_[LARGEST] = {};
  Aligned<double> packed_;  // [head][tile][coordinates of w, then -|w|^2 / 2][column]
  Aligned<double> far_;     // [head][tile]: the largest |w|
  Aligned<double> mean_;    // [head][coordinate]

  int64_t head_of(int64_t b, int64_t h) const { return b * p_.token_heads + h / (p_.heads / p_.token_heads); }

  // The larger; NaN stays.
  static double at_least(double most, double x) { return x <= most ? most : x; }

  void take_mean(int64_t head) {
    double* mean = mean_.data + head * d_;
    std::fill(mean, mean + d_, 0.0);
    for (int64_t j = 0; j < p_.n; ++j) {
      const double* x = token<double>(p_.columns, head / p_.token_heads, head % p_.token_heads, j);
      for (int c = 0; c < d_; ++c) mean[c] += x[c];
    }
    for (int c = 0; c < d_; ++c) mean[c] /= double(p_.n);
  }

  // Columns beyond the last repeat it: only whole tiles are summed.
  void pack(int64_t item) {
    const int64_t head = item / chunks_, j0 = item % chunks_ * TILE;
    const double* mean = mean_.data + head * d_;
    double *to = packed_.data + item * TILE * (d_ + 1), farthest = 0;
    for (int j = 0; j < TILE; ++j) {
      const int64_t at = std::min(j0 + j, p_.n - 1);
      const double* x = token<double>(p_.columns, head / p_.token_heads, head % p_.token_heads, at);
      double square = 0;
      for (int c = 0; c < d_; ++c) {
        const double w = (x[c] - mean[c]) * unit_[c];
        to[c * TILE + j] = w;
        square += w * w;
      }
      to[d_ * TILE + j] = -0.5 * square;
      farthest = at_least(farthest, std::sqrt(square));
    }
    far_[size_t(item)] = farthest;
  }

  // Products of a few rows and columns first, then their powers: with narrow vectors a number that was read serves more
  // products, and fewer instructions wait for one another.
  static constexpr bool NARROW = VECTOR_BYTES == 32;
  static constexpr int SOME = 4, SIDE = NARROW ? 2 : 1, AHEAD = NARROW ? 8 : 1;

  template <int D>
  static void pass(const double* rows, const double* keys, const double* values, Vec<double>* sums,
                   Vec<double>* pooled, double* weights) {
    for (int r = 0; r < ROWS; r += SOME) {
      Vec<double> total[SOME] = {}, part[SOME] = {}, logits[SOME][AHEAD];
      for (int x = 0; x < TILE / W; x += AHEAD) {
        for (int at = 0; at < AHEAD; at += SIDE) {
          const double* key = keys + (x + at) * W;
          if (NARROW) asm volatile("" : : : "memory");  // numbers of rows are read where they are needed: registers are few
          Vec<double> w[SOME][SIDE];
          for (int i = 0; i < SOME; ++i)
            for (int s = 0; s < SIDE; ++s) w[i][s] = load(key + D * TILE + s * W);
#pragma GCC unroll 8
          for (int c = 0; c < D; ++c) {
#pragma GCC unroll 4
            for (int i = 0; i < SOME; ++i)
              for (int s = 0; s < SIDE; ++s) w[i][s] += all(rows[(r + i) * D + c]) * load(key + c * TILE + s * W);
          }
          for (int i = 0; i < SOME; ++i)
            for (int s = 0; s < SIDE; ++s) logits[i][at + s] = w[i][s];
        }
        for (int i = 0; i < SOME; ++i) {
          Vec<double> sum = total[i], pool = part[i];
#pragma GCC unroll 4
          for (int at = 0; at < AHEAD; ++at) {
            const Vec<double> w = normal_power(logits[i][at]);
            sum += w;
            if (values) pool += w * load(values + (x + at) * W);
            if (weights) store(weights + (r + i) * TILE + (x + at) * W, w);
          }
          total[i] = sum;
          part[i] = pool;
        }
      }
      for (int i = 0; i < SOME; ++i) {
        sums[r + i] = total[i];
        pooled[r + i] = part[i];
      }
    }
  }
};

}  // namespace ATTLAS_ISA
