// Argument checks of the norm operators, and their six primitives out of one forward and one
// backward, the same on CPU and CUDA.

#pragma once

#include <array>
#include <tuple>

#include "check.h"
#include "types.h"

namespace tp_ext {

struct NormShape {
  int64_t rows, n;  // x is [.., n]
};

// weight or bias: [n], in x's dtype or, next to a half x, in fp32
inline void check_norm_param(const OptionalTensor& t, const char* name, const Tensor& x) {
  if (!has(t)) return;
  TORCH_CHECK_VALUE(t->dim() == 1 && t->sym_size(0) == x.sym_size(-1), name, ": shape ",
                    t->sym_sizes(), " must be [", x.sym_size(-1), "], the last dim of x");
  const bool half = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  if (!half || t->scalar_type() != at::kFloat) check_same_dtype(*t, name, x, "x");
  check_same_device(*t, name, x, "x");
}

// For composite operators, which compilers trace: reads no length that they may keep symbolic
inline void check_norm_args(const Tensor& x, const OptionalTensor& weight) {
  check_floating(x, "x");
  TORCH_CHECK_VALUE(x.dim() > 0, "x: shape [] must have a last dim to normalise over");
  check_norm_param(weight, "weight", x);
}

inline NormShape check_norm_input(const Tensor& x, const OptionalTensor& weight) {
  check_norm_args(x, weight);
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) rows *= x.size(dim);
  return {rows, x.size(-1)};
}

// mean or rstd as the forward operator returned it
inline void check_norm_stat(const Tensor& t, const char* name, const Tensor& x, int64_t rows) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) == rows, name, ": shape ", t.sizes(), " must be [",
                    rows, "], one per row of x");
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, ": dtype ", t.scalar_type(), " must be ", dtype,
                   " for x of ", x.scalar_type());
  check_same_device(t, name, x, "x");
}

// residual, grad or grad_sum: shape, dtype and device of x, any strides
inline void check_norm_like_x(const Tensor& t, const char* name, const Tensor& x) {
  TORCH_CHECK_VALUE(t.sym_sizes() == x.sym_sizes(), name, ": shape ", t.sym_sizes(),
                    " must be that of x, ", x.sym_sizes());
  check_same_dtype(t, name, x, "x");
  check_same_device(t, name, x, "x");
}

inline NormShape check_norm_backward(const Tensor& grad, const Tensor& x,
                                     const OptionalTensor& weight, const Tensor& rstd,
                                     const OptionalTensor& grad_sum) {
  const NormShape shape = check_norm_input(x, weight);
  check_norm_like_x(grad, "grad", x);
  if (has(grad_sum)) check_norm_like_x(*grad_sum, "grad_sum", x);
  check_norm_stat(rstd, "rstd", x, shape.rows);
  return shape;
}

// The primitives of a device, given its functions, centred or not (layer norm or RMSNorm):
//   forward(x, residual, weight, bias, eps) -> y, sum, mean, rstd
//   backward(grad, x, weight, mean, rstd, grad_sum, output_mask) -> dx, dweight, dbias
template <auto rms_forward, auto layer_forward, auto rms_backward, auto layer_backward>
struct NormPrimitives {
  static std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& x, const OptionalTensor& weight,
                                                 double eps) {
    const auto [y, sum, mean, rstd] = rms_forward(x, {}, weight, std::nullopt, eps);
    return {y, rstd};
  }

  static std::tuple<Tensor, Tensor, Tensor> rms_norm_residual_fwd(const Tensor& x,
                                                                  const Tensor& residual,
                                                                  const OptionalTensor& weight,
                                                                  double eps) {
    const auto [y, sum, mean, rstd] = rms_forward(x, residual, weight, std::nullopt, eps);
    return {y, sum, rstd};
  }

  static std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad, const Tensor& x,
                                                 const OptionalTensor& weight, const Tensor& rstd,
                                                 const OptionalTensor& grad_sum,
                                                 std::array<bool, 2> output_mask) {
    const auto [dx, dweight, none] = rms_backward(grad, x, weight, rstd, rstd, grad_sum,
                                                  {output_mask[0], output_mask[1], false});
    return {dx, dweight};
  }

  static std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& x,
                                                           const OptionalTensor& weight,
                                                           const OptionalTensor& bias, double eps) {
    const auto [y, sum, mean, rstd] = layer_forward(x, {}, weight, bias, eps);
    return {y, mean, rstd};
  }

  static std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad, const Tensor& x,
                                                           const OptionalTensor& weight,
                                                           const Tensor& mean, const Tensor& rstd,
                                                           const OptionalTensor& grad_sum,
                                                           std::array<bool, 3> output_mask) {
    return layer_backward(grad, x, weight, mean, rstd, grad_sum, output_mask);
  }
};

}  // namespace tp_ext
