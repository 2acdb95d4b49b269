// Activations of half types on the GPU, in fp32 by the shortest forms that keep the bounds of
// half_math.h: 2^x and 1 / x as the GPU has them, without their care for subnormal numbers, in
// place of e^x, quotients and rational functions. Numbers below 2^-126 become 0.
//
// [Note: activations of half types are computed to 1e-5]

#pragma once

#include <type_traits>

#include "activation.h"

namespace tp_ext {

TP_HD float brief_exp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return x < -126.f ? 0.f : std::exp2(x);
#endif
}
TP_HD float brief_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return x > 0x1p126f ? 0.f : 1.f / x;
#endif
}

// |x|, part of the instruction that reads it
TP_HD float brief_size(float x) { return ::fabsf(x); }

constexpr float kLog2E = 1.44269504f;

// The logistic function and its derivative, from e = e^-|z|
TP_HD Logistic<float> brief_logistic(float z, float e) {
  const float rest = brief_reciprocal(1.f + e), tail = e * rest;
  return {z > 0.f ? rest : tail, tail * rest};
}

// e^(-u^2 / 2) and Phi(-u), u = |x|: the latter by a polynomial in t = 1 / (1 + p u), which tends to
// 0 as R(u) = e^(u^2 / 2) Phi(-u) does. Relative error of R: 2e-6 up to 1, where the slope of gelu
// is a sum that cancels, 2e-5 from 3 on.
struct BriefNormal {
  float exponential, tail;
};
TP_HD BriefNormal brief_normal(float x) {
  const float u = brief_size(x), scaled = u * 0.849321800f;  // sqrt(log2(e) / 2)
  const float t = brief_reciprocal(0.295f * u + 1.f);
  float r = -0.0834204778f;
  r = r * t + 0.250126738f;
  r = r * t - 0.0529761000f;
  r = r * t + 0.159998960f;
  r = r * t + 0.107867160f;
  r = r * t + 0.118403898f;
  const float e = brief_exp2(-scaled * scaled);
  return {e, e * (r * t)};
}

template <typename Act>
struct Brief : Act {};

template <>
struct Brief<Gelu> {
  TP_HD static float value(float x) {
    const float tail = brief_normal(x).tail;
    return x * (x > 0.f ? 1.f - tail : tail);
  }
  TP_HD static ValueSlope<float> value_slope(float x) {
    const BriefNormal normal = brief_normal(x);
    const float cdf = x > 0.f ? 1.f - normal.tail : normal.tail;
    return {x * cdf, x * (normal.exponential * 0.398942280f) + cdf};
  }
  TP_HD static float backward(float grad, float x) { return grad * value_slope(x).slope; }
};

template <>
struct Brief<GeluTanh> {
  static constexpr float kA = float(GeluTanh::kA), kB = float(GeluTanh::kB);
  static constexpr float kA2 = float(GeluTanh::kA * -1.4426950408889634);  // for 2^x
  static constexpr float kB2 = float(GeluTanh::kB * -1.4426950408889634);
  // x^2, no more than where the tail is 0
  TP_HD static float square(float x) {
    const float square = x * x;
    return square < 106.f ? square : 106.f;
  }
  TP_HD static float value(float x) {
    return x * brief_reciprocal(1.f + brief_exp2(x * (square(x) * kB2 + kA2)));
  }
  TP_HD static ValueSlope<float> value_slope(float x) {
    const float q = square(x);
    const Logistic<float> s = brief_logistic(x, brief_exp2(brief_size(x) * (q * kB2 + kA2)));
    return {x * s.value, s.slope * x * (q * (3.f * kB) + kA) + s.value};
  }
  TP_HD static float backward(float grad, float x) { return grad * value_slope(x).slope; }
};

template <>
struct Brief<Silu> {
  TP_HD static float value(float x) { return x * brief_reciprocal(1.f + brief_exp2(x * -kLog2E)); }
  TP_HD static ValueSlope<float> value_slope(float x) {
    const Logistic<float> s = brief_logistic(x, brief_exp2(brief_size(x) * -kLog2E));
    return {x * s.value, x * s.slope + s.value};
  }
  TP_HD static float backward(float grad, float x) { return grad * value_slope(x).slope; }
};

// The form of an activation for a storage type on the GPU
template <typename Act, typename T>
using DeviceForm = std::conditional_t<sizeof(T) == 2, Brief<Act>, Act>;

}  // namespace tp_ext
