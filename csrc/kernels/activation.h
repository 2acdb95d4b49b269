// The activations and their derivatives, one source for CPU and CUDA.
//
//   gelu(x) = x Phi(x), gelu_tanh(x) = x sigmoid(2 z) with z = sqrt(2 / pi) (x + 0.044715 x^3),
//   relu, silu(x) = x sigmoid(x)
//
// All formulas use e^x and one division: 1 + erf and 1 + tanh, the textbook forms, cancel for
// negative x, where these keep their relative accuracy; value and slope share the exponential; and
// fp32 host loops vectorise. Near 0 the factor is 1/2 and only its rounding matters: there each
// form rounds it no more often than 1 + erf and 1 + tanh do.

#pragma once

#include <string_view>

#include "scalar.h"

namespace tp_ext {

// a / b for b in [1, inf]; on the GPU the short form, 2 ulp: small next to the error of e^x
TP_HD float fast_divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}
TP_HD double fast_divide(double a, double b) { return a / b; }

// |x|
TP_HD double size_of(double x) { return ::fabs(x); }
TP_HD float size_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0x7fffffff;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// |x|, at most `most`, also for NaN: compared as integers, whose minimum is one instruction
TP_HD double size_up_to(double x, double most) { return size_of(x) < most ? size_of(x) : most; }
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

// 2^f - 1 for |f| <= 1/2, error 2e-9 before rounding
TP_HD float exp2_less_1(float f) {
  float poly = 1.53533625e-4f;
  poly = poly * f + 1.33988748e-3f;
  poly = poly * f + 9.61843736e-3f;
  poly = poly * f + 5.55033247e-2f;
  poly = poly * f + 2.40226479e-1f;
  poly = poly * f + 6.93147203e-1f;
  return poly * f;
}

// e^-u = power (1 + rest) for u in [0, 88.3], power 2^n or, from 87.7 on, 0
struct ExpParts {
  float power, rest;
};
TP_HD ExpParts exp_parts(float u) {
  const float shifted = u * -1.44269502f + kShift;
  // log2 e in two parts: all digits of f, where multiplication and addition are one operation
  const float f = (u * -1.44269502f - (shifted - kShift)) + u * -1.92596299e-8f;
  return {power_of_two(shifted), exp2_less_1(f)};
}

// e^-|x|, 0 from 87.7 on. On the host 0 for NaN too: callers multiply by x.
TP_HD double exp_minus_size(double x) { return exp_of(-size_of(x)); }
TP_HD float exp_minus_size(float x) {
#ifdef __CUDA_ARCH__
  return exp_down(-size_of(x));
#else
  const ExpParts e = exp_parts(size_up_to(x, 88.0296919f));
  return (e.rest + 1.f) * e.power;
#endif
}

// 1 / (1 + e^u) for u >= 0, in fp32 up to 88.3. There 1 + rest is rounded to a multiple of 2^-23:
// near 0 the sum 1 + e^-u is then exact, which saves the quotient one rounding.
TP_HD double logistic_tail(double u) {
  const double e = exp_of(-u);
  return e / (1. + e);
}
TP_HD float logistic_tail(float u) {
  const ExpParts parts = exp_parts(u);
  const float e = (parts.rest + 2.f) * parts.power - parts.power;
  return fast_divide(e, 1.f + e);
}

// The logistic function 1 / (1 + e^-x) from its tail at -|x|, and its derivative
template <typename A>
struct Logistic {
  A value, slope;
};
template <typename A>
TP_HD Logistic<A> logistic(A x, A tail) {
  const A rest = A(1) - tail;
  return {x > A(0) ? rest : tail, tail * rest};
}

// x / (1 + e^-z): one rounding less than x times the logistic of z
template <typename A>
TP_HD A times_logistic(A x, A z) {
  const A e = exp_minus_size(z);
  return fast_divide(z > A(0) ? x : x * e, A(1) + e);
}

// Phi(-u) and the density of the standard normal, u >= 0
template <typename A>
struct Normal {
  A tail, density;
};

TP_HD double normal_tail(double u) { return 0.5 * ::erfc(0.7071067811865476 * u); }
TP_HD Normal<double> standard_normal(double u) {
  return {normal_tail(u), 0.3989422804014327 * ::exp(-0.5 * u * u)};
}

