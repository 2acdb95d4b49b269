// Weights of 4 bits with AVX-512: a register holds the 16 values that four bits can have, and one
// instruction looks up 16 of them (fp32) or 32 (bf16).

#pragma once

#include <algorithm>

#include "cpu/fp16_avx512.h"
#include "kernels/low_bits.h"

namespace tp_ext {

constexpr int kGroup = 128;  // inputs of a vector of bytes

#if TP_HAS_FP16_AVX512

#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 takes its own intrinsics for it
#endif

TP_FP16_AVX512 TP_INLINE __m512 values_of_4_bits() {
  return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
}

// A block of inputs, of 16 bytes: an even input is in the low bits of its byte
TP_FP16_AVX512 TP_INLINE void dequantize_block(const uint8_t* q, float scale, float* y, int64_t n) {
  const __m512 values = _mm512_mul_ps(values_of_4_bits(), _mm512_set1_ps(scale));
  for (int64_t j = 0; j < n; j += 8) {
    const __m512i wide =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + j)));
    const __m512i places = _mm512_or_si512(wide, _mm512_slli_epi64(wide, 28));
    _mm512_storeu_ps(y + 2 * j, _mm512_permutexvar_ps(places, values));
  }
}
TP_FP16_AVX512 TP_INLINE void dequantize_block(const uint8_t* q, float scale, Bf16* y, int64_t n) {
  const __m512 values = _mm512_mul_ps(values_of_4_bits(), _mm512_set1_ps(scale));
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
  const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16),
                                                _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q),
                                                _mm512_set1_epi32(0x7fc0));
  // Twice: the fifth bit of a place is another weight's
  const __m512i table = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(rounded));
  for (int64_t j = 0; j < n; j += 16) {
    const __m512i wide =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + j)));
    const __m512i places = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 12));
    _mm512_storeu_si512(y + 2 * j, _mm512_permutexvar_epi16(places, table));
  }
}

// The scales of a group, in the lanes of their inputs
TP_FP16_AVX512 TP_INLINE __m512 scales_of_group(const float* s, __mmask16 count, __m512i places) {
  return _mm512_permutexvar_ps(places, _mm512_maskz_loadu_ps(count, s));
}
TP_FP16_AVX512 TP_INLINE __m512 scales_of_group(const Bf16* s, __mmask16 count, __m512i places) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(count, s));
  return _mm512_permutexvar_ps(places, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
}

// Products of kRows rows of the weight with kTokens of x, in the order of grouped(): each sum has
// one order of its additions, whatever the other rows and tokens are
template <int kRows, int kTokens, typename S>
TP_FP16_AVX512 TP_INLINE void products_of_4_bits(const uint8_t* q, const S* scales, const float* x,
                                                 LowBitsRows rows, float* y) {
  const int64_t inputs = rows.inputs(), blocks = rows.blocks(), block = inputs / blocks;
  const int64_t count = std::max<int64_t>(1, kGroup / block);  // of the blocks of a group
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_srli_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(count)), 4);
  const __m512 values = values_of_4_bits();
  __m512 sums[kRows][kTokens] = {};
  for (int64_t i = 0; i < inputs; i += kGroup) {
    __m512i bits[kRows];
    __m512 group[kRows][kTokens];
    for (int r = 0; r < kRows; ++r) bits[r] = _mm512_loadu_si512(q + r * rows.bytes + i / 2);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      __m512 of_x[kTokens];
      for (int t = 0; t < kTokens; ++t) of_x[t] = _mm512_loadu_ps(x + t * inputs + i + 16 * k);
      for (int r = 0; r < kRows; ++r) {
        const __m512 w = _mm512_permutexvar_ps(_mm512_srli_epi32(bits[r], 4 * k), values);
        for (int t = 0; t < kTokens; ++t)
          group[r][t] =
              k == 0 ? _mm512_mul_ps(w, of_x[t]) : _mm512_fmadd_ps(w, of_x[t], group[r][t]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const __m512 scale = scales_of_group(scales + r * blocks + i / block, mask, places);
      for (int t = 0; t < kTokens; ++t)
        sums[r][t] = _mm512_fmadd_ps(group[r][t], scale, sums[r][t]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) y[t * rows.count + r] = _mm512_reduce_add_ps(sums[r][t]);
}

template <int kTokens, typename S>
TP_FP16_AVX512 void rows_of_4_bits(const uint8_t* q, const S* scales, const float* x,
                                   LowBitsRows rows, int64_t from, int64_t to, float* y) {
  constexpr int kRows = kTokens == 1 ? 4 : 2;
  int64_t r = from;
  for (; r + kRows <= to; r += kRows)
    products_of_4_bits<kRows, kTokens>(q + r * rows.bytes, scales + r * rows.blocks(), x, rows,
                                       y + r);
  for (; r < to; ++r)
    products_of_4_bits<1, kTokens>(q + r * rows.bytes, scales + r * rows.blocks(), x, rows, y + r);
}

#ifndef __clang__
#pragma GCC diagnostic pop
#endif

#endif

// Whether products_of_4_bits takes these rows: a vector of bytes has whole blocks, whose scales are
// of whole lanes
inline bool are_in_groups(LowBitsRows rows) {
  if (!TP_HAS_FP16_AVX512 || !has_avx512() || !rows.four()) return false;
  const int64_t inputs = rows.inputs(), block = 2 * rows.bytes_of_block;
  if (inputs == 0 || inputs % kGroup != 0) return false;
  return block % kGroup == 0 || (block >= 8 && kGroup % block == 0);
}

}  // namespace tp_ext
