// Uniform and normal values from Philox words, rounded once to the storage type.
//
//   uniform  low + (high - low) u,   u = (word + 1/2) / 2^32
//   normal   mean + std z,           z by Box and Muller, in fp64 whatever the storage type
//   truncated normal                 truncated_normal.h
//
// Words 0, 1 of a counter are radius and angle of its elements 0 and 1; words 2, 3 those of 2
// and 3. Logarithm, sine and cosine are polynomials (coefficients: fdlibm) in explicit fma: every
// operation is correctly rounded by IEEE 754, so each CPU and each GPU draws the same bits, and the
// host's loops vectorise.
//
// [Note: elements are numbered in the full tensor]

#pragma once

#include "cos_sin.h"
#include "philox.h"

namespace tp_ext {

// From fp64 through fp32, so that a half-precision weight is the rounded fp32 one
template <typename T>
TP_HD T round_to(double x) {
  return from_acc<T>(static_cast<acc_t<T>>(x));
}

TP_HD double from_bits(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// (word + 1/2) / 2^32 and (rest + 1/2) / 2^30, exact as in plain arithmetic, without a conversion of
// an integer, which takes a GPU the time of eight instructions: the word is the mantissa of
// 2^52 + word, or of 2^52 + 2^31 + rest
TP_HD double unit_from_bits(uint32_t word) {
  return (from_bits(0x4330000000000000ull | word) - 4503599627370495.5) * 2.3283064365386963e-10;
}
TP_HD double turn_from_bits(int32_t rest) {
  const uint32_t above = static_cast<uint32_t>(rest) ^ 0x80000000u;
  return ::fma(from_bits(0x4330000000000000ull | above) - 4503601774854144.0,
               9.31322574615478515625e-10, 4.656612873077392578125e-10);
}

// log(x) for positive normal x = 2^k m, m in [sqrt(1/2), sqrt(2)): with f = m - 1, s = f / (2 + f),
// log(m) = f - f^2 / 2 + s (f^2 / 2 + R(s^2)). Error below 1 ulp.
TP_HD double log_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint64_t biased = (bits - 0x3fe6a09e667f3bcdull + (1024ull << 52)) >> 52;  // k + 1024
  const double f = from_bits(bits - ((biased - 1024) << 52)) - 1.0;
  const double k = from_bits(0x4330000000000000ull | biased) - 4503599627371520.0;  // 2^52 + 1024
  const double s = f / (2.0 + f), z = s * s, half = 0.5 * f;
  double r = 1.479819860511658591e-01;
  r = ::fma(r, z, 1.531383769920937332e-01);
  r = ::fma(r, z, 1.818357216161805012e-01);
  r = ::fma(r, z, 2.222219843214978396e-01);
  r = ::fma(r, z, 2.857142874366239149e-01);
  r = ::fma(r, z, 3.999999999940941908e-01);
  r = ::fma(r, z, 6.666666666666735130e-01);
  const double tail = ::fma(s, ::fma(half, f, r * z), k * 1.90821492927058770002e-10);
  return ::fma(k, 6.93147180369123816490e-01, f - ::fma(half, f, -tail));
}

// cos and sin of 2 pi (word + 1/2) / 2^32. Quadrant and remainder come exactly, from the integer.
TP_HD CosSin cos_sin_turn(uint32_t word) {
  const uint32_t quadrant = ((word >> 29) + 1) >> 1;  // the nearest, 0..4
  const int32_t rest = static_cast<int32_t>(word - (quadrant << 30));
#ifdef __CUDA_ARCH__
  const double turn = turn_from_bits(rest);
#else
  const double turn = (rest + 0.5) * 9.31322574615478515625e-10;
#endif
  return cos_sin_from(quadrant, turn * 1.57079632679489661923);
}

// unit_uniform, on a GPU by bits
TP_HD double unit_of(uint32_t word) {
#ifdef __CUDA_ARCH__
  return unit_from_bits(word);
#else
  return unit_uniform(word);
#endif
}

// The distributions: each maps a word, or the two words of a pair of elements, to values.

struct Uniform {
  static constexpr bool kPairs = false;
  double low, range;
  TP_HD double operator()(uint32_t word) const { return ::fma(range, unit_of(word), low); }
};

struct ValuePair {
  double even, odd;
};

struct Normal {
  static constexpr bool kPairs = true;
  double mean, std;
  TP_HD ValuePair operator()(uint32_t radius_word, uint32_t angle_word) const {
    const double radius = ::sqrt(-2.0 * log_of(unit_of(radius_word)));
    const CosSin direction = cos_sin_turn(angle_word);
    return {::fma(std, radius * direction.cos, mean), ::fma(std, radius * direction.sin, mean)};
  }
};

}  // namespace tp_ext
