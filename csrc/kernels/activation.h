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

// 1 / (1 + e^-x) and its derivative, from e^-|x|: no overflow, and nothing cancels on either side
template <typename A>
struct Logistic {
  A value, slope;
};
template <typename A>
TP_HD Logistic<A> logistic(A x) {
  const A e = exp_down(x > A(0) ? -x : x);
  const A r = fast_divide(A(1), A(1) + e), rest = e * r;
  return {x > A(0) ? r : rest, rest * r};
}

// x / (1 + e^-z): one rounding less than x times the logistic of z
template <typename A>
TP_HD A times_logistic(A x, A z) {
  const A e = exp_down(z > A(0) ? -z : z);
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

// Phi(-u) = e^(-u^2 / 2) R(u) for u >= 0, R = erfcx(u / sqrt 2) / 2 as a rational minimax with
// relative error 6e-9 on [0, 14.5], beyond which the exponential is 0 (u is held there, so that 0 *
// R is 0). All coefficients are positive: nothing cancels. NaN stays NaN through the exponential.
TP_HD Normal<float> standard_normal(float x) {
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
    const A z = x * (A(kA) + A(kB) * x * x), e = exp_down(z > A(0) ? -z : z);
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
