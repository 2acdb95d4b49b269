// Arguments of the operators on 8-bit floating point, checked alike for every device.

#pragma once

#include "check.h"
#include "kernels/float8.h"

namespace tp_ext {

inline void check_float8_values(const at::Tensor& x) {
  check_up_to_float32(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2, "x: shape ", x.sizes(), " must have 2 dims");
}

inline void check_amax_dim(std::optional<int64_t> dim) {
  TORCH_CHECK_VALUE(!dim.has_value() || *dim == 0 || *dim == 1, "dim: ", dim.value_or(0),
                    " must be 0, 1 or None");
}

inline void check_float8_format(at::ScalarType format, const char* name) {
  TORCH_CHECK_TYPE(format == at::kFloat8_e4m3fn || format == at::kFloat8_e5m2, name, ": ", format,
                   " must be float8_e4m3fn or float8_e5m2");
}

// amax: [1, 1], [m, 1] or [1, n] for x [m, n]
inline void check_amax(const at::Tensor& amax, const at::Tensor& x) {
  TORCH_CHECK_VALUE(amax.scalar_type() == at::kFloat && amax.dim() == 2 &&
                        (amax.size(0) == 1 || amax.size(0) == x.size(0)) &&
                        (amax.size(1) == 1 || amax.size(1) == x.size(1)) &&
                        (amax.size(0) == 1 || amax.size(1) == 1),
                    "amax: shape ", amax.sizes(), " must be [1, 1], [m, 1] or [1, n], fp32, for x ",
                    x.sizes());
  check_same_device(amax, "amax", x, "x");
}

}  // namespace tp_ext
