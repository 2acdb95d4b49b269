// Argument checks of bias_dropout_residual, and its primitives out of one function of a device, the
// gradient of the bias excepted.

#pragma once

#include <ATen/ops/empty_like.h>

#include "args/random.h"
#include "types.h"

namespace tp_ext {

inline void check_dropout(const Tensor& x, const char* name, const Tensor& seed, double p,
                          const GlobalIndex& index) {
  check_floating(x, name);
  if (seed.dim() == 1) {  // a seed and rows
    TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, "seed: dtype ", seed.scalar_type(),
                     " must be int64");
    const int64_t rows = index.local_inner > 0 ? x.numel() / index.local_inner : 0;
    TORCH_CHECK_VALUE(seed.numel() == 2 || seed.numel() == 1 + rows, "seed: shape ", seed.sizes(),
                      " must be 0-dimensional, or [2], with the first row, or [", 1 + rows,
                      "], with each row");
    TORCH_CHECK_VALUE(seed.is_contiguous(), "seed: strides ", seed.strides(), " must be [1]");
    check_same_device(seed, "seed", x, name);
  } else {
    check_seed(seed, x, name);
  }
  TORCH_CHECK_VALUE(0 <= p && p <= 1, "p: ", p, " must be in [0, 1]");
}

inline SeedAndRows seed_and_rows(const Tensor& seed) {
  return {seed.const_data_ptr<int64_t>(), seed.numel()};
}

// The gradient of a bias is the sum over all dims but the last
inline void check_bias_rows(const Tensor& grad, const char* name) {
  TORCH_CHECK_VALUE(grad.dim() > 0, name, ": shape ", grad.sizes(), " must have a last dim");
}

inline void check_bias_and_residual(const Tensor& x, const OptionalTensor& bias,
                                    const OptionalTensor& residual) {
  if (has(bias)) {
    check_same_dtype(*bias, "bias", x, "x");
    check_same_device(*bias, "bias", x, "x");
    TORCH_CHECK_VALUE(bias->dim() == 1 && x.dim() > 0 && bias->size(0) == x.size(-1),
                      "bias: shape ", bias->sizes(), " must be the last dim of x, of shape ",
                      x.sizes());
  }
  if (has(residual)) {
    check_same_dtype(*residual, "residual", x, "x");
    check_same_device(*residual, "residual", x, "x");
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes(), "residual: shape ", residual->sizes(),
                      " must be that of x, ", x.sizes());
  }
}

// Device::forward(x, bias, residual, y, seed, p, index) fills y; tensors are contiguous, bias and
// residual undefined if there are none, y is not empty.
template <typename Device>
struct DropoutPrimitives {
  static Tensor fwd(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual,
                    const Tensor& seed, double p, int64_t local_inner, int64_t full_inner,
                    int64_t offset) {
    const GlobalIndex index = check_global_index(x, "x", local_inner, full_inner, offset);
    check_dropout(x, "x", seed, p, index);
    check_bias_and_residual(x, bias, residual);
    const Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
    const auto contiguous = [](const OptionalTensor& t) {
      return has(t) ? t->contiguous() : Tensor();
    };
    if (y.numel() > 0)
      Device::forward(x.contiguous(), contiguous(bias), contiguous(residual), y, seed, p, index);
    return y;
  }

  static Tensor bwd(const Tensor& grad, const Tensor& seed, double p, int64_t local_inner,
                    int64_t full_inner, int64_t offset) {
    return fwd(grad, std::nullopt, std::nullopt, seed, p, local_inner, full_inner, offset);
  }
};

}  // namespace tp_ext
