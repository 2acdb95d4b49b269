// bf16 two at a time. A pair of neighbours is a 32-bit word, each half of which becomes an fp32
// number by one shift or mask: a vector of words gives two vectors of numbers, the even and the odd
// elements, without moving a lane. Loops keep column values (a bias, a sum) in the same order: the
// even columns, then the odd ones.
//
// [Note: bf16 is processed in pairs, fp16 by 16]

#pragma once

#include <type_traits>

#include "kernels/half.h"

namespace tp_ext {

struct Bf16Pair {
  Bf16 even, odd;
};

// Whether loops over T take pairs: requires the first element in the low half of the word
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
template <typename T>
constexpr bool kPaired = std::is_same_v<T, Bf16>;
#else
template <typename T>
constexpr bool kPaired = false;
#endif

// The pairs that start at an element, at any address; and the last element of an odd number as a
// pair
TP_HD const Bf16Pair* pairs_at(const Bf16* x) { return reinterpret_cast<const Bf16Pair*>(x); }
TP_HD Bf16Pair* pairs_at(Bf16* x) { return reinterpret_cast<Bf16Pair*>(x); }
TP_HD Bf16Pair padded(Bf16 last) { return {last, Bf16(0.f)}; }

TP_HD uint32_t word_of(const Bf16Pair& pair) {
  uint32_t word;
  std::memcpy(&word, &pair, sizeof word);
  return word;
}
TP_HD float even_of(uint32_t word) { return same_bits<float>(word << 16); }
TP_HD float odd_of(uint32_t word) { return same_bits<float>(word & 0xffff0000u); }

// Rounds to nearest, ties to even, into the upper half. NaN needs no special case if its lower half
// is 0, as for NaNs converted from bf16 and those produced by arithmetic.
TP_HD uint32_t rounded_to_bf16(float x) {
  const uint32_t u = same_bits<uint32_t>(x);
  return u + 0x7fffu + ((u >> 16) & 1u);
}
TP_HD void store_pair(Bf16Pair& pair, float even, float odd) {
  const uint32_t word = (rounded_to_bf16(odd) & 0xffff0000u) | (rounded_to_bf16(even) >> 16);
  std::memcpy(&pair, &word, sizeof word);
}

}  // namespace tp_ext
