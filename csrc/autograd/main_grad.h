// Gradients that are added up outside autograd, in a tensor of the caller's (Megatron's main_grad),
// as a rule fp32 beside half-precision weights, over all microbatches of a step.

#pragma once

#include <ATen/core/Tensor.h>

namespace tp_ext {

// Raises unless main_grad, if given, can take the gradient of weight
void check_main_grad(const std::optional<at::Tensor>& main_grad, const at::Tensor& weight);

// main_grad += dy^T x, rows being tokens; products and sums in main_grad's dtype, in one GEMM
void add_weight_grad(const at::Tensor& main_grad, const at::Tensor& dy, const at::Tensor& x);

}  // namespace tp_ext
