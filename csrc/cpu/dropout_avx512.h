// Dropout in AVX-512: 128 elements at a time, from the counters of their words to the stored
// result. At both ends of a chunk, with fewer elements, loads and stores are masked.

#pragma once

#include "cpu/bf16_pairs.h"
#include "cpu/dropout_pass.h"
#include "cpu/philox_simd.h"

#ifdef TP_PHILOX_X86

#define TP_V4 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

namespace tp_ext {

// 32 elements in fp32: the first and the last 16, or, in pairs (bf16_pairs.h), the even and the odd
// ones
struct Fp32x32 {
  __m512 a, b;
};

// Loads 32 elements, or only those in the mask; the others are not read

template <bool kAll>
TP_V4 TP_INLINE Fp32x32 load_32(const float* x, __mmask32 mask) {
  if (kAll) return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
  return {_mm512_maskz_loadu_ps(mask & 0xFFFF, x), _mm512_maskz_loadu_ps(mask >> 16, x + 16)};
}
template <bool kAll>
TP_V4 TP_INLINE Fp32x32 load_32(const Bf16* x, __mmask32 mask) {
  const __m512i pairs = kAll ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16(mask, x);
  const __m512i odd = _mm512_and_si512(pairs, _mm512_set1_epi32(~0xFFFF));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(odd)};
}
template <bool kAll>
TP_V4 TP_INLINE __m512 load_16(const Fp16* x, __mmask16 mask) {
  return _mm512_cvtph_ps(kAll ? _mm256_loadu_si256((const __m256i*)x)
                              : _mm256_maskz_loadu_epi16(mask, x));
}
template <bool kAll>
TP_V4 TP_INLINE Fp32x32 load_32(const Fp16* x, __mmask32 mask) {
  return {load_16<kAll>(x, mask & 0xFFFF), load_16<kAll>(x + 16, mask >> 16)};
}

// Stores likewise

template <bool kAll>
TP_V4 TP_INLINE void store_32(float* y, const Fp32x32& v, __mmask32 mask) {
  _mm512_mask_storeu_ps(y, kAll ? 0xFFFF : mask & 0xFFFF, v.a);
  _mm512_mask_storeu_ps(y + 16, kAll ? 0xFFFF : mask >> 16, v.b);
}
// rounded_to_bf16 of bf16_pairs.h; its remark on NaN holds here too
TP_V4 TP_INLINE __m512i rounded_to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i below = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
  return _mm512_mask_add_epi32(below, odd, below, one);
}
template <bool kAll>
TP_V4 TP_INLINE void store_32(Bf16* y, const Fp32x32& v, __mmask32 mask) {
  constexpr int kUpperOfSecond = 0xF8;  // a | (b & c)
  const __m512i pairs =
      _mm512_ternarylogic_epi32(_mm512_srli_epi32(rounded_to_bf16(v.a), 16), rounded_to_bf16(v.b),
                                _mm512_set1_epi32(~0xFFFF), kUpperOfSecond);
  _mm512_mask_storeu_epi16(y, kAll ? ~__mmask32{0} : mask, pairs);
}
template <bool kAll>
TP_V4 TP_INLINE void store_32(Fp16* y, const Fp32x32& v, __mmask32 mask) {
  const __m256i low = _mm512_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(y, kAll ? 0xFFFF : mask & 0xFFFF, low);
  _mm256_mask_storeu_epi16(y + 16, kAll ? 0xFFFF : mask >> 16, high);
}

// Converts from memory order to the order of T's elements, and back

// Takes a from the places `first` of both vectors, b from the places `step` further on
TP_V4 TP_INLINE Fp32x32 permuted(const Fp32x32& v, __m512i first, int step) {
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(step));
  return {_mm512_permutex2var_ps(v.a, first, v.b), _mm512_permutex2var_ps(v.a, second, v.b)};
}
template <typename T>
TP_V4 TP_INLINE Fp32x32 in_order_of(const Fp32x32& v) {
  if constexpr (!kPaired<T>) return v;
  return permuted(v, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  1);
}
template <typename T>
TP_V4 TP_INLINE Fp32x32 from_order_of(const Fp32x32& v) {
  if constexpr (!kPaired<T>) return v;
  return permuted(v, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), 8);
}

// The scale for the elements that are kept, 0 for the others: decided by their half words, unless
// one of them equals that of the threshold
template <typename T>
TP_V4 TP_INLINE Fp32x32 factors_of(__m512i words, const Dropout<float>& dropout) {
  const __m512 scale = _mm512_set1_ps(dropout.scale);
  if constexpr (kPaired<T>) {  // compares upper halves, whatever the lower ones hold
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(dropout.upper << 16));
    const __mmask16 even = _mm512_cmpgt_epu32_mask(_mm512_slli_epi32(words, 16), upper);
    const __mmask16 odd = _mm512_cmpgt_epu32_mask(words, upper);
    return {_mm512_maskz_mov_ps(even, scale), _mm512_maskz_mov_ps(odd, scale)};
  } else {
    const __m512i upper = _mm512_set1_epi16(static_cast<short>(dropout.upper));
    const __mmask32 kept = _mm512_cmpgt_epu16_mask(words, upper);
    return {_mm512_maskz_mov_ps(kept & 0xFFFF, scale),
            _mm512_maskz_mov_ps(_kshiftri_mask32(kept, 16), scale)};
  }
}
// The same from the bits of `kept`, in memory order
template <typename T>
TP_V4 TP_INLINE Fp32x32 factors_of_bits(__mmask32 kept, const Dropout<float>& dropout) {
  const __m512 scale = _mm512_set1_ps(dropout.scale);
  return in_order_of<T>(
      {_mm512_maskz_mov_ps(kept & 0xFFFF, scale), _mm512_maskz_mov_ps(kept >> 16, scale)});
}

