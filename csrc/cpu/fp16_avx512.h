// fp16 in the loop itself, where the machine has AVX-512: 16 elements become an array of fp32 by one
// instruction and come back by one. gcc makes neither of a plain loop, but keeps such an array in a
// register when the loop over it is one vector. Elsewhere fp16 is staged (half_convert.h): the same bits.

#pragma once

#include "cpu/multiversion.h"
#include "cpu/prefetch.h"
#include "kernels/half.h"

// As TP_SIMD. The attribute has to stand on the function that loops; its lambdas would not have it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define TP_HAS_FP16_LANES 1
#define TP_FP16_LANES __attribute__((target("arch=x86-64-v4")))
#include <immintrin.h>
#else
#define TP_HAS_FP16_LANES 0
#define TP_FP16_LANES
#endif

namespace tp_ext {

constexpr int kLanes16 = 16;
static_assert(kSweep % kLanes16 == 0);

// How many of n elements go in lanes; with none, no function of lanes may be called
inline int64_t in_fp16_lanes(int64_t n) {
  return TP_HAS_FP16_LANES && has_avx512() ? n - n % kLanes16 : 0;
}

TP_FP16_LANES TP_INLINE void load_lanes(const Fp16* x, float* lanes) {
#if TP_HAS_FP16_LANES
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  _mm512_storeu_ps(lanes, _mm512_maskz_cvtph_ps(0xffff, half));
#else
  for (int l = 0; l < kLanes16; ++l) lanes[l] = static_cast<float>(x[l]);
#endif
}
TP_FP16_LANES TP_INLINE void store_lanes(Fp16* y, const float* lanes) {
#if TP_HAS_FP16_LANES
  const __m512 wide = _mm512_loadu_ps(lanes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y),
                      _mm512_maskz_cvtps_ph(0xffff, wide, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int l = 0; l < kLanes16; ++l) y[l] = static_cast<Fp16>(lanes[l]);
#endif
}

}  // namespace tp_ext
