// Truncated normal values by the inverse of the distribution function: each element is a function
// of one Philox word, u = (word + 1/2) / 2^32, and lies in [low, high] despite rounding.
//
// In units of the standard deviation the bounds are a < b. Q(z) is the probability of more than z.
// A bound is reached from the tail on its own side, so that no small probability is a difference of
// large ones:
//
//   a < 0 < b   q = Q(|a|) + u (Q(a) - Q(b)), or, where that is above 1/2, its complement
//   0 <= a      q = Q(a) t,  t = 1 - u + u r,  r = Q(b) / Q(a);  b <= 0 is its mirror image
//
// and z = Q^-1(q) by Wichura's rational functions (AS 241, Applied Statistics 37, 1988), of q in
// the middle and of sqrt(-log q) in the tails, where log q = log Q(a) + log t never underflows.
// Beyond 37 standard deviations, where they end: z = a + w with w from z^2 / 2 + log(z / A(z)) =
// a^2 / 2 + log(a / A(a)) - log t, A(z) = z Q(z) / density(z) = 1 - 1 / z^2 + 3 / z^4 .., by
// iteration. Where the density changes by less than a step of u within [a, b]: uniform.
//
// Error, measured against 60 digits: below 6 units of 2^-53 of max(1, |z|) everywhere. As in
// random_fill.h all is fp64 in explicit fma, constants included: the same bits everywhere.

#pragma once

#include "random_fill.h"

