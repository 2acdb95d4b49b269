// fp16 in the loop itself, where the machine has AVX-512: 16 elements become an array of fp32 by one
// instruction and come back by one. gcc makes neither of a plain loop, but keeps such an array in a
// register when the loop over it is one vector. Elsewhere fp16 is staged (convert.h): the same bits.

#pragma once

#include "cpu/fetch.h"
#include "kernels/half.h"

// As TP_SIMD. The attribute has to stand on the function that loops; its lambdas would not have it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define TP_FP16_LANES __attribute__((target("arch=x86-64-v4")))
#include <immintrin.h>

namespace tp_ext {

constexpr int kLanes16 = 16;
static_assert(kSweep % kLanes16 == 0);

inline bool has_fp16_lanes() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma");
}

TP_FP16_LANES TP_INLINE void load_lanes(const Fp16* x, float (&lanes)[kLanes16]) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  _mm512_storeu_ps(lanes, _mm512_maskz_cvtph_ps(0xffff, half));
}
TP_FP16_LANES TP_INLINE void store_lanes(Fp16* y, const float (&lanes)[kLanes16]) {
  const __m512 wide = _mm512_loadu_ps(lanes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y),
                      _mm512_maskz_cvtps_ph(0xffff, wide, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace tp_ext
#endif
