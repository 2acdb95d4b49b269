// Values of activations of half types on the host: fp32 numbers whose functions need not be right to
// the last bit of fp32. Relative errors stay below 5e-5, a tenth of fp16's last place, before the
// one rounding to the half type. Not for slopes: that of gelu is a sum that cancels.

#pragma once

#include "activation.h"

namespace tp_ext {

struct Short {
  float value;

  Short() = default;
  TP_HD explicit Short(double x) : value(static_cast<float>(x)) {}
  TP_HD explicit Short(float x) : value(x) {}
  TP_HD explicit Short(int x) : value(static_cast<float>(x)) {}
  TP_HD explicit operator float() const { return value; }
};

TP_HD Short operator-(Short a) { return Short(-a.value); }
TP_HD Short operator+(Short a, Short b) { return Short(a.value + b.value); }
TP_HD Short operator-(Short a, Short b) { return Short(a.value - b.value); }
TP_HD Short operator*(Short a, Short b) { return Short(a.value * b.value); }
TP_HD bool operator>(Short a, Short b) { return a.value > b.value; }
TP_HD bool operator<=(Short a, Short b) { return a.value <= b.value; }

// a / b for b in [1, 2^100]: the complement of its bits has about the exponent and mantissa of the
// reciprocal, r is its relative error, and 1 / (1 - r) is (1 + r) (1 + r^2) up to r^4. A vector
// division takes longer than all else in these loops together.
TP_HD float divide_short(float a, float b) {
  uint32_t bits;
  std::memcpy(&bits, &b, sizeof bits);
  bits = 0x7ef30000u - bits;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  const float r = 1.f - b * y;
  y = y + y * r;
  return a * (y + y * (r * r));
}
TP_HD Short fast_divide(Short a, Short b) { return Short(divide_short(a.value, b.value)); }

// 2^t for t <= 0, relative error 3e-6; 0 from -127 on
TP_HD float exp2_short(float t) {
  t = t < -127.f ? -127.f : t;
  const float shifted = t + 12583039.f;  // 1.5 * 2^23 + 127: n + 127 in the low bits
  const float f = t - (shifted - 12583039.f);
  float poly = 9.58280683e-3f;
  poly = poly * f + 5.59064270e-2f;
  poly = poly * f + 2.40240994e-1f;
  poly = poly * f + 6.93124194e-1f;
  poly = poly * f + 1.f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return poly * scale;
}

TP_HD Short exp_down(Short x) { return Short(exp2_short(x.value * 1.44269504f)); }

// As for fp32, R with relative error 2.5e-5
TP_HD Normal<Short> standard_normal(Short x) {
  const float e = exp2_short(x.value * x.value * -0.72134752f);
  float u = ::fabsf(x.value);
  u = u > 14.5f ? 14.5f : u;
  const float p = (0.0628256038f * u + 0.278984475f) * u + 0.500012428f;
  const float q = ((0.157311314f * u + 0.704269101f) * u + 1.35662373f) * u + 1.f;
  const float tail = e * divide_short(p, q), rest = 1.f - tail;
  return {Short(x.value > 0.f ? rest : tail), Short(0.398942280f * e)};
}

// In which numbers the loops of a storage type compute
template <typename T>
struct MathType {
  using type = Short;
};
template <>
struct MathType<float> {
  using type = float;
};
template <>
struct MathType<double> {
  using type = double;
};
template <typename T>
using math_t = typename MathType<T>::type;

}  // namespace tp_ext
