// Activations of half types on the host: fp32 numbers whose functions need not be right to the last
// bit of fp32. Errors stay below 1e-5 of the value, 1e-4 far out in the tail of gelu, where fp16's
// last place is 1e-3, and slopes, sums that cancel, below 1e-6 of 1, before the one rounding to the
// half type.

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

TP_HD Short size_of(Short x) { return Short(size_of(x.value)); }
TP_HD Short size_up_to(Short x, Short most) { return Short(size_up_to(x.value, most.value)); }
TP_HD Short fast_divide(Short a, Short b) { return Short(a.value / b.value); }

// 2^f for |f| <= 1/2, relative error 3e-6
TP_HD float exp2_short(float f) {
  float poly = 9.58285374e-3f;
  poly = poly * f + 5.59064283e-2f;
  poly = poly * f + 2.40240986e-1f;
  poly = poly * f + 6.93124193e-1f;
  return poly * f + 1.f;
}

TP_HD Short exp_minus(Short u) {
  const float shifted = u.value * -1.44269502f + kShift;
  return Short(exp2_short(u.value * -1.44269502f - (shifted - kShift)) * power_of_two(shifted));
}
TP_HD Short exp_minus_size(Short x) { return exp_minus(size_up_to(x, Short(88.0296919f))); }
TP_HD Short logistic_tail(Short u) {
  const Short e = exp_minus(u);
  return fast_divide(e, Short(1) + e);
}

// As for fp32; relative error of R 4e-6 up to u = 1, where the slope of gelu is a sum that cancels,
// 1e-4 from 4 on
TP_HD Normal<Short> standard_normal(Short x) {
  const float u = x.value, square = u * u, shifted = square * -0.721347511f + (kShift - 1.f);
  const float rest = square * -0.721347511f - (shifted - (kShift - 1.f));
  const float e = exp2_short(rest) * power_of_two(shifted);
  const float p = (0.106005171f * u + 0.512238514f) * u + 1.f;
  const float q = ((0.132505502f * u + 0.650503215f) * u + 1.31023386f) * u + 1.f;
  return {Short(e * (p / q)), Short(0.797884561f * e)};
}
TP_HD Short normal_tail(Short u) { return standard_normal(u).tail; }

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
