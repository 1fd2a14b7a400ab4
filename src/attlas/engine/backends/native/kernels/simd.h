// Vectors of one instruction set. Every kernel file is compiled once for each set, inside namespace ATTLAS_ISA.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <xmmintrin.h>
#endif

#ifndef ATTLAS_ISA
#define ATTLAS_ISA baseline
#endif

namespace ATTLAS_ISA {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

#define ATTLAS_INLINE inline __attribute__((always_inline))

template <class T>
struct Kind;
template <>
struct Kind<float> {
  typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
  typedef float unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
  using whole = int32_t;
  static constexpr int width = VECTOR_BYTES / 4;
};
template <>
struct Kind<double> {
  typedef double vec __attribute__((vector_size(VECTOR_BYTES)));
  typedef double unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t ints __attribute__((vector_size(VECTOR_BYTES)));
  using whole = int64_t;
  static constexpr int width = VECTOR_BYTES / 8;
};

template <class T>
using Vec = typename Kind<T>::vec;
template <class T>
using Ints = typename Kind<T>::ints;
template <class T>
constexpr int WIDTH = Kind<T>::width;
template <class T>
constexpr T INF = std::numeric_limits<T>::infinity();

template <class T>
ATTLAS_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename Kind<T>::unaligned*>(p);
}
template <class T>
ATTLAS_INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<typename Kind<T>::unaligned*>(p) = x;
}
template <class T>
ATTLAS_INLINE Vec<T> all(T x) {
  return x - Vec<T>{};  // a broadcast that is exact for every number, -0 and infinity too
}
// The larger and the smaller of two, the second where they are equal or one is NaN: one instruction each, where a comparison
// and a choice would be three.
template <class T>
ATTLAS_INLINE Vec<T> larger(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_max_ps((__m256)a, (__m256)b);
  if constexpr (sizeof(T) == 8) return (Vec<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm_max_ps((__m128)a, (__m128)b);
#endif
  return a > b ? a : b;
}
template <class T>
ATTLAS_INLINE Vec<T> smaller(Vec<T> a, Vec<T> b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_min_ps((__m256)a, (__m256)b);
  if constexpr (sizeof(T) == 8) return (Vec<T>)_mm256_min_pd((__m256d)a, (__m256d)b);
#elif defined(__SSE2__) && !defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm_min_ps((__m128)a, (__m128)b);
#endif
  return a < b ? a : b;
}

template <class T>
ATTLAS_INLINE T sum(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
#endif
  T total = 0;
  for (int i = 0; i < WIDTH<T>; ++i) total += x[i];
  return total;
}
template <class T>
ATTLAS_INLINE T most(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
#endif
  T top = x[0];
  for (int i = 1; i < WIDTH<T>; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// Every other number of two vectors side by side, from the first or from the second on.
template <class T, int FROM, std::size_t... I>
ATTLAS_INLINE Vec<T> every_other(Vec<T> a, Vec<T> b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (2 * int(I) + FROM)...);
#else
  return __builtin_shuffle(a, b, Ints<T>{typename Kind<T>::whole(2 * I + FROM)...});
#endif
}
// The sums and the maxima of neighbours in two vectors side by side.
template <class T>
ATTLAS_INLINE Vec<T> sum_of_pairs(Vec<T> a, Vec<T> b) {
  using All = std::make_index_sequence<WIDTH<T>>;
  return every_other<T, 0>(a, b, All()) + every_other<T, 1>(a, b, All());
}
template <class T>
ATTLAS_INLINE Vec<T> most_of_pairs(Vec<T> a, Vec<T> b) {
  using All = std::make_index_sequence<WIDTH<T>>;
  return larger<T>(every_other<T, 0>(a, b, All()), every_other<T, 1>(a, b, All()));
}

// A square of numbers, one row in each vector, becomes its transpose: each round moves one bit of the lane's number into the
// row's, and one back.
template <class T>
ATTLAS_INLINE void transpose(Vec<T> (&x)[WIDTH<T>]) {
  using All = std::make_index_sequence<WIDTH<T>>;
#pragma GCC unroll 4
  for (int round = 1; round < WIDTH<T>; round *= 2) {
    Vec<T> next[WIDTH<T>];
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH<T> / 2; ++i) {
      next[i] = every_other<T, 0>(x[2 * i], x[2 * i + 1], All());
      next[i + WIDTH<T> / 2] = every_other<T, 1>(x[2 * i], x[2 * i + 1], All());
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH<T>; ++i) x[i] = next[i];
  }
}

// One bit for each lane of x that is above y.
template <class T>
ATTLAS_INLINE uint32_t above(Vec<T> x, Vec<T> y) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ);
  if constexpr (sizeof(T) == 8) return _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_GT_OQ);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return uint32_t(_mm256_movemask_ps((__m256)(x > y)));
  if constexpr (sizeof(T) == 8) return uint32_t(_mm256_movemask_pd((__m256d)(x > y)));
