// RMSNorm and LayerNorm of a row of n elements, host and device; RMSNorm is LayerNorm without the
// mean.
//
//   xhat = (x - mean) * rstd          rstd = 1 / sqrt(mean of (x - mean)^2 + eps), mean = 0 for
//   RMSNorm y    = xhat * w + b               b = 0 for RMSNorm
//
// With gw = g * w the gradients are, sums over the row for x and over the rows for w and b,
//
//   dx = rstd * (gw - mean(gw) - xhat * mean(gw * xhat)), without the term mean(gw) for RMSNorm
//   dw = sum of g * xhat, db = sum of g
//
// The variance is a mean of squared deviations, a second pass over the cached row: E[x^2] - E[x]^2
// cancels. That pass corrects the mean too (Chan, Golub and LeVeque, "Algorithms for computing the
// sample variance", 1983).

#pragma once

#include "scalar.h"

namespace tp_ext {

template <typename A>
TP_HD A norm_rstd(A sum_of_squares, A n, A eps) {
#ifdef __CUDA_ARCH__
  return A(1) / ::sqrt(sum_of_squares / n + eps);
#else
  return A(1) / std::sqrt(sum_of_squares / n + eps);
#endif
}

// The error that rounding the sum of n elements left in the mean, from the sum of the deviations: a
// constant row has its constant for a mean, and deviations of 0. squares is the sum of their
// squares; an overflow stays.
template <typename A>
TP_HD void norm_correct(A& mean, A& squares, A sum_of_deviations, A n) {
  const A shift = sum_of_deviations / n;
  mean += shift;
  if (squares - squares == A(0)) {
    const A rest = squares - shift * sum_of_deviations;
    squares = rest > A(0) ? rest : A(0);
  }
}

template <typename A>
TP_HD A norm_hat(A x, A mean, A rstd) {
  return (x - mean) * rstd;
}

// g * w, rounded: fused with a sum it would not be the number whose mean is subtracted, and the
// gradient of a row of one element not 0
template <typename A>
TP_HD A norm_gw(A g, A w) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(A) == sizeof(float)) {
    return __fmul_rn(g, w);
  } else {
    return __dmul_rn(g, w);
  }
#else
  return g * w;
#endif
}

// mean_gw and mean_gw_hat are the means over the row of gw and of gw * xhat
template <typename A>
TP_HD A norm_dx(A gw, A hat, A rstd, A mean_gw, A mean_gw_hat) {
  return rstd * (gw - mean_gw - hat * mean_gw_hat);
}

}  // namespace tp_ext
