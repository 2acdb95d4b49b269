// OCP 8-bit floating point from fp32: e4m3 (float8_e4m3fn, to 448) and e5m2 (to 57344), rounded
// half to even, in plain loops' arithmetic.

#pragma once

#include "scalar.h"

namespace tp_ext {

// |q| <= kMax or NaN
struct E4m3 {
  static constexpr float kMax = 448;

  static TP_HD uint8_t encode(float q) {
    const uint32_t u = same_bits<uint32_t>(q), magnitude = u & 0x7fffffffu;
    const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    const uint32_t normal = (rounded >> 20) - (120u << 3);
    // Below 2^-6 values are multiples of 2^-9, the unit in the last place of 2^14
    const uint32_t subnormal = same_bits<uint32_t>(same_bits<float>(magnitude) + 16384.f) & 0xffu;
    const uint32_t finite = magnitude < 0x3c800000u ? subnormal : normal;
    return static_cast<uint8_t>((magnitude > 0x7f800000u ? 0x7fu : finite) | ((u >> 24) & 0x80u));
  }
};

struct E5m2 {
  static constexpr float kMax = 57344;

  static TP_HD uint8_t encode(float q) {
    const uint32_t u = same_bits<uint32_t>(q), magnitude = u & 0x7fffffffu;
    const uint32_t rounded = magnitude + 0xfffffu + ((magnitude >> 21) & 1u);
    const uint32_t normal = (rounded >> 21) - (112u << 2);
    // Below 2^-14 values are multiples of 2^-16, the unit in the last place of 2^7
    const uint32_t subnormal = same_bits<uint32_t>(same_bits<float>(magnitude) + 128.f) & 0xffu;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    return static_cast<uint8_t>((magnitude > 0x7f800000u ? 0x7fu : finite) | ((u >> 24) & 0x80u));
  }
};

// max / amax, with amax at least 1e-12; 1 where it is 0
TP_HD float float8_scale(float most, float amax) {
  const double least = amax < 1e-12f ? 1e-12 : static_cast<double>(amax);
  return amax == 0.f ? 1.f : static_cast<float>(most / least);
}

// NaN for what is not finite
template <typename Format>
TP_HD uint8_t float8_of(float x, float scale) {
  float q = x * scale;
  q = q < -Format::kMax ? -Format::kMax : q;
  q = q > Format::kMax ? Format::kMax : q;
  return Format::encode(x - x == 0.f ? q : x - x);
}

}  // namespace tp_ext