#endif
  uint32_t bits = 0;
  for (int i = 0; i < WIDTH<T>; ++i) bits |= uint32_t(x[i] > y[i]) << i;
  return bits;
}

// A polynomial by its coefficients, that of the highest power first.
template <class T, class... Others>
ATTLAS_INLINE Vec<T> polynomial(Vec<T> x, T highest, Others... others) {
  Vec<T> p = all(highest);
  ((p = p * x + all(T(others))), ...);
  return p;
}

// exp(x): relative error under 2 units in the last place; exactly 0 where it would be below the normal numbers, so
// that no subnormal number ever slows a loop down; infinity above the largest. NaN stays NaN.
template <class T>
ATTLAS_INLINE Vec<T> exp_of(Vec<T> x) {
  using V = Vec<T>;
  constexpr bool SINGLE = sizeof(T) == 4;
  const V low = all(T(SINGLE ? -87.3365f : -708.39)), high = all(T(SINGLE ? 88.7228f : 709.78));
  V y = x < low ? low : x;
  y = y > high ? high : y;
  const V magic = all(T(SINGLE ? 0x1.8p23 : 0x1.8p52));  // adding it rounds to a whole number
  V n = y * all(T(1.4426950408889634074)) + magic;
  const Ints<T> k = (Ints<T>)n;
  n -= magic;
  // log 2 in two parts.
  V r = y - n * all(T(SINGLE ? 0.693359375 : 6.93147180369123816490e-01));
  r = r - n * all(T(SINGLE ? -2.12194440e-4f : 1.90821492927058770002e-10));
  V p;
  if constexpr (SINGLE) {
    p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f);
  } else {  // Taylor to the 13th power: |r| <= ln(2) / 2 leaves an error below 1e-17
    p = polynomial(r, 1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                   1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5);
  }
  p = p * r * r + r + all(T(1));
  V out = (V)((Ints<T>)p + (k << (SINGLE ? 23 : 52)));
  out = x < low ? V{} : out;
  out = x > high ? all(INF<T>) : out;
  return x == x ? out : x;
}
ATTLAS_INLINE Vec<float> exp_(Vec<float> x) { return exp_of<float>(x); }
ATTLAS_INLINE Vec<double> exp_(Vec<double> x) { return exp_of<double>(x); }

