// The accumulation of a weight's gradient by ATen: used on the CPU, and on CUDA where cublasLt does
// not do it. Also the argument check of both devices.

#pragma once

#include "check.h"
#include "products.h"
#include "types.h"

namespace tp_ext::composed {

inline void check_add_weight_grad(const Tensor& main_grad, const Tensor& dy, const Tensor& x) {
  check_floating(main_grad, "main_grad");
  check_same_dtype(x, "x", dy, "dy");
  check_same_device(dy, "dy", main_grad, "main_grad");
  check_same_device(x, "x", main_grad, "main_grad");
  TORCH_CHECK_VALUE(dy.dim() == 2 && x.dim() == 2 && dy.size(0) == x.size(0), "dy: shape ",
                    dy.sizes(), " must have two dims, and as many rows as x, ", x.sizes());
  TORCH_CHECK_VALUE(main_grad.sizes() == at::IntArrayRef({dy.size(1), x.size(1)}),
                    "main_grad: shape ", main_grad.sizes(), " must be [", dy.size(1), ", ",
                    x.size(1), "], the columns of dy and x");
}

// Multiplied and added in main_grad's dtype
inline void add_weight_grad_(const Tensor& main_grad, const Tensor& dy, const Tensor& x) {
  const auto dtype = main_grad.scalar_type();
  products::add_mm_(main_grad, dy.t().to(dtype), x.to(dtype));
}

}  // namespace tp_ext::composed
