// Numbers of any dtype, read as float or double.
#pragma once

#include "simd.h"

namespace ATTLAS_ISA {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

ATTLAS_INLINE float number(float x) { return x; }
ATTLAS_INLINE double number(double x) { return x; }
ATTLAS_INLINE float number(Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
ATTLAS_INLINE float number(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  // Exponent and fraction moved into place, then scaled by 2^112: exact, subnormal numbers too.
  const uint32_t moved = uint32_t(x.bits & 0x7fff) << 13;
  const uint32_t special = moved >= (31u << 23) ? 0x7f800000u | moved : 0;
  float out;
  std::memcpy(&out, &moved, 4);
  out *= 5.192296858534828e33f;
  if (special) std::memcpy(&out, &special, 4);
  return x.bits & 0x8000 ? -out : out;
#endif
}

// A vector of numbers that lie together.
template <class T>
ATTLAS_INLINE Vec<T> numbers(const T* from) {
  return load(from);
}
ATTLAS_INLINE Ints<float> bits_of(const void* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Ints<float>)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
  return __builtin_convertvector(*static_cast<const Halves*>(from), Ints<float>);
#endif
}
ATTLAS_INLINE Vec<float> numbers(const Bfloat16* from) { return (Vec<float>)(bits_of(from) << 16); }
ATTLAS_INLINE Vec<float> numbers(const Float16* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  const Ints<float> bits = bits_of(from), moved = (bits & 0x7fff) << 13;
  const Ints<float> scaled = (Ints<float>)((Vec<float>)moved * 5.192296858534828e33f);
  return (Vec<float>)((moved >= 31 << 23 ? moved | 0x7f800000 : scaled) | (bits & 0x8000) << 16);
#endif
}

// Rows of numbers, `stride` apart.
template <class T, class Source>
struct Reader {
  const Source* data;
  int64_t stride;

  Reader from(int64_t row) const { return {data + row * stride, stride}; }
  ATTLAS_INLINE T operator()(int64_t i, int64_t t) const { return T(number(data[i * stride + t])); }

  // Up to a vector of numbers from one row; beyond `count` they are 0.
  ATTLAS_INLINE Vec<T> vector(int64_t i, int64_t first, int64_t count) const {
    const Source* from = data + i * stride + first;
#if defined(__AVX512F__)
    const __mmask16 there = count >= 16 ? 0xffff : __mmask16((1u << count) - 1);
    if constexpr (std::is_same_v<Source, float>) return (Vec<T>)_mm512_maskz_loadu_ps(there, from);
    if constexpr (sizeof(Source) == 2) {
      const __m256i half = _mm256_maskz_loadu_epi16(there, from);
      if constexpr (std::is_same_v<Source, Float16>) return (Vec<T>)_mm512_cvtph_ps(half);
      return (Vec<T>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    }
#endif
    return count >= WIDTH<T> ? numbers(from) : beginning(from, count);
  }

 private:
  static __attribute__((noinline)) Vec<T> beginning(const Source* from, int64_t count) {
    Vec<T> out{};
    for (int t = 0; t < count; ++t) out[t] = T(number(from[t]));
    return out;
  }
};

}  // namespace ATTLAS_ISA