template <typename T>
struct DropoutPointers {
  const T* x;
  const float* bias;
  const T* residual;
  T* y;
  float* sums;
};

template <bool kAll, bool kBias, bool kResidual, bool kSums, typename T>
TP_V4 TP_INLINE void drop_32(const DropoutPointers<T>& to, int64_t i, const Fp32x32& factors,
                             __mmask32 mask) {
  Fp32x32 v = load_32<kAll>(to.x + i, mask);
  if constexpr (kBias) {
    const Fp32x32 bias = in_order_of<T>(load_32<kAll>(to.bias + i, mask));
    v = {_mm512_add_ps(v.a, bias.a), _mm512_add_ps(v.b, bias.b)};
  }
  if constexpr (kResidual) {
    const Fp32x32 rest = load_32<kAll>(to.residual + i, mask);
    v = {_mm512_fmadd_ps(v.a, factors.a, rest.a), _mm512_fmadd_ps(v.b, factors.b, rest.b)};
  } else {
    v = {_mm512_mul_ps(v.a, factors.a), _mm512_mul_ps(v.b, factors.b)};
  }
  if constexpr (kSums) {
    const Fp32x32 sums = load_32<kAll>(to.sums + i, mask), own = from_order_of<T>(v);
    store_32<kAll>(to.sums + i, {_mm512_add_ps(sums.a, own.a), _mm512_add_ps(sums.b, own.b)}, mask);
  }
  store_32<kAll>(to.y + i, v, mask);
}

// The bits [from, to) of 32
inline uint32_t bits_between(int64_t from, int64_t to) {
  if (from >= 32 || to <= 0) return 0;
  const uint32_t below = to >= 32 ? ~uint32_t{0} : (uint32_t{1} << to) - 1;
  return from > 0 ? below & ~uint32_t{0} << from : below;
}

// The elements [from, end) of 128, if the lower half of some number has to decide
template <bool kBias, bool kResidual, bool kSums, typename T>
__attribute__((noinline)) TP_V4 void drop_with_ties(const DropoutPointers<T>& to, int64_t i,
                                                    uint64_t seed, uint64_t counter,
                                                    const Dropout<float>& dropout, int64_t from,
                                                    int64_t end) {
  for (int64_t j = 0; j < 128; j += 32) {
    uint32_t kept = 0;
    for (int c = 0; c < 4; ++c)
      kept |= dropout.kept(seed, counter + j / kCounterHalves + c) << (kCounterHalves * c);
    drop_32<false, kBias, kResidual, kSums>(to, i + j, factors_of_bits<T>(kept, dropout),
                                            bits_between(from - j, end - j));
  }
}

template <bool kBias, bool kResidual, bool kSums, typename T>
TP_V4 void dropout_in_lanes(const DropoutPass<T>& pass) {
  const int64_t skip = static_cast<int64_t>(pass.first % kCounterHalves), end = skip + pass.n;
  const DropoutPointers<T> to{pass.x - skip, kBias ? pass.bias - skip : nullptr,
                              kResidual ? pass.residual - skip : nullptr, pass.y - skip,
                              kSums ? pass.sums - skip : nullptr};
  const PhiloxKeys& keys = pass.keys;
  const Dropout<float> dropout = pass.dropout;
  const uint64_t counter = pass.first / kCounterHalves;
  const SharedRounds shared(keys, counter >> 32);
  const __m512i upper = _mm512_set1_epi16(static_cast<short>(dropout.upper));
  U64x8 p = first_products512(counter);
  Words512 next = words_of_16(p, keys, shared);
  for (int64_t i = 0; i < end; i += 128) {
    const Words512 w = next;
    if (i + 128 < end) {  // drawn here, so that drawing overlaps the latencies of the elements
      p += 16 * kMul0;
      next = words_of_16(p, keys, shared);
    }
    const __mmask32 equal =
        _mm512_cmpeq_epu16_mask(w.a, upper) | _mm512_cmpeq_epu16_mask(w.b, upper) |
        _mm512_cmpeq_epu16_mask(w.c, upper) | _mm512_cmpeq_epu16_mask(w.d, upper);
    const int64_t from = i ? 0 : skip;
    if (__builtin_expect(equal != 0, 0)) {
      drop_with_ties<kBias, kResidual, kSums>(to, i, keys.seed(), counter + i / kCounterHalves,
                                              dropout, from, end - i);
    } else if (from == 0 && i + 128 <= end) {
      drop_32<true, kBias, kResidual, kSums>(to, i, factors_of<T>(w.a, dropout), 0);
      drop_32<true, kBias, kResidual, kSums>(to, i + 32, factors_of<T>(w.b, dropout), 0);
      drop_32<true, kBias, kResidual, kSums>(to, i + 64, factors_of<T>(w.c, dropout), 0);
      drop_32<true, kBias, kResidual, kSums>(to, i + 96, factors_of<T>(w.d, dropout), 0);
    } else {
      const __m512i words[] = {w.a, w.b, w.c, w.d};
      for (int part = 0; part < 4; ++part) {
        const __mmask32 mask = bits_between(from - 32 * part, end - i - 32 * part);
        if (mask == 0) continue;
        drop_32<false, kBias, kResidual, kSums>(to, i + 32 * part,
                                                factors_of<T>(words[part], dropout), mask);
      }
    }
  }
}

}  // namespace tp_ext

#undef TP_V4
#endif