#if defined(__AVX512F__)
// 2^s, 0 where it is not wanted, from rounded = s + ROUNDING, n = rounded - ROUNDING and r = s - n: 2^n is a number of a
// table in two registers, times a whole power of two, and 2^r, |r| <= 1/64, a short polynomial. A tile unit takes the
// multipliers of one of two ports from the vectors while it works; what only adds, compares or permutes goes on there.
// So as little as can be is multiplied here, and nothing is clamped.
constexpr float ROUNDING = 393216.0f;  // 1.5 * 2^18: adding it rounds to a multiple of 1/32
ATTLAS_INLINE __m512 two_to_the(__mmask16 wanted, __m512 rounded, __m512 n, __m512 r) {
  const __m512 low = _mm512_setr_ps(1.0f, 1.0218971968f, 1.0442737341f, 1.0671404600f, 1.0905077457f, 1.1143867970f,
                                    1.1387885809f, 1.1637248993f, 1.1892070770f, 1.2152473927f, 1.2418577671f, 1.2690509558f,
                                    1.2968395948f, 1.3252366781f, 1.3542555571f, 1.3839099407f);
  const __m512 high = _mm512_setr_ps(1.4142135382f, 1.4451807737f, 1.4768261909f, 1.5091644526f, 1.5422108173f, 1.5759809017f,
                                     1.6104903221f, 1.6457555294f, 1.6817928553f, 1.7186193466f, 1.7562521696f, 1.7947090864f,
                                     1.8340080976f, 1.8741676807f, 1.9152065516f, 1.9571441412f);
  const __m512 t = _mm512_permutex2var_ps(low, _mm512_castps_si512(rounded), high);
  // Within 5.4e-8.
  const __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.24022673f), r, _mm512_set1_ps(0.6931573f));
  return _mm512_maskz_scalef_ps(wanted, _mm512_fmadd_ps(_mm512_mul_ps(p, r), t, t), n);
}
#elif defined(__AVX2__)
// 2^s from rounded = s + ROUNDING and r = s - (rounded - ROUNDING), for s from -126 to 128, and exactly 0 for s = -127; what
// is between them is below the normal numbers, and wrong. 2^s without r is the bits of a number of a table, with the whole
// power of two added to its exponent; 2^r, |r| <= 1/16, is a polynomial within 2.6e-8.
constexpr float ROUNDING = 1572864.0f;  // 1.5 * 2^20: adding it rounds to a multiple of 1/8
ATTLAS_INLINE Vec<float> two_to_the(Vec<float> rounded, Vec<float> r) {
  // The bits of 2^(k/8), less k as the shift below adds it.
  const Ints<float> roots = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
  const Ints<float> root = (Ints<float>)_mm256_permutevar8x32_epi32((__m256i)roots, (__m256i)rounded);
  const Vec<float> t = (Vec<float>)(root + ((Ints<float>)rounded << 20));
  const Vec<float> p = (all(0.055496223f) * r + all(0.24025764f)) * r + all(0.69314724f);
  return t * r * p + t;
}
#endif

// exp(x) of a number that is not above 0 and not NaN, as in a softmax that takes its maximum off first.
ATTLAS_INLINE Vec<float> exp_below(Vec<float> x) {
#if defined(__AVX512F__)
  const __m512 v = (__m512)x;
  const __mmask16 normal = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-87.3365f), _CMP_GT_OQ);
  const __m512 magic = _mm512_set1_ps(ROUNDING), rounded = _mm512_fmadd_ps(v, _mm512_set1_ps(1.44269502f), magic);
  const __m512 n = _mm512_sub_ps(rounded, magic);
  // log2(e) in two parts, so that what is left is exact to the last place.
  __m512 r = _mm512_fmsub_ps(v, _mm512_set1_ps(1.44269502f), n);
  r = _mm512_fmadd_ps(v, _mm512_set1_ps(1.92596303e-8f), r);
  return (Vec<float>)two_to_the(normal, rounded, n, r);
#elif defined(__AVX2__)
  const Vec<float> rounded = x * all(1.44269502f) + all(ROUNDING);
  // log2(e) in two parts, as above.
  const Vec<float> r = x * all(1.92596303e-8f) + (x * all(1.44269502f) - (rounded - all(ROUNDING)));
  return (Vec<float>)((Ints<float>)two_to_the(rounded, r) & (x > all(-87.3365f)));
#else
  return exp_(x);
#endif
}

#if defined(__AVX512F__)
// What x is above the sixteenth below it.
ATTLAS_INLINE __m512d above_sixteenth(__m512d x) { return _mm512_maskz_reduce_pd(__mmask8(-1), x, 0x49); }

