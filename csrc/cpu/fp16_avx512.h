// fp16 inside the loop, with AVX-512: one instruction converts 16 elements to an array of fp32, one
// converts it back. gcc generates neither from a plain loop, but keeps such an array in a register
// when the loop over it is one vector. Without AVX-512 fp16 goes through a buffer (half_convert.h):
// the same bits.

#pragma once

#include "cpu/multiversion.h"
#include "cpu/prefetch.h"
#include "kernels/half.h"

// As TP_MULTIVERSION. The attribute belongs on the looping function; its lambdas would not inherit
// it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define TP_HAS_FP16_AVX512 1
#define TP_FP16_AVX512 __attribute__((target("arch=x86-64-v4")))
#include <immintrin.h>
#else
#define TP_HAS_FP16_AVX512 0
#define TP_FP16_AVX512
#endif

namespace tp_ext {

constexpr int kFp16Lanes = 16;
static_assert(kSweep % kFp16Lanes == 0);

// How many of n elements fill whole lanes; if none, functions on lanes must not be called
inline int64_t in_fp16_lanes(int64_t n) {
  return TP_HAS_FP16_AVX512 && has_avx512() ? n - n % kFp16Lanes : 0;
}

TP_FP16_AVX512 TP_INLINE void load_lanes(const Fp16* x, float* lanes) {
#if TP_HAS_FP16_AVX512
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  _mm512_storeu_ps(lanes, _mm512_maskz_cvtph_ps(0xffff, half));
#else
  for (int l = 0; l < kFp16Lanes; ++l) lanes[l] = static_cast<float>(x[l]);
#endif
}
TP_FP16_AVX512 TP_INLINE void store_lanes(Fp16* y, const float* lanes) {
#if TP_HAS_FP16_AVX512
  const __m512 wide = _mm512_loadu_ps(lanes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y),
                      _mm512_maskz_cvtps_ph(0xffff, wide, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int l = 0; l < kFp16Lanes; ++l) y[l] = static_cast<Fp16>(lanes[l]);
#endif
}

}  // namespace tp_ext
