// y = residual + dropout(x + bias), per element: the sum is scaled by 1 / (1 - p) if the element is
// kept, and by 0 otherwise. As in torch, 0 times NaN or infinity stays NaN.
//
// An element is kept if a 32-bit number, as a fraction of 2^32, is at least p. A counter serves
// eight elements, and i % 8 is the element's place among its half words. These are the upper 16
// bits of the numbers, and decide unless they equal those of the threshold. Then, once in 65536,
// the lower 16 bits decide, from the same place of the counter in stream 1. So p is met to 2^-32
// with half the arithmetic of one word per element.

#pragma once

#include "philox.h"

namespace tp_ext {

constexpr int kCounterHalves = 8;

TP_HD uint32_t half_word(const PhiloxWords& words, int k) {
  return words.w[k / 2] >> (k % 2 * 16) & 0xFFFF;
}

template <typename A>
struct Dropout {
  uint32_t upper, lower;  // of the threshold
  A scale;

  // p = 1 drops all: the largest number passes the threshold, so the scale is 0 too
  explicit Dropout(double p) : scale(p < 1 ? static_cast<A>(1 / (1 - p)) : A(0)) {
    const double t = p * 4294967296.0;
    const uint32_t threshold = t >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(t);
    upper = threshold >> 16, lower = threshold & 0xFFFF;
  }

  TP_HD uint32_t threshold() const { return upper << 16 | lower; }
  TP_HD bool keeps_all() const { return (upper | lower) == 0; }  // then nothing need be drawn
  TP_HD A factor(bool kept) const { return kept ? scale : A(0); }

  // Bit k: whether element 8 counter + k is kept
  TP_HD uint32_t kept(uint64_t seed, uint64_t counter) const {
    const PhiloxWords first = philox4x32(seed, counter);
    uint32_t above = 0, equal = 0;
    for (int k = 0; k < kCounterHalves; ++k) {
      above |= static_cast<uint32_t>(half_word(first, k) > upper) << k;
      equal |= static_cast<uint32_t>(half_word(first, k) == upper) << k;
    }
    if (equal == 0) return above;
    const PhiloxWords second = philox4x32(seed, counter, 1);
    for (int k = 0; k < kCounterHalves; ++k)
      above |= static_cast<uint32_t>(half_word(second, k) >= lower) << k & equal;
    return above;
  }
};

}  // namespace tp_ext
