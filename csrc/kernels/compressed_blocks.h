// Blocks of compressed gradients: a scale in fp32 and a code of 8 bits for each value, scale first,
//
//   value ~ decode(code) scale,   scale = max |value| / kMax, 1 where that is 0
//
// with codes that are int8 or e4m3 (OCP 8-bit floating point). A block with a NaN or an Inf has the
// scale NaN, and so decodes to NaN.

#pragma once

#include <limits>

#include "float8.h"

namespace tp_ext {

constexpr int64_t kScaleBytes = sizeof(float);

struct Int8Code {
  static constexpr float kMax = 127;

  // |q| <= kMax; rounds half to even: the sum has a unit in the last place of 1
  static TP_HD uint8_t encode(float q) {
    return static_cast<uint8_t>(same_bits<uint32_t>(q + 12582912.f));
  }
  static TP_HD float decode(uint8_t code) { return static_cast<int8_t>(code); }
};

struct E4m3Code : E4m3 {
  static TP_HD float decode(uint8_t code) {
    const uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    const float normal = same_bits<float>((magnitude << 20) + (120u << 23));
    const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : normal;
    return same_bits<float>(same_bits<uint32_t>(value) | sign);
  }
};

// |x|, and Inf for NaN, which a maximum would drop
TP_HD float magnitude_of(float x) {
  const float size = same_bits<float>(same_bits<uint32_t>(x) & 0x7fffffffu);
  return size <= std::numeric_limits<float>::max() ? size : std::numeric_limits<float>::infinity();
}

// largest: of the magnitudes of a block
template <typename Code>
TP_HD float scale_of_block(float largest) {
  if (largest > std::numeric_limits<float>::max()) return std::numeric_limits<float>::quiet_NaN();
  const float scale = largest / Code::kMax;
  return scale == 0.f ? 1.f : scale;
}

// The code of q = x / scale; any for a scale of NaN
template <typename Code>
TP_HD uint8_t code_of(float q) {
  q = q < Code::kMax ? q : Code::kMax;
  q = q > -Code::kMax ? q : -Code::kMax;
  return Code::encode(q);
}

// The product, rounded: fused with a sum it would not be the number that other ranks decode. On the
// host a choice lies between both.
template <typename Code>
TP_HD float decoded(uint8_t code, float scale) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(Code::decode(code), scale);
#else
  const float value = Code::decode(code) * scale;
  return value == value ? value : std::numeric_limits<float>::quiet_NaN();
#endif
}

// What x has lost by its code: 0 where that is not finite
template <typename Code>
TP_HD float error_of(float x, uint8_t code, float scale) {
  const float error = x - decoded<Code>(code, scale);
  return magnitude_of(error) <= std::numeric_limits<float>::max() ? error : 0.f;
}

}  // namespace tp_ext
