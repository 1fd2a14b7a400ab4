// Rows of the matrix of a linear attention layer, straight from its tokens: a vector is carried from the token of a row
// back to the first column, and meets one key after the other. Time O(n d), and memory for one vector a row.
//
// The vector is in float64 whatever the tokens are: what it was rounded by adds up over all tokens. Reading a key takes as
// long as the arithmetic of one row, so that a task carries several rows.
#include "abi_transport.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "interrupt.h"
#include "parallel.h"
#include "reader.h"

namespace ATTLAS_ISA {

namespace {

using attlas::OfTokens;
using attlas::TransportRows;
using V = Vec<double>;

constexpr int W = WIDTH<double>;
constexpr int TOGETHER = 4;     // rows of a task
constexpr int64_t AHEAD = 24;   // tokens that are fetched before they are needed
constexpr int64_t SOME = 512;   // tokens whose gates are computed at a time

// A vector of numbers that lie together, as float64.
ATTLAS_INLINE V wide(const double* from) { return load(from); }
ATTLAS_INLINE V wide(const float* from) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtps_pd(_mm256_loadu_ps(from));
#elif defined(__AVX2__)
  return (V)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
  V out;
  for (int i = 0; i < W; ++i) out[i] = double(from[i]);
  return out;
#endif
}

// exp(x) for x <= 0, within 2e-14 of itself, and exactly 0 where that is below the normal numbers. NaN stays. Decays of
// channels in float32 take most of the time of their rows: exp_ is as exact as float64, and takes half as long again.
ATTLAS_INLINE V short_exp(V x) {
  const V y = x * all(1.4426950408889634074);
  const V magic = all(6755399441055744.0), rounded = (y < all(-1022.0) ? all(-1022.0) : y) + magic;  // 1.5 * 2^52
  const V r = (y < all(-1022.0) ? all(-1022.0) : y) - (rounded - magic);
  const V p = polynomial(r, 1.0178086009239699728e-7, 1.3215486790144309488e-6, 1.5252733804059840280e-5,
                         1.5403530393381609954e-4, 1.3333558146428443423e-3, 9.6181291076284771619e-3,
                         5.5504108664821579953e-2, 2.4022650695910071233e-1, 6.9314718055994530942e-1, 1.0);
  const V out = (V)((Ints<double>)p + ((Ints<double>)rounded << 52));
  return x == x ? (y < all(-1022.0) ? V{} : out) : x;
}

template <class T, class Source>
class RowPass {
 public:
  explicit RowPass(const TransportRows& p)
      : p_(p),
        vectors_((p.d + W - 1) / W),
        size_(vectors_ * W),
        u_(size_t(TOGETHER * size_)),
        key_(size_t(size_)),
        second_(size_t(size_)),
        p_row_(size_t(size_)),
        r_row_(size_t(size_)),
        decays_(size_t(size_)),
        factors_(size_t(SOME + W)) {}

