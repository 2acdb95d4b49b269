// Draws Philox words with the widest instructions that the machine has.

#include "cpu/philox_simd.h"

namespace tp_ext {
namespace {

// Writes the words of `counters` counters, and arbitrary values after them to the end of a group
using Draw = void(const PhiloxKeys& keys, uint64_t counter, int64_t counters, uint32_t* words);

void draw_plain(const PhiloxKeys& keys, uint64_t counter, int64_t counters,
                uint32_t* __restrict words) {
  const uint64_t seed = keys.seed();
  for (int64_t c = 0; c < counters; ++c) {
    const PhiloxWords four = philox4x32(seed, counter + c);
    for (int k = 0; k < 4; ++k) words[4 * c + k] = four.w[k];
  }
}

#ifdef TP_PHILOX_X86
TP_AVX512F void draw_avx512(const PhiloxKeys& keys, uint64_t counter, int64_t counters,
                            uint32_t* words) {
  const SharedRounds shared(keys, counter >> 32);
  U64x8 p = first_products512(counter);
  for (int64_t i = 0; i < counters; i += 16, p += 16 * kMul0, words += 64) {
    const Words512 w = words_of_16(p, keys, shared);
    _mm512_storeu_si512(words, w.a), _mm512_storeu_si512(words + 16, w.b);
    _mm512_storeu_si512(words + 32, w.c), _mm512_storeu_si512(words + 48, w.d);
  }
}

TP_AVX2 void draw_avx2(const PhiloxKeys& keys, uint64_t counter, int64_t counters,
                       uint32_t* words) {
  const SharedRounds shared(keys, counter >> 32);
  U64x4 p = ((counter & kLow) + U64x4{0, 2, 1, 3}) * kMul0;
  for (int64_t i = 0; i < counters; i += 8, p += 8 * kMul0) {
    Lanes256 a = two_rounds(p, keys, shared), b = two_rounds(p + 4 * kMul0, keys, shared);
    round(a, keys.k0[2], shared.k1), round(b, keys.k0[2], shared.k1);
    for (int r = 3; r < 9; ++r) round(a, keys.k0[r], keys.k1[r]), round(b, keys.k0[r], keys.k1[r]);
    store(a, keys.k0[9], keys.k1[9], words + 4 * i),
        store(b, keys.k0[9], keys.k1[9], words + 4 * i + 16);
  }
}

Draw* const best = has_avx512()                     ? draw_avx512
                   : __builtin_cpu_supports("avx2") ? draw_avx2
                                                    : draw_plain;
#else
constexpr Draw* best = draw_plain;
#endif

}  // namespace

void draw_words(const PhiloxKeys& keys, uint64_t counter, int64_t counters, WordBuffer& buffer) {
  uint32_t* words = buffer.words;
  while (counters > 0) {  // counters of one call have the same high half
    const int64_t left = (int64_t{1} << 32) - static_cast<uint32_t>(counter);
    const int64_t part = std::min(counters, left);
    constexpr int64_t kFew = 4;  // counters: below this a vector is slower
    (part <= kFew ? draw_plain : best)(keys, counter, part, words);
    counter += part, counters -= part, words += 4 * part;
  }
}

}  // namespace tp_ext