namespace tp_ext {

// first ? a : b without a branch, into which a compiler would move the computation of a and b
TP_HD double choose(bool first, double a, double b) {
  uint64_t x, y;
  std::memcpy(&x, &a, sizeof x);
  std::memcpy(&y, &b, sizeof y);
  return from_bits(y ^ ((x ^ y) & (0 - static_cast<uint64_t>(first))));
}

// c[0][k] + c[1][k] x + .. + c[7][k] x^7, k = 0 if first, 1 if second, else 2. Coefficients are
// selected, not values, and nothing is a loop or a branch, so that the caller's loop vectorises.
TP_HD double polynomial(const double (&c)[8][3], bool first, bool second, double x) {
  const auto of = [&](int i) { return choose(first, c[i][0], choose(second, c[i][1], c[i][2])); };
  double value = ::fma(of(7), x, of(6));
  value = ::fma(value, x, of(5));
  value = ::fma(value, x, of(4));
  value = ::fma(value, x, of(3));
  value = ::fma(value, x, of(2));
  value = ::fma(value, x, of(1));
  return ::fma(value, x, of(0));
}

// The same for a GPU, where a branch that almost no value takes costs less than to select
TP_HD double polynomial_by_branch(const double (&c)[8][3], bool first, bool second, double x) {
  if (!first && !second) {
    double value = c[7][2];
    for (int i = 6; i >= 0; --i) value = ::fma(value, x, c[i][2]);
    return value;
  }
  double value = first ? c[7][0] : c[7][1];
  for (int i = 6; i >= 0; --i) value = ::fma(value, x, first ? c[i][0] : c[i][1]);
  return value;
}

// e^x, 0 below the normal numbers. x = n ln 2 + r; e^r by its series. Error below 1 ulp.
TP_HD double exp_by_fma(double x) {
  if (!(x > -700)) return 0;
  const double shifter = 6755399441055744.0;  // 1.5 * 2^52
  const double n = ::fma(x, 1.44269504088896338700e+00, shifter) - shifter;
  const double r = ::fma(-n, 1.90821492927058770002e-10, ::fma(-n, 6.93147180369123816490e-01, x));
  double term = 1, below = 13;  // 1 + r / 1 (1 + r / 2 (.. (1 + r / 13)))
  for (; below > 0; below -= 1) term = ::fma(term, r / below, 1.0);
  return term * from_bits(static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52);
}

// A(z) = z Q(z) / density(z) for z > 37
TP_HD double far_ratio(double z) {
  const double y = 1 / (z * z);
  double value = -945;
  value = ::fma(value, y, 105.0);
  value = ::fma(value, y, -15.0);
  value = ::fma(value, y, 3.0);
  value = ::fma(value, y, -1.0);
  return ::fma(value, y, 1.0);
}

constexpr double kFar = 37;

// density(z) / Q(z), z >= 0, a few ulp. The result of a division, so that no compiler fuses it into
// a sum
inline double hazard(double z) {
  if (z > kFar) return z / far_ratio(z);
  const double square = z * z;
  if (z >= 1) {  // Laplace's continued fraction z + 1 / (z + 2 / (z + 3 / ..))
    double below = z;
    for (int k = 40 + static_cast<int>(400 / square); k > 0; --k) below = z + k / below;
    return below;
  }
  double term = z, sum = z;  // z + z^3 / 3 + z^5 / (3 5) + .. = (1/2 - Q) / density
  for (int k = 3; k < 45; k += 2) {
    term = term * square / k;
    sum += term;
  }
  return 1 / (1.25331413731550025121e+00 / exp_by_fma(-0.5 * square) - sum);
}

// Q^-1(t q0), t <= 1, t q0 at most 1/2 and a rounding error
TP_HD double upper_quantile(double t, double q0, double log_q0) {
  // In the middle, in the tail, at its end; lowest powers first
  constexpr double kAbove[8][3] = {
      {3.3871328727963666080e0, 1.42343711074968357734e0, 6.65790464350110377720e0},
      {1.3314166789178437745e2, 4.63033784615654529590e0, 5.46378491116411436990e0},
      {1.9715909503065514427e3, 5.76949722146069140550e0, 1.78482653991729133580e0},
      {1.3731693765509461125e4, 3.64784832476320460504e0, 2.96560571828504891230e-1},
      {4.5921953931549871457e4, 1.27045825245236838258e0, 2.65321895265761230930e-2},
      {6.7265770927008700853e4, 2.41780725177450611770e-1, 1.24266094738807843860e-3},
      {3.3430575583588128105e4, 2.27238449892691845833e-2, 2.71155556874348757815e-5},
      {2.5090809287301226727e3, 7.74545014278341407640e-4, 2.01033439929228813265e-7}};
  constexpr double kBelow[8][3] = {
      {1, 1, 1},
      {4.2313330701600911252e1, 2.05319162663775882187e0, 5.99832206555887937690e-1},
      {6.8718700749205790830e2, 1.67638483018380384940e0, 1.36929880922735805310e-1},
      {5.3941960214247511077e3, 6.89767334985100004550e-1, 1.48753612908506148525e-2},
      {2.1213794301586595867e4, 1.48103976427480074590e-1, 7.86869131145613259100e-4},
      {3.9307895800092710610e4, 1.51986665636164571966e-2, 1.84631831751005468180e-5},
      {2.8729085735721942674e4, 5.47593808499534494600e-4, 1.42151175831644588870e-7},
      {5.2264952788528545610e3, 1.05075007164441684324e-9, 2.04426310338993978564e-15}};
  const double d = ::fma(-t, q0, 0.5);
  const double s = ::fma(-d, d, 0.180625);
  const double root = ::sqrt(-log_q0 - log_of(t));
  const bool middle = s >= 0, tail = root <= 5;
  const double x = choose(middle, s, root - choose(tail, 1.6, 5.0));
#ifdef __CUDA_ARCH__
  const double ratio =
      polynomial_by_branch(kAbove, middle, tail, x) / polynomial_by_branch(kBelow, middle, tail, x);
#else
  const double ratio = polynomial(kAbove, middle, tail, x) / polynomial(kBelow, middle, tail, x);
#endif
  return choose(middle, d, 1.0) * ratio;
}

// Q^-1(t Q(c)) - c for c > 37
TP_HD double far_quantile(double t, double c) {
  const double fall = -log_of(t), square = c * c, ratio = far_ratio(c);
  double w = 0;
  for (int k = 0; k < 6; ++k) {
    const double z = c + w;
    const double left = fall - log_of((z / c) * (ratio / far_ratio(z)));
    w = 2 * left / (c + ::sqrt(::fma(2.0, left, square)));
  }
  return w;
}

// The three ways of computing z
enum class Truncation { kQuantile, kFar, kUniform };

struct TruncatedNormal {
  Truncation by;
  double mean, std, low, high;  // the values' bounds: what the storage type has in [low, high]
  // Side 0 is the lower tail, as a function of u; side 1 the upper, of 1 - u: t of each
  double shift[2], scale[2];
  double q0, log_q0;  // Q where t is 1
  double bound, c;    // far out: the nearer bound, and its distance from the mean
};

// The distribution as a function of one word
template <Truncation kBy>
struct TruncatedDraw {
  static constexpr bool kPairs = false;
  TruncatedNormal n;

