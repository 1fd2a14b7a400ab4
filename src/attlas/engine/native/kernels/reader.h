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
  // Exponent and fraction moved into place, then scaled by 2^112: exact, subnormal numbers too.
  const uint32_t moved = uint32_t(x.bits & 0x7fff) << 13;
  const uint32_t special = moved >= (31u << 23) ? 0x7f800000u | moved : 0;
  float out;
  std::memcpy(&out, &moved, 4);
  out *= 5.192296858534828e33f;
  if (special) std::memcpy(&out, &special, 4);
  return x.bits & 0x8000 ? -out : out;
}

// Rows of numbers, `stride` apart.
template <class T, class Source>
struct Reader {
  const Source* data;
  int64_t stride;

  ATTLAS_INLINE T operator()(int64_t i, int64_t t) const { return T(number(data[i * stride + t])); }

#if defined(__AVX512F__)
  // Up to a vector of numbers from one row; beyond `count` they are 0.
  ATTLAS_INLINE __m512 vector(int64_t i, int64_t first, int64_t count) const {
    const Source* from = data + i * stride + first;
    const __mmask16 there = count >= 16 ? 0xffff : __mmask16((1u << count) - 1);
    if constexpr (sizeof(Source) == 4) {
      return _mm512_maskz_loadu_ps(there, from);
    } else if constexpr (sizeof(Source) == 2) {
      const __m256i half = _mm256_maskz_loadu_epi16(there, from);
      if constexpr (std::is_same_v<Source, Float16>) return _mm512_cvtph_ps(half);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    } else {
      return _mm512_setzero_ps();
    }
  }
#endif

  // Whether all of `rows` rows of `size` numbers are finite and small enough that no product overflows.
  bool in_range(int64_t rows, int64_t size, T limit) const {
    int bad = 0;  // counted without a branch, so that the loop becomes vectors
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t t = 0; t < size; ++t) bad |= !(std::fabs((*this)(i, t)) < limit);
    return bad == 0;
  }
};

}  // namespace ATTLAS_ISA