// In fp32, for u up to 13.23, where the exponential is 0: Phi(-u) = e^(-u^2 / 2) / 2 R(u) with R(u)
// = erfcx(u / sqrt 2) = 1 - u S(u) / Q(u), S and Q monic, a rational minimax of relative error 5e-8
// (1 + u^2), as large as the effect of rounding u^2 on the exponential, and 1.4e-8 up to 0.1. The
// rounding errors of S, Q and their quotient are multiplied by u: near 0 only the result of each of
// the two functions is rounded.
TP_HD float normal_ratio(float u) {
  float s = u + 6.90138102f;
  s = s * u + 19.7992001f;
  s = s * u + 23.5347061f;
  float q = u + 7.69891262f;
  q = q * u + 25.9531765f;
  q = q * u + 43.2982674f;
  q = q * u + 29.4964085f;
  return 1.f - fast_divide(s, q) * u;
}
// e^(-u^2 / 2) / 2
TP_HD ExpParts half_normal_exp(float u) {
  const float square = u * u, shifted = square * -0.721347511f + (kShift - 1.f);
  const float rest = square * -0.721347511f - (shifted - (kShift - 1.f));
  return {power_of_two(shifted), exp2_less_1(rest)};
}
TP_HD float normal_tail(float u) {
  const ExpParts e = half_normal_exp(u);
  const float r = normal_ratio(u);
  return (r * e.rest + r) * e.power;
}
TP_HD Normal<float> standard_normal(float u) {
#ifdef __CUDA_ARCH__
  const float e = u < 13.23f ? 0.5f * exp_down(-0.5f * u * u) : 0.f;  // fewer registers
#else
  const ExpParts parts = half_normal_exp(u);
  const float e = (parts.rest + 1.f) * parts.power;
#endif
  return {e * normal_ratio(u), 0.797884561f * e};
}

template <typename A>
struct ValueSlope {
  A value, slope;
};

// x G(x) for a distribution function G with G(-x) = 1 - G(x), from its tail G(-u) <= 1/2, u = |x|
// or less where the tail is 0: max(x, 0) - u tail. It keeps the digits of the tail, and rounds once
// where x (1 - tail) rounds twice. The maximum as a sum of halves is NaN for -inf, as the formula
// is.
template <typename A>
TP_HD A from_tail(A x, A u, A tail) {
  const A half = A(0.5) * x;
  return (half + size_of(half)) - u * tail;
}

// An activation: its value, value and slope together, and backward = grad * slope
struct Gelu {
  // |x|, no more than where the tail is 0
  template <typename A>
  TP_HD static A held(A x) {
    return size_up_to(x, A(sizeof(A) == 8 ? 40. : 13.23));
  }
  template <typename A>
  TP_HD static A value(A x) {
    const A u = held(x);
    return from_tail(x, u, normal_tail(u));
  }
  template <typename A>
  TP_HD static ValueSlope<A> value_slope(A x) {
    const Normal<A> normal = standard_normal(held(x));
    const A cdf = x > A(0) ? A(1) - normal.tail : normal.tail;
    return {x * cdf, cdf + x * normal.density};
  }
  template <typename A>
  TP_HD static A backward(A grad, A x) {
    return grad * value_slope(x).slope;
  }
};

struct GeluTanh {
  static constexpr double kA = 1.5957691216057308, kB = 0.07135481627260025;  // 2 z = x (a + b x^2)
  // |x|, no more than where the tail is 0: 2 z = 88.004 in fp32
  template <typename A>
  TP_HD static A held(A x) {
    return size_up_to(x, A(sizeof(A) == 8 ? 30. : 10.03));
  }
  template <typename A>
  TP_HD static A value(A x) {
    const A u = held(x);
    return from_tail(x, u, logistic_tail(u * (A(kA) + A(kB) * u * u)));
  }
  template <typename A>
  TP_HD static ValueSlope<A> value_slope(A x) {
    const A a = A(kA), b = A(kB), u = held(x), square = u * u;
    const Logistic<A> s = logistic(x, logistic_tail(u * (a + b * square)));
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
    const A e = exp_minus_size(x);
    const Logistic<A> s = logistic(x, fast_divide(e, A(1) + e));
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
