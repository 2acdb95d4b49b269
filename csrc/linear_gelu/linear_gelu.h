// linear_gelu composed of ATen's products and our activation kernels: used on the CPU, and on CUDA
// where cublasLt's epilogues do not apply. Also the argument checks of both devices.

#pragma once

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "check.h"
#include "operators.h"

namespace tp_ext::composed {

// All dims but the last flattened into one
inline Tensor rows_of(const Tensor& x) {
  return x.dim() == 2 ? x : x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

inline void check_linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check_floating(x, "x");
  check_same_dtype(weight, "weight", x, "x");
  check_same_dtype(bias, "bias", x, "x");
  check_same_device(weight, "weight", x, "x");
  check_same_device(bias, "bias", x, "x");
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sizes(), " must have 2 dims");
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == weight.size(1), "x: shape ", x.sizes(),
                    " must end in the ", weight.size(1), " columns of weight");
  TORCH_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == weight.size(0), "bias: shape ", bias.sizes(),
                    " must be the ", weight.size(0), " rows of weight");
}

inline void check_linear_dgelu(const Tensor& dy, const Tensor& weight, const Tensor& pre) {
  check_floating(dy, "dy");
  check_same_dtype(weight, "weight", dy, "dy");
  check_same_dtype(pre, "pre", dy, "dy");
  check_same_device(weight, "weight", dy, "dy");
  check_same_device(pre, "pre", dy, "dy");
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sizes(), " must have 2 dims");
  TORCH_CHECK_VALUE(dy.dim() > 0 && dy.size(-1) == weight.size(0), "dy: shape ", dy.sizes(),
                    " must end in the ", weight.size(0), " rows of weight");
  std::vector<int64_t> shape = dy.sizes().vec();
  shape.back() = weight.size(1);
  TORCH_CHECK_VALUE(pre.sizes() == at::IntArrayRef(shape), "pre: shape ", pre.sizes(), " must be ",
                    at::IntArrayRef(shape), ", that of dy with the columns of weight");
}

inline std::tuple<Tensor, Tensor> linear_gelu_fwd(const Tensor& x, const Tensor& weight,
                                                  const Tensor& bias, bool keep_pre) {
  static const auto activate = TP_OP(_bias_act_fwd);
  const Tensor pre = at::linear(x, weight, bias);
  return {activate.call(pre, std::nullopt, "gelu_tanh"), keep_pre ? pre : pre.new_empty({0})};
}

// A zero bias makes _bias_act_bwd return the column sums too, taken before dx is rounded
inline std::tuple<Tensor, Tensor> linear_dgelu_bwd(const Tensor& dy, const Tensor& weight,
                                                   const Tensor& pre) {
  static const auto backward = TP_OP(_bias_act_bwd);
  const Tensor dh = at::mm(rows_of(dy), weight).view(pre.sizes());
  return backward.call(dh, pre, at::zeros({pre.size(-1)}, pre.options()), "gelu_tanh");
}

}  // namespace tp_ext::composed
