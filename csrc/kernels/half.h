// bfloat16 and float16 for the CPU loops: 16 bits, and conversions in plain integer and fp32
// arithmetic, without a branch, so that loops over them vectorise on every target. torch's own
// scalar conversions do not.

#pragma once

#include "scalar.h"

namespace tp_ext {

// Both convert from fp32 with rounding to nearest, ties to even; NaN becomes a quiet NaN.
struct Bf16 {
  uint16_t bits;

  Bf16() = default;
  TP_HD explicit Bf16(float x) {
    const uint32_t u = same_bits<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
  }
  TP_HD explicit operator float() const {
    return same_bits<float>(static_cast<uint32_t>(bits) << 16);
  }
};

struct Fp16 {
  uint16_t bits;

  Fp16() = default;
  // Adding a power of two whose last bit is the last bit of the result gives the required rounding.
  // It is 2^13 times the power of x, and never below that of the subnormals: 2^-1.
  TP_HD explicit Fp16(float x) {
    const int32_t u = same_bits<int32_t>(x), magnitude = u & 0x7fffffff;
    // From 65536 on everything is infinite
    const int32_t finite = magnitude > 0x47800000 ? 0x47800000 : magnitude;
    int32_t power = (finite & 0x7f800000) + (13 << 23);
    power = power < 0x3f000000 ? 0x3f000000 : power;
    const int32_t sum = same_bits<int32_t>(same_bits<float>(finite) + same_bits<float>(power));
    // The last bits of the sum are the mantissa with its leading bit, which adds 1 to the exponent
    const int32_t value = (power >> 13) - (126 << 10) + (sum & 0xfff);
    const int32_t quiet = magnitude > 0x7f800000 ? 0x7e00 : value;
    bits = static_cast<uint16_t>(((u >> 16) & 0x8000) | quiet);
  }
  // A subnormal is its last bits times 2^-24; any other has 112 added to its exponent, and 112 more
  // if it is infinite or NaN.
  TP_HD explicit operator float() const {
    const int32_t u = static_cast<int16_t>(bits), magnitude = u & 0x7fff;
    const int32_t wide = (magnitude << 13) + (112 << 23);
    const float small = same_bits<float>(magnitude | 0x3f000000) - 0.5f;
    const int32_t normal = magnitude > 0x7bff ? wide + (112 << 23) : wide;
    const int32_t result = magnitude < 0x400 ? same_bits<int32_t>(small) : normal;
    return same_bits<float>(result | static_cast<int32_t>(u & 0x80000000));
  }
};

}  // namespace tp_ext