  // Rows [from, from + count) of one head.
  void run(int64_t b, int64_t h, int64_t from, int64_t count) {
    const int64_t* rows = p_.rows + from;
    const int64_t width = p_.stop - p_.first, place = (b * p_.heads + h) * p_.count + from;
    const T* queries = static_cast<const T*>(p_.queries) + place * p_.d;
    T* out = static_cast<T*>(p_.out) + place * width;
    const Source* keys = at<Source>(p_.k, b, h);
    const T *logs = at<T>(p_.decay, b, h), *write = at<T>(p_.write, b, h), *erase = at<T>(p_.erase, b, h);
    const T *p = at<T>(p_.p, b, h), *r = at<T>(p_.r, b, h);
    const bool of_channels = logs && p_.decay.size > 1;
    double factor[TOGETHER] = {};  // of a vector that nothing else changes
    int64_t first = count;              // the rows from here on have begun
    int64_t known = rows[count - 1] + 1;  // the token of the first number in factors_
    for (int64_t j = rows[count - 1]; j >= p_.first; --j) {
      if (j < known) {
        attlas::checkpoint();
        known = std::max<int64_t>(p_.first, j + 1 - SOME);
        if (logs && !of_channels) decays_of_tokens(logs, known, j + 1);
      }
      for (; first > 0 && rows[first - 1] == j; --first) {
        read(queries + (first - 1) * p_.d, u_.at(size_t((first - 1) * size_)));
        factor[first - 1] = 1;
      }
      // Processors foresee that the next token is read, not the one before.
      if (j - AHEAD >= p_.first) fetch(keys + (j - AHEAD) * p_.k.of.row);
      read(keys + j * p_.k.of.row, key_.data);
      if (erase && !of_channels && j > known && !(first > 0 && rows[first - 1] == j - 1)) {
        // Two tokens at once: the vector is read and written half as often.
        fetch(keys + std::max(j - AHEAD - 1, p_.first) * p_.k.of.row);
        read(keys + (j - 1) * p_.k.of.row, second_.data);
        const double k1 = logs ? factors_[size_t(j - known)] : 1.0, k2 = logs ? factors_[size_t(j - 1 - known)] : 1.0;
        const double e1 = double(erase[j * p_.erase.of.row]), e2 = double(erase[(j - 1) * p_.erase.of.row]);
        const double w1 = write ? double(write[j * p_.write.of.row]) : 1.0;
        const double w2 = write ? double(write[(j - 1) * p_.write.of.row]) : 1.0;
        for (int64_t row = first; row < count; ++row) {
          double* u = u_.at(size_t(row * size_));
          double one, two, both;
          dots(u, one, two, both);
          two = k1 * (two - e1 * one * both);
          T* to = out + row * width + j - p_.first;
          if (j < p_.stop) to[0] = T(w1 * one);
          if (j - 1 < p_.stop) to[-1] = T(w2 * two);
          turn(u, k1 * k2, -k1 * k2 * e1 * one, -k2 * e2 * two);
        }
        --j;
        continue;
      }
      if (p) {
        if (j - AHEAD >= p_.first) fetch(p + (j - AHEAD) * p_.p.of.row), fetch(r + (j - AHEAD) * p_.r.of.row);
        read(p + j * p_.p.of.row, p_row_.data);
        read(r + j * p_.r.of.row, r_row_.data);
      }
      if (of_channels) {
        if (j - AHEAD >= p_.first) fetch(logs + (j - AHEAD) * p_.decay.of.row);
        read(logs + j * p_.decay.of.row, decays_.data);
        double* decays = decays_.data;
        for (int64_t c = 0, size = size_; c < size; c += W) store(decays + c, decay_of(load(decays + c)));
      }
      const double written = write ? double(write[j * p_.write.of.row]) : 1.0;
      const double kept = logs && !of_channels ? factors_[size_t(j - known)] : 1.0;
      for (int64_t row = first; row < count; ++row) {
        double* u = u_.at(size_t(row * size_));
        const double found = dot(u, key_.data);
        if (j < p_.stop) out[row * width + j - p_.first] = T(written * factor[row] * found);
        if (erase) {
          turn(u, -double(erase[j * p_.erase.of.row]) * found, key_.data, kept, of_channels);
        } else if (p) {
          turn(u, dot(u, p_row_.data), r_row_.data, kept, of_channels);
        } else if (of_channels) {
          for (int64_t c = 0; c < size_; c += W) store(u + c, load(u + c) * load(decays_.at(size_t(c))));
        } else {
          factor[row] *= kept;
        }
      }
    }
  }

 private:
  template <class X>
  static const X* at(const OfTokens& t, int64_t b, int64_t h) {
    return t.of.data ? static_cast<const X*>(t.of.data) + b * t.of.batch + h / t.group * t.of.head : nullptr;
  }

  // Asks for one vector of tokens that is read later.
  template <class X>
  ATTLAS_INLINE void fetch(const X* from) const {
    const char *line = reinterpret_cast<const char*>(from), *end = reinterpret_cast<const char*>(from + p_.d);
    for (; line < end; line += 64) __builtin_prefetch(line);
  }

  // One vector of tokens, as float64, and zeros up to a whole number of vectors.
  template <class X>
  ATTLAS_INLINE void read(const X* from, double* to) const {
    const int64_t d = p_.d, size = size_;  // what is stored below might be these, for all that a compiler knows
    int64_t c = 0;
    if constexpr (sizeof(X) >= 4) {
#pragma GCC unroll 4
      for (; c + W <= d; c += W) store(to + c, wide(from + c));
    } else {
      float some[WIDTH<float>];
      for (; c + WIDTH<float> <= d; c += WIDTH<float>) {
        store(some, numbers(from + c));
        store(to + c, wide(some));
        store(to + c + W, wide(some + W));
      }
    }
    for (; c < d; ++c) to[c] = double(number(from[c]));
    for (; c < size; ++c) to[c] = 0;
  }

