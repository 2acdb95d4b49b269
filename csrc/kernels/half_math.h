// Activations of half types on the host: fp32 numbers with functions that are not accurate to the
// last bit of fp32. Errors stay below 1e-5 of the value, 1e-4 far out in the tail of gelu, where
// fp16's last place is 1e-3, and slopes, sums that cancel, below 1e-6 of 1, before the one rounding
// to the half type.
//
// [Note: activations of half types are computed to 1e-5]

#pragma once

#include "activation.h"

namespace tp_ext {

struct ApproxFloat {
  float value;

  ApproxFloat() = default;
  TP_HD explicit ApproxFloat(double x) : value(static_cast<float>(x)) {}
  TP_HD explicit ApproxFloat(float x) : value(x) {}
  TP_HD explicit ApproxFloat(int x) : value(static_cast<float>(x)) {}
  TP_HD explicit operator float() const { return value; }
};

TP_HD ApproxFloat operator-(ApproxFloat a) { return ApproxFloat(-a.value); }
TP_HD ApproxFloat operator+(ApproxFloat a, ApproxFloat b) { return ApproxFloat(a.value + b.value); }
TP_HD ApproxFloat operator-(ApproxFloat a, ApproxFloat b) { return ApproxFloat(a.value - b.value); }
TP_HD ApproxFloat operator*(ApproxFloat a, ApproxFloat b) { return ApproxFloat(a.value * b.value); }
TP_HD bool operator>(ApproxFloat a, ApproxFloat b) { return a.value > b.value; }
TP_HD bool operator<=(ApproxFloat a, ApproxFloat b) { return a.value <= b.value; }

TP_HD ApproxFloat size_of(ApproxFloat x) { return ApproxFloat(size_of(x.value)); }
TP_HD ApproxFloat size_up_to(ApproxFloat x, ApproxFloat most) {
  return ApproxFloat(size_up_to(x.value, most.value));
}
TP_HD ApproxFloat fast_divide(ApproxFloat a, ApproxFloat b) {
  return ApproxFloat(a.value / b.value);
}

// 2^f for |f| <= 1/2, relative error 3e-6
TP_HD float exp2_approx(float f) {
  float poly = 9.58285374e-3f;
  poly = poly * f + 5.59064283e-2f;
  poly = poly * f + 2.40240986e-1f;
  poly = poly * f + 6.93124193e-1f;
  return poly * f + 1.f;
}

TP_HD ApproxFloat exp_minus(ApproxFloat u) {
  const float shifted = u.value * -1.44269502f + kShift;
  return ApproxFloat(exp2_approx(u.value * -1.44269502f - (shifted - kShift)) *
                     power_of_two(shifted));
}
TP_HD ApproxFloat exp_minus_size(ApproxFloat x) {
  return exp_minus(size_up_to(x, ApproxFloat(88.0296919f)));
}
TP_HD ApproxFloat logistic_tail(ApproxFloat u) {
  const ApproxFloat e = exp_minus(u);
  return fast_divide(e, ApproxFloat(1) + e);
}

// As for fp32; relative error of R 4e-6 up to u = 1, where the slope of gelu is a sum that cancels,
// 1e-4 from 4 on
TP_HD Normal<ApproxFloat> standard_normal(ApproxFloat x) {
  const float u = x.value, square = u * u, shifted = square * -0.721347511f + (kShift - 1.f);
  const float rest = square * -0.721347511f - (shifted - (kShift - 1.f));
  const float e = exp2_approx(rest) * power_of_two(shifted);
  const float p = (0.106005171f * u + 0.512238514f) * u + 1.f;
  const float q = ((0.132505502f * u + 0.650503215f) * u + 1.31023386f) * u + 1.f;
  return {ApproxFloat(e * (p / q)), ApproxFloat(0.797884561f * e)};
}
TP_HD ApproxFloat normal_tail(ApproxFloat u) { return standard_normal(u).tail; }

// The number type in which the activation loops of a storage type compute
template <typename T>
struct ActivationType {
  using type = ApproxFloat;
};
template <>
struct ActivationType<float> {
  using type = float;
};
template <>
struct ActivationType<double> {
  using type = double;
};
template <typename T>
using activation_t = typename ActivationType<T>::type;

}  // namespace tp_ext
