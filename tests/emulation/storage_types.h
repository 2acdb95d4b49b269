// Types that CUDA adds to C++'s. bfloat16 and half round as in CUDA: to nearest, ties to even.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  explicit BFloat16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    bits = std::isnan(x) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
  }
};

struct Half {
  uint16_t bits = 0;
  Half() = default;
  explicit Half(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    x = std::fabs(x);
    if (std::isnan(x)) {
      bits = 0x7fff;
    } else if (x >= 65520.f) {  // half way past the largest
      bits = sign | 0x7c00;
    } else {
      int exponent = -13;  // up to there the steps are 2^-24
      if (x >= 0x1p-14f) std::frexp(x, &exponent);
      // A fraction of 11 bits, rounded as the default mode says; a carry runs into the exponent
      const int fraction = static_cast<int>(std::nearbyint(std::ldexp(x, 11 - exponent)));
      bits = sign | static_cast<uint16_t>(((exponent + 13) << 10) + fraction);
    }
  }
  explicit operator float() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    const float x = exponent == 31 ? (fraction ? NAN : INFINITY)
                    : exponent == 0
                        ? std::ldexp(static_cast<float>(fraction), -24)
                        : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -x : x;
  }
};