  static ATTLAS_INLINE V decay_of(V x) {
    if constexpr (sizeof(T) == 4) return short_exp(x);
    return exp_(x);
  }

  void decays_of_tokens(const T* logs, int64_t from, int64_t stop) {
    for (int64_t j = from; j < stop; ++j) factors_[size_t(j - from)] = double(logs[j * p_.decay.of.row]);
    for (int64_t j = 0; j < stop - from; j += W) store(factors_.at(size_t(j)), exp_(load(factors_.at(size_t(j)))));
  }

  ATTLAS_INLINE double dot(const double* x, const double* y) const {
    V sums[4] = {};
    int64_t c = 0;
    for (; c + 4 * W <= size_; c += 4 * W) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[i] += load(x + c + i * W) * load(y + c + i * W);
    }
    for (; c < size_; c += W) sums[0] += load(x + c) * load(y + c);
    return sum<double>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  // The products of u with this key and the next one to be met, and that of both keys.
  ATTLAS_INLINE void dots(const double* u, double& one, double& two, double& both) const {
    const double *x = key_.data, *y = second_.data;
    const int64_t size = size_;
    V a[2] = {}, b[2] = {}, c[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W) {
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) {
        const V from = load(u + i + n * W), first = load(x + i + n * W), second = load(y + i + n * W);
        a[n] += from * first, b[n] += from * second, c[n] += first * second;
      }
    }
    for (; i < size; i += W) a[0] += load(u + i) * load(x + i), b[0] += load(u + i) * load(y + i), c[0] += load(x + i) * load(y + i);
    one = sum<double>(a[0] + a[1]), two = sum<double>(b[0] + b[1]), both = sum<double>(c[0] + c[1]);
  }

  // u = kept u + s x + t y for the same keys
  ATTLAS_INLINE void turn(double* u, double kept, double s, double t) const {
    const double *x = key_.data, *y = second_.data;
    const V scale = all(kept), by = all(s), other = all(t);
    const int64_t size = size_;
#pragma GCC unroll 4
    for (int64_t c = 0; c < size; c += W) store(u + c, scale * load(u + c) + by * load(x + c) + other * load(y + c));
  }

  // u = diag(decay) (u + s y)
  ATTLAS_INLINE void turn(double* u, double s, const double* y, double kept, bool of_channels) const {
    const V by = all(s), scale = all(kept);
    const double* decays = decays_.data;
    const int64_t size = size_;
    if (of_channels) {
#pragma GCC unroll 4
      for (int64_t c = 0; c < size; c += W) store(u + c, load(decays + c) * (load(u + c) + by * load(y + c)));
    } else {
#pragma GCC unroll 4
      for (int64_t c = 0; c < size; c += W) store(u + c, scale * (load(u + c) + by * load(y + c)));
    }
  }

  const TransportRows& p_;
  const int64_t vectors_, size_;
  Aligned<double> u_, key_, second_, p_row_, r_row_, decays_, factors_;
};

template <class T, class Source>
int32_t rows(const TransportRows& p) {
  const int64_t groups = (p.count + TOGETHER - 1) / TOGETHER;
  std::vector<std::unique_ptr<RowPass<T, Source>>> workers(size_t(std::max(p.threads, 1)));
  attlas::share(size_t(p.batch * p.heads * groups), p.threads, [&](size_t task, int thread) {
    const Flush flush;
    auto& worker = workers[size_t(thread)];
    if (!worker) worker = std::make_unique<RowPass<T, Source>>(p);
    const int64_t which = int64_t(task) / groups, from = int64_t(task) % groups * TOGETHER;
    worker->run(which / p.heads, which % p.heads, from, std::min<int64_t>(TOGETHER, p.count - from));
  });
  return attlas::DONE;
}

}  // namespace

int32_t run_transport_rows(const TransportRows& p) {
  if (p.count == 0 || p.d == 0) return attlas::DONE;
  if (p.type == attlas::FLOAT64) return rows<double, double>(p);
  if (p.type == attlas::FLOAT32) return rows<float, float>(p);
  if (p.type == attlas::BFLOAT16) return rows<float, Bfloat16>(p);
  return rows<float, Float16>(p);
}

}  // namespace ATTLAS_ISA
