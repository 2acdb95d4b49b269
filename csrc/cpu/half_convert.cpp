// Conversions of half types. No plain loop compiles to the fp16 instructions; they are used
// explicitly where the machine has them.

#include "cpu/half_convert.h"

#include "cpu/bf16_pairs.h"
#include "cpu/fp16_avx512.h"
#include "cpu/multiversion.h"

// As TP_MULTIVERSION: clang may not support the f16c target
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TP_F16C
#include <immintrin.h>
#endif

namespace tp_ext {
namespace {

template <typename T>
inline void widen_loop(const T* __restrict x, float* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(x[i]);
}
template <typename T>
inline void narrow_loop(const float* __restrict x, T* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(x[i]);
}

TP_MULTIVERSION void widen_plain(const Fp16* x, float* y, int64_t n) { widen_loop(x, y, n); }
TP_MULTIVERSION void narrow_plain(const float* x, Fp16* y, int64_t n) { narrow_loop(x, y, n); }

// For n a multiple of the lanes

TP_FP16_AVX512 void widen_lanes(const Fp16* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kFp16Lanes) load_lanes(x + i, y + i);
}
TP_FP16_AVX512 void narrow_lanes(const float* x, Fp16* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kFp16Lanes) store_lanes(y + i, x + i);
}

#ifdef TP_F16C
__attribute__((target("avx,f16c"))) void widen_f16c(const Fp16* x, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(y + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  for (; i < n; ++i) y[i] = static_cast<float>(x[i]);
}
__attribute__((target("avx,f16c"))) void narrow_f16c(const float* x, Fp16* y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) y[i] = static_cast<Fp16>(x[i]);
}
const bool has_f16c = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif

}  // namespace

TP_MULTIVERSION void widen(const Bf16* x, float* y, int64_t n) { widen_loop(x, y, n); }
TP_MULTIVERSION void narrow(const float* x, Bf16* y, int64_t n) { narrow_loop(x, y, n); }

TP_MULTIVERSION void widen_pairs(const Bf16* x, float* __restrict y, int64_t n) {
  const auto* __restrict const pairs = pairs_at(x);
  float* __restrict const odd = y + (n + 1) / 2;
  for (int64_t i = 0; i < n / 2; ++i) y[i] = even_of(word_of(pairs[i]));
  for (int64_t i = 0; i < n / 2; ++i) odd[i] = odd_of(word_of(pairs[i]));
  if (n % 2) y[n / 2] = static_cast<float>(x[n - 1]), odd[n / 2] = 0.f;
}

void widen(const Fp16* x, float* y, int64_t n) {
  const int64_t done = in_fp16_lanes(n);
  if (done > 0) widen_lanes(x, y, done);
  x += done, y += done, n -= done;
#ifdef TP_F16C
  if (has_f16c) return widen_f16c(x, y, n);
#endif
  widen_plain(x, y, n);
}

void narrow(const float* x, Fp16* y, int64_t n) {
  const int64_t done = in_fp16_lanes(n);
  if (done > 0) narrow_lanes(x, y, done);
  x += done, y += done, n -= done;
#ifdef TP_F16C
  if (has_f16c) return narrow_f16c(x, y, n);
#endif
  narrow_plain(x, y, n);
}

}  // namespace tp_ext
