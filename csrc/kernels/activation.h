// The activations and their derivatives, one source for CPU and CUDA.
//
//   gelu(x) = x Phi(x), gelu_tanh(x) = x sigmoid(2 z) with z = sqrt(2 / pi) (x + 0.044715 x^3),
//   relu, silu(x) = x sigmoid(x)
//
// Everything is written with e^x and one division: 1 + erf and 1 + tanh, the textbook forms, cancel
// for negative x, where these keep their relative accuracy; value and slope share the exponential;
// and fp32 host loops vectorise.

#pragma once

#include <string_view>

#include "scalar.h"

namespace tp_ext {

// a / b for b in [1, inf]; on the GPU the short form, 2 ulp, enough beside the error of e^x
TP_HD float fast_divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}
TP_HD double fast_divide(double a, double b) { return a / b; }

// |x|, at most `most`, and that for NaN: as whole numbers, whose minimum is one instruction
TP_HD float size_up_to(float x, float most) {
  int32_t bits, limit;
  std::memcpy(&bits, &x, sizeof bits);
  std::memcpy(&limit, &most, sizeof limit);
  bits &= 0x7fffffff;
  bits = bits < limit ? bits : limit;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// 2^n for shifted = n + 1.5 * 2^23 + 127, n from -127 on: n + 127, in the low bits, is the exponent
// field as it stands, and -127 makes it 0
constexpr float kShift = 12583039.f;
TP_HD float power_of_two(float shifted) {
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// 2^f for |f| <= 1/2, relative error 2e-9 before rounding
TP_HD float exp2_of_rest(float f) {
  float poly = 1.53533625e-4f;
  poly = poly * f + 1.33988748e-3f;
  poly = poly * f + 9.61843736e-3f;
  poly = poly * f + 5.55033247e-2f;
  poly = poly * f + 2.40226479e-1f;
  poly = poly * f + 6.93147203e-1f;
  return poly * f + 1.f;
}

// e^-|x|, 0 from 87.7 on. On the host 0 for NaN, too: who asks multiplies by x.
TP_HD double exp_minus_size(double x) { return exp_of(x > 0. ? -x : x); }
TP_HD float exp_minus_size(float x) {
#ifdef __CUDA_ARCH__
  return exp_down(x > 0.f ? -x : x);
#else
  const float u = size_up_to(x, 88.0296919f);
  const float shifted = u * -1.44269502f + kShift;
  // log2 e in two parts: all digits of f, where multiplication and addition are one operation
  const float f = (u * -1.44269502f - (shifted - kShift)) + u * -1.92596299e-8f;
  return exp2_of_rest(f) * power_of_two(shifted);
#endif
}

// 1 / (1 + e^-x) and its derivative, from e^-|x|: no overflow, and nothing cancels on either side
template <typename A>
struct Logistic {
  A value, slope;
};
template <typename A>
TP_HD Logistic<A> logistic(A x) {
  const A e = exp_minus_size(x);
  const A r = fast_divide(A(1), A(1) + e), rest = e * r;
  return {x > A(0) ? r : rest, rest * r};
}

// x / (1 + e^-z): one rounding less than x times the logistic of z
template <typename A>
TP_HD A times_logistic(A x, A z) {
  const A e = exp_minus_size(z);
  return fast_divide(z > A(0) ? x : x * e, A(1) + e);
}

// Distribution function and density of the standard normal
template <typename A>
struct Normal {
  A cdf, density;
};

TP_HD Normal<double> standard_normal(double x) {
  return {0.5 * ::erfc(-0.7071067811865476 * x), 0.3989422804014327 * ::exp(-0.5 * x * x)};
}

// Phi(-u) = e^(-u^2 / 2) R(u) for u >= 0, R = erfcx(u / sqrt 2) / 2 as a rational minimax; all
// coefficients are positive: nothing cancels. u is held where the exponential is 0 (so that 0 * R is
// 0). NaN stays NaN through the exponential on the GPU, through who multiplies by x on the host.
// Relative error of R: on the GPU 6e-9; on the host, where operations count, 4e-8 (1 + u^2), the
// latter no more than the rounding of u^2 makes of the exponential.
TP_HD Normal<float> standard_normal(float x) {
#ifdef __CUDA_ARCH__
  const float e = exp_down(-0.5f * x * x);
  float u = ::fabsf(x);
  u = u > 14.5f ? 14.5f : u;
  float p = 0.00411627716f;
  p = p * u + 0.0406330232f;
  p = p * u + 0.183234552f;
  p = p * u + 0.438294188f;
  p = p * u + 0.5f;
  float q = 0.010317857f;
  q = q * u + 0.101858332f;
  q = q * u + 0.469469079f;
  q = q * u + 1.20250075f;
  q = q * u + 1.67447336f;
  q = q * u + 1.f;
#else
  const float u = size_up_to(x, 13.27f), square = u * u;
  const float shifted = square * -0.721347511f + kShift;
  const float e = exp2_of_rest(square * -0.721347511f - (shifted - kShift)) * power_of_two(shifted);
  float p = 0.0138937934f;
  p = p * u + 0.105973174f;
  p = p * u + 0.33800489f;
  p = p * u + 0.5f;
  float q = 0.0348402765f;
  q = q * u + 0.265195972f;
  q = q * u + 0.887964777f;
  q = q * u + 1.47389266f;
  q = q * u + 1.f;
#endif
  const float tail = e * fast_divide(p, q), rest = 1.f - tail;
  return {x > 0.f ? rest : tail, 0.398942280f * e};
}

template <typename A>
struct ValueSlope {
  A value, slope;
};

// An activation: its value, value and slope together, and backward = grad * slope
struct Gelu {
  template <typename A>
  TP_HD static A value(A x) {
    return x * standard_normal(x).cdf;
  }
  template <typename A>
  TP_HD static ValueSlope<A> value_slope(A x) {
    const Normal<A> normal = standard_normal(x);
    return {x * normal.cdf, normal.cdf + x * normal.density};
  }
  template <typename A>
  TP_HD static A backward(A grad, A x) {
    return grad * value_slope(x).slope;
  }
};

struct GeluTanh {
  static constexpr double kA = 1.5957691216057308, kB = 0.07135481627260025;  // 2 z = x (a + b x^2)
  template <typename A>
  TP_HD static A value(A x) {
    const A z = x * (A(kA) + A(kB) * x * x), e = exp_minus_size(z);
    const A held = x > A(1e9) ? A(1e9) : x;  // 0 of it, not 0 * inf
    const A rest = fast_divide(held * e, A(1) + e);
    return z > A(0) ? x - rest : rest;  // x / (1 + e) would round twice
  }
  template <typename A>
  TP_HD static ValueSlope<A> value_slope(A x) {
    const A a = A(kA), b = A(kB);
    A square = x * x;
    square = square > A(1e9) ? A(1e9) : square;  // the slope of a huge x is 1, not 0 * inf
    const Logistic<A> s = logistic(x * (a + b * square));
    return {x * s.value, s.value + x * s.slope * (a + A(3) * b * square)};
  }
  template <typename A>
  TP_HD static A backward(A grad, A x) {
    return grad * value_slope(x).slope;
  }
};

struct Silu {
  template <typename A>
  TP_HD static A value(A x) {
    return times_logistic(x, x);
  }
  template <typename A>
  TP_HD static ValueSlope<A> value_slope(A x) {
    const Logistic<A> s = logistic(x);
    return {x * s.value, s.value + x * s.slope};
  }
  template <typename A>
  TP_HD static A backward(A grad, A x) {
    return grad * value_slope(x).slope;
  }
};

// As in torch: NaN stays NaN, the slope at 0 is 0, and a closed unit passes 0 whatever the gradient
struct Relu {
  template <typename A>
  TP_HD static A value(A x) {
    return x <= A(0) ? A(0) : x;
  }
  template <typename A>
  TP_HD static A backward(A grad, A x) {
    return x <= A(0) ? A(0) : grad;
  }
};

// Calls f(Activation{}) for the activation of that name; false if there is none
constexpr const char* kActivations = "gelu, gelu_tanh, relu, silu";
template <typename F>
bool dispatch_activation(std::string_view name, F f) {
  if (name == "gelu") return f(Gelu{}), true;
  if (name == "gelu_tanh") return f(GeluTanh{}), true;
  if (name == "relu") return f(Relu{}), true;
  if (name == "silu") return f(Silu{}), true;
  return false;
}

constexpr const char* kGatedActivations = "swiglu, geglu";
template <typename F>
bool dispatch_gated_activation(std::string_view name, F f) {
  if (name == "swiglu") return f(Silu{}), true;
  if (name == "geglu") return f(Gelu{}), true;
  return false;
}

}  // namespace tp_ext
