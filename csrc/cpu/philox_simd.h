// Philox words in vectors with a 64-bit lane per counter. A multiplication reads only the low
// halves of the lanes, so the high halves may hold anything: a round of 8 counters is 2
// multiplications, 2 shifts and 2 three-way xors. Compilers do not generate that from philox4x32;
// hence the intrinsics.

#pragma once

#include "cpu/multiversion.h"
#include "cpu/philox_words.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define TP_PHILOX_X86
#include <immintrin.h>
#ifndef __clang__  // gcc 12 reports undefined values inside its own intrinsics as errors
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define TP_AVX512F __attribute__((target("avx512f")))
#define TP_AVX2 __attribute__((target("avx2")))

namespace tp_ext {

constexpr uint64_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u, kLow = 0xFFFFFFFFu;

// Values shared by the counters with high half `high`. Two of a counter's four numbers start as 0,
// so the first two rounds have two multiplications that depend on the counter: q, and p = kMul0 *
// low, which grows by kMul0 from counter to counter:
//
//             c0             c1      c2                c3
//   round 0   high ^ k0      0       hi(p) ^ k1        lo(p)
//   round 1   hi(q) ^ k0     lo(q)   lo(p) ^ mixed     lo(m), put into the k1 of round 2
//
// with q = kMul1 * (hi(p) ^ k1), m = kMul0 * (high ^ k0), mixed = hi(m) ^ k1.
struct SharedRounds {
  uint64_t mixed, k1;
  SharedRounds(const PhiloxKeys& keys, uint64_t high) {
    const uint64_t m = kMul0 * (high ^ keys.k0[0]);
    mixed = m >> 32 ^ keys.k1[1];
    k1 = (m & kLow) ^ keys.k1[2];
  }
};

typedef uint64_t U64x8 __attribute__((vector_size(64)));
struct Lanes512 {
  U64x8 c0, c1, c2, c3;
};
struct Words512 {
  __m512i a, b, c, d;
};

TP_AVX512F TP_INLINE U64x8 mul(U64x8 a, uint64_t b) {
  return (U64x8)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
}

// Even lanes hold counters 0 to 3, odd ones 4 to 7: unpacking pairs of words then restores the
// order of the counters.
TP_AVX512F TP_INLINE U64x8 first_products512(uint64_t counter) {
  return ((counter & kLow) + U64x8{0, 4, 1, 5, 2, 6, 3, 7}) * kMul0;
}

TP_AVX512F TP_INLINE Lanes512 two_rounds(U64x8 p, const PhiloxKeys& keys,
                                         const SharedRounds& shared) {
  const U64x8 q = mul(p >> 32 ^ keys.k1[0], kMul1);
  return {q >> 32 ^ keys.k0[1], q, p ^ shared.mixed, U64x8{}};
}

TP_AVX512F TP_INLINE void round(Lanes512& c, uint64_t k0, uint64_t k1) {
  const U64x8 p0 = mul(c.c0, kMul0), p1 = mul(c.c2, kMul1);
  c = {p1 >> 32 ^ c.c1 ^ k0, p1, p0 >> 32 ^ c.c3 ^ k1, p0};
}

// Words 0, 1 of a counter in one lane, 2, 3 in another
TP_AVX512F TP_INLINE void last_round(const Lanes512& c, uint64_t k0, uint64_t k1, __m512i& low,
                                     __m512i& high) {
  const U64x8 p0 = mul(c.c0, kMul0), p1 = mul(c.c2, kMul1);
  const auto w01 = (__m512i)((p1 >> 32 | p1 << 32) ^ ((c.c1 ^ k0) & kLow));
  const auto w23 = (__m512i)((p0 >> 32 | p0 << 32) ^ ((c.c3 ^ k1) & kLow));
  low = _mm512_unpacklo_epi64(w01, w23), high = _mm512_unpackhi_epi64(w01, w23);
}

// The 64 words of 16 counters: two vectors, each hiding the latencies of the other
TP_AVX512F TP_INLINE Words512 words_of_16(U64x8 p, const PhiloxKeys& keys,
                                          const SharedRounds& shared) {
  Lanes512 first = two_rounds(p, keys, shared), second = two_rounds(p + 8 * kMul0, keys, shared);
  round(first, keys.k0[2], shared.k1), round(second, keys.k0[2], shared.k1);
  for (int r = 3; r < 9; ++r)
    round(first, keys.k0[r], keys.k1[r]), round(second, keys.k0[r], keys.k1[r]);
  Words512 words;
  last_round(first, keys.k0[9], keys.k1[9], words.a, words.b);
  last_round(second, keys.k0[9], keys.k1[9], words.c, words.d);
  return words;
}

// The same with four lanes
typedef uint64_t U64x4 __attribute__((vector_size(32)));
struct Lanes256 {
  U64x4 c0, c1, c2, c3;
};

TP_AVX2 TP_INLINE U64x4 mul(U64x4 a, uint64_t b) {
  return (U64x4)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
}

TP_AVX2 TP_INLINE Lanes256 two_rounds(U64x4 p, const PhiloxKeys& keys, const SharedRounds& shared) {
  const U64x4 q = mul(p >> 32 ^ keys.k1[0], kMul1);
  return {q >> 32 ^ keys.k0[1], q, p ^ shared.mixed, U64x4{}};
}

TP_AVX2 TP_INLINE void round(Lanes256& c, uint64_t k0, uint64_t k1) {
  const U64x4 p0 = mul(c.c0, kMul0), p1 = mul(c.c2, kMul1);
  c = {p1 >> 32 ^ (c.c1 ^ k0), p1, p0 >> 32 ^ (c.c3 ^ k1), p0};
}

TP_AVX2 TP_INLINE void store(Lanes256 c, uint64_t k0, uint64_t k1, uint32_t* words) {
  const auto p0 = (__m256i)mul(c.c0, kMul0), p1 = (__m256i)mul(c.c2, kMul1);
  constexpr int kSwap = 0xB1;  // swaps the halves of a lane
  const auto w01 = _mm256_shuffle_epi32(p1, kSwap) ^ (__m256i)((c.c1 ^ k0) & kLow);
  const auto w23 = _mm256_shuffle_epi32(p0, kSwap) ^ (__m256i)((c.c3 ^ k1) & kLow);
  _mm256_storeu_si256((__m256i*)words, _mm256_unpacklo_epi64(w01, w23));
  _mm256_storeu_si256((__m256i*)(words + 8), _mm256_unpackhi_epi64(w01, w23));
}

}  // namespace tp_ext

#endif