  TP_HD double operator()(uint32_t word) const {
    const double u = unit_of(word), rest = unit_of(~word);
    const double lower = ::fma(n.scale[0], u, n.shift[0]);
    const double upper = ::fma(n.scale[1], rest, n.shift[1]);
    const bool up = upper < lower;
    const double t = up ? upper : lower, sign = up ? n.std : -n.std;
    double x = lower;
    if constexpr (kBy == Truncation::kQuantile)
      x = ::fma(sign, upper_quantile(t, n.q0, n.log_q0), n.mean);
    if constexpr (kBy == Truncation::kFar) x = ::fma(sign, far_quantile(t, n.c), n.bound);
    x = x < n.low ? n.low : x;
    return x > n.high ? n.high : x;
  }
};

// The constants of [low, high], clamped to [type_low, type_high]. Host only, once per fill.
inline TruncatedNormal truncated_normal(double mean, double std, double low, double high,
                                        double type_low, double type_high) {
  const double infinity = HUGE_VAL;
  TruncatedNormal draw{Truncation::kQuantile,
                       mean,
                       std,
                       type_low,
                       type_high,
                       {infinity, infinity},
                       {0, 0},
                       1,
                       0,
                       mean,
                       0};
  const double a = (low - mean) / std, b = (high - mean) / std, width = (high - low) / std;
  const auto cap = [](double z) { return z < 1e100 ? z : 1e100; };
  const auto tail = [](double z) {  // Q(z), z >= 0
    return z > kFar ? 0.0 : 3.98942280401432702863e-01 * exp_by_fma(-0.5 * z * z) / hazard(z);
  };
  const double farthest = a > 0 ? b : b < 0 ? -a : b > -a ? b : -a;
  if (width * (farthest > 1 ? farthest : 1.0) < 1e-10) {
    draw.by = Truncation::kUniform;
    draw.shift[0] = low;
    draw.scale[0] = high - low;
  } else if (a < 0 && b > 0) {
    const double below = tail(-a), above = tail(b), mass = (1 - below) - above;
    draw.shift[0] = below, draw.shift[1] = above;
    draw.scale[0] = draw.scale[1] = mass;
  } else {
    const bool up = a >= 0;
    const double c = cap(up ? a : -b);
    const double fall = width * ::fma(0.5, width, c);  // of log density
    const double r = fall < 700 ? exp_by_fma(-fall) * hazard(c) / hazard(c + width) : 0;
    draw.shift[up] = r, draw.scale[up] = 1 - r;
    draw.bound = up ? low : high;
    draw.c = c;
    if (c > kFar) {
      draw.by = Truncation::kFar;
    } else {
      draw.q0 = tail(c);
      draw.log_q0 = ::fma(-0.5 * c, c, -log_of(hazard(c)) - 9.18938533204672780563e-01);
    }
  }
  return draw;
}

// Calls f(draw), the draw that matches the constants
template <typename F>
void with_truncated_draw(const TruncatedNormal& n, F f) {
  if (n.by == Truncation::kQuantile) return f(TruncatedDraw<Truncation::kQuantile>{n});
  if (n.by == Truncation::kFar) return f(TruncatedDraw<Truncation::kFar>{n});
  f(TruncatedDraw<Truncation::kUniform>{n});
}

}  // namespace tp_ext
