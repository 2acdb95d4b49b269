// Checks of the truncated normal, the same on every device.

#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "check.h"
#include "kernels/truncated_normal.h"

namespace tp_ext {

// The largest finite value of the type that is <= x, -inf if there is none
inline double rounded_down(double x, at::ScalarType dtype) {
  if (dtype == at::kDouble || std::isinf(x)) return x;
  const bool half = dtype == at::kHalf;
  const int digits = half ? 11 : dtype == at::kBFloat16 ? 8 : 24, top = half ? 15 : 127;
  const double largest = std::ldexp(2 - std::ldexp(1.0, 1 - digits), top);
  if (x >= largest) return largest;
  if (x < -largest) return -HUGE_VAL;
  const int exponent = std::max(x == 0 ? 1 - top : std::ilogb(x), 1 - top);
  const double unit = std::ldexp(1.0, exponent - digits + 1);
  return std::floor(x / unit) * unit;
}

inline TruncatedNormal check_truncated_normal(const at::Tensor& self, double mean, double std,
                                              double low, double high) {
  TORCH_CHECK_VALUE(std::isfinite(mean), "mean: ", mean, " must be finite");
  TORCH_CHECK_VALUE(std::isfinite(std) && std > 0, "std: ", std, " must be positive and finite");
  TORCH_CHECK_VALUE(low < high, "low: ", low, " must be below high = ", high);
  const auto dtype = self.scalar_type();
  const double first = -rounded_down(-low, dtype), last = rounded_down(high, dtype);
  TORCH_CHECK_VALUE(first <= last && first < HUGE_VAL && last > -HUGE_VAL, "low: ", low,
                    " and high = ", high, " must have a value of ", dtype, " between them");
  return truncated_normal(mean, std, low, high, first, last);
}

}  // namespace tp_ext