// 2^x, given r, which is what x is above the sixteenth below it: that sixteenth from a table of one octave, r by a
// polynomial. 0 where `kept` is not set. Relative error under 2 units in the last place.
ATTLAS_INLINE __m512d power_of_two(__m512d x, __m512d r, __mmask8 kept = __mmask8(-1)) {
  const __m512d low = _mm512_setr_pd(0x1.0000000000000p+0, 0x1.0b5586cf9890fp+0, 0x1.172b83c7d517bp+0,
                                     0x1.2387a6e756238p+0, 0x1.306fe0a31b715p+0, 0x1.3dea64c123422p+0,
                                     0x1.4bfdad5362a27p+0, 0x1.5ab07dd485429p+0);
  const __m512d high = _mm512_setr_pd(0x1.6a09e667f3bcdp+0, 0x1.7a11473eb0187p+0, 0x1.8ace5422aa0dbp+0,
                                      0x1.9c49182a3f090p+0, 0x1.ae89f995ad3adp+0, 0x1.c199bdd85529cp+0,
                                      0x1.d5818dcfba487p+0, 0x1.ea4afa2a490dap+0);
  // 1.5 * 2^48: the last bits of the sum count sixteenths, rounded down as above.
  const __m512d places = _mm512_add_round_pd(x, _mm512_set1_pd(0x1.8p48), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __m512d root = _mm512_permutex2var_pd(low, _mm512_castpd_si512(places), high);
  const __m512d whole = _mm512_maskz_scalef_pd(__mmask8(-1), root, x);
  const __m512d p = (__m512d)polynomial((Vec<double>)r, 1.5726673727170021796e-4, 1.3330915965527891491e-3,
                                        9.618139633536260874e-3, 5.5504108455385987616e-2, 2.4022650696098058421e-1,
                                        6.9314718055993988701e-1);
  return _mm512_maskz_fmadd_pd(kept, _mm512_mul_pd(whole, r), p, whole);
}
#endif

ATTLAS_INLINE Vec<double> exp_below(Vec<double> x) {
#if defined(__AVX512F__)
  const __m512d v = (__m512d)x, log2e = _mm512_set1_pd(0x1.71547652b82fep+0), z = _mm512_mul_pd(v, log2e);
  // What the product and log2(e) itself were rounded by.
  const __m512d rest = _mm512_fmadd_pd(v, _mm512_set1_pd(0x1.777d0ffda0d24p-56), _mm512_fmsub_pd(v, log2e, z));
  const __mmask8 normal = _mm512_cmp_pd_mask(v, _mm512_set1_pd(-708.39), _CMP_GT_OQ);
  return (Vec<double>)power_of_two(z, _mm512_add_pd(above_sixteenth(z), rest), normal);
#else
  return exp_(x);
#endif
}

// log2(x), a few units in the last place; -infinity for what is below the normal numbers. x is finite.
template <class T>
ATTLAS_INLINE Vec<T> log2_(Vec<T> x) {
  using V = Vec<T>;
  constexpr int DIGITS = sizeof(T) == 4 ? 23 : 52;
  const V normal = larger<T>(x, all(std::numeric_limits<T>::min()));
  // The bits of sqrt(1/2), so that what is left of x after its power of 2 lies between that and sqrt(2).
  const Ints<T> bits = (Ints<T>)normal, half = (Ints<T>)all(T(0.70710678118654752440));
  const Ints<T> power = (bits - half) >> DIGITS;
  const V m = (V)(bits - (power << DIGITS)), one = all(T(1));
  // log(m) = 2 artanh(s), |s| < 0.172.
  const V s = (m - one) / (m + one), z = s * s;
  V p{};
#pragma GCC unroll 11
  for (int term = sizeof(T) == 4 ? 4 : 10; term > 0; --term) p = p * z + all(T(2.0 * 1.44269504088896340736 / (2 * term + 1)));
  const V whole = __builtin_convertvector(power, V);
  const V log = whole + (s * all(T(2.0 * 1.44269504088896340736)) + s * (p * z));
  return x < all(std::numeric_limits<T>::min()) ? all(-INF<T>) : log;
}

// A log-sum-exp as weights take it off: its nearest number, and what that lacks. One float of a large one would leave
// each weight of its row wrong by as much as it was rounded.
template <class T>
struct Shift {
  T high, low;

  static Shift of(double x) {
    const T high = T(x);
    return {high, std::isfinite(x) ? T(x - double(high)) : T(0)};
  }
  // Takes all weight from a row that sees no key.
  static Shift none() { return {std::numeric_limits<T>::max(), 0}; }
};

// The weight exp(scale x - lse), and its logarithm in UNIT; factor is scale / UNIT, the shift is what shift_of makes of
// the log-sum-exp. The weight of -infinity is exactly 0.
template <class T>
struct Weight {
  static constexpr double UNIT = 1;
  Vec<T> e, log;

  static Shift<T> shift_of(double lse, T) { return Shift<T>::of(lse); }

  ATTLAS_INLINE Weight(Vec<T> x, Vec<T> factor, Vec<T> high, Vec<T> low) : log(x * factor - high) {
    if constexpr (sizeof(T) == 4) log -= low;
    e = exp_below(log);
    log = larger<T>(log, all(T(-1e4)));  // finite, so that it can be multiplied by a weight of 0
  }
  // total + e log
  ATTLAS_INLINE Vec<T> add_plogp(Vec<T> total) const { return total + e * log; }
};

#if defined(__AVX2__)
// The unit is log 2, which saves the way there. With AVX2, a Flush must live.
template <>
struct Weight<float> {
  static constexpr double UNIT = 0.69314718055994530942;
  using V = Vec<float>;
  V e, log;
#if defined(__AVX512F__)
  __mmask16 normal;  // where the weight is not below the normal numbers
#endif

  // The nearest number in the unit of x, and what it lacks in the unit of the logarithm: the difference is exact where
  // the weight is large, however large the logits are.
  static Shift<float> shift_of(double lse, float scale) {
    const double x = lse / double(scale);
    const float high = float(x);
    return {high, std::isfinite(x) ? float((x - double(high)) * double(scale) / UNIT) : 0.0f};
  }
#if defined(__AVX512F__)
  ATTLAS_INLINE Weight(V x, V factor, V high, V low) {
    const __m512 s = _mm512_fmsub_ps((__m512)(x - high), (__m512)factor, (__m512)low);
    normal = _mm512_cmp_ps_mask(s, _mm512_set1_ps(-126.0f), _CMP_GT_OQ);
    const __m512 magic = _mm512_set1_ps(ROUNDING), rounded = _mm512_add_ps(s, magic), n = _mm512_sub_ps(rounded, magic);
    e = (V)two_to_the(normal, rounded, n, _mm512_sub_ps(s, n));
    log = (V)s;
  }
  ATTLAS_INLINE V add_plogp(V total) const {
    return (V)_mm512_mask3_fmadd_ps((__m512)e, (__m512)log, (__m512)total, normal);
  }
#else
  ATTLAS_INLINE Weight(V x, V factor, V high, V low) : log(larger<float>((x - high) * factor - low, all(-127.0f))) {
    const V rounded = log + all(ROUNDING);
    e = two_to_the(rounded, log - (rounded - all(ROUNDING)));
  }
  ATTLAS_INLINE V add_plogp(V total) const { return total + e * log; }
#endif
};
#endif

// Memory that vectors are read from without crossing a cache line.
template <class T>
struct Aligned {
  T* data = nullptr;

  Aligned() = default;
  explicit Aligned(size_t count) : data(static_cast<T*>(::operator new(count * sizeof(T) + 64, std::align_val_t(64)))) {}
  Aligned(Aligned&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
  Aligned& operator=(Aligned&& other) noexcept {
    std::swap(data, other.data);
    return *this;
  }
  ~Aligned() { ::operator delete(data, std::align_val_t(64)); }
  T* at(size_t i) const { return data + i; }
  T& operator[](size_t i) const { return data[i]; }
};

// Numbers below the normal ones count as 0 while this lives: a processor takes 100 times as long for them.
class Flush {
#if defined(__SSE2__)
  unsigned before = _mm_getcsr();

 public:
  Flush() { _mm_setcsr(before | 0x8040u); }
  ~Flush() { _mm_setcsr(before); }
#else
 public:
  Flush() {}
#endif
  Flush(const Flush&) = delete;
};

// tanh(x), a few units in the last place: a quotient of polynomials, 1 from 7.9 on.
ATTLAS_INLINE Vec<float> tanh_(Vec<float> x) {
  using V = Vec<float>;
  const V end = all(7.90531110763549805f);
  V y = x > end ? end : x;
  y = y < -end ? -end : y;
  const V z = y * y;
  const V p = polynomial(z, -2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f,
                         1.48572235717979e-05f, 6.37261928875436e-04f, 4.89352455891786e-03f);
  const V q = polynomial(z, 1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f);
  return x == x ? y * p / q : x;
}

}  // namespace ATTLAS_ISA
