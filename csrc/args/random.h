// Checks of the operators whose random numbers follow the global index, the same on every device.

#pragma once

#include "check.h"
#include "kernels/philox.h"

namespace tp_ext {

inline void check_seed(const at::Tensor& seed, const at::Tensor& like, const char* like_name) {
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, "seed: dtype ", seed.scalar_type(),
                   " must be int64");
  TORCH_CHECK_VALUE(seed.dim() == 0, "seed: shape ", seed.sizes(), " must be 0-dimensional");
  check_same_device(seed, "seed", like, like_name);
}

// Rows of local_inner elements, full_inner apart; the first may lie anywhere in the full tensor
inline GlobalIndex check_global_index(const at::Tensor& x, const char* name, int64_t local_inner,
                                      int64_t full_inner, int64_t offset) {
  const int64_t n = x.numel();
  TORCH_CHECK_VALUE(n == 0 || (local_inner > 0 && n % local_inner == 0),
                    "local_inner: ", local_inner, " must divide the ", n, " elements of ", name);
  TORCH_CHECK_VALUE(n == 0 || local_inner <= full_inner, "local_inner: ", local_inner,
                    " must be at most full_inner = ", full_inner);
  TORCH_CHECK_VALUE(n == 0 || offset >= 0, "offset: ", offset, " must be at least 0");
  return {local_inner, full_inner, offset};
}

inline void check_dropout(const at::Tensor& x, const char* name, const at::Tensor& seed, double p,
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

inline SeedAndRows seed_and_rows(const at::Tensor& seed) {
  return {seed.const_data_ptr<int64_t>(), seed.numel()};
}

// The gradient of a bias is the sum over all dims but the last
inline void check_bias_rows(const at::Tensor& grad, const char* name) {
  TORCH_CHECK_VALUE(grad.dim() > 0, name, ": shape ", grad.sizes(), " must have a last dim");
}

inline void check_bias_and_residual(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                                    const std::optional<at::Tensor>& residual) {
  if (bias && bias->defined()) {
    check_same_dtype(*bias, "bias", x, "x");
    check_same_device(*bias, "bias", x, "x");
    TORCH_CHECK_VALUE(bias->dim() == 1 && x.dim() > 0 && bias->size(0) == x.size(-1),
                      "bias: shape ", bias->sizes(), " must be the last dim of x, of shape ",
                      x.sizes());
  }
  if (residual && residual->defined()) {
    check_same_dtype(*residual, "residual", x, "x");
    check_same_device(*residual, "residual", x, "x");
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes(), "residual: shape ", residual->sizes(),
                      " must be that of x, ", x.sizes());
  }
}

}  // namespace tp_ext
