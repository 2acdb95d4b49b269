// Gradients accumulated outside autograd, over all microbatches of a step, in a tensor of the
// caller (Megatron's main_grad), usually fp32 next to half-precision weights.
//
// backward() gets no gradient of such a weight. torch.autograd.grad, which refuses a missing one,
// gets zeros: pipeline schedules without bubbles compute the gradients of weights by it.

#pragma once

#include <ATen/core/Tensor.h>

namespace tp_ext {

// Raises unless main_grad, if given, can hold the gradient of weight
void check_main_grad(const std::optional<at::Tensor>& main_grad, const at::Tensor& weight);

// main_grad += dy^T x over the token rows, in one GEMM; products and sums in main_grad's dtype
void add_weight_grad(const at::Tensor& main_grad, const at::Tensor& dy, const at::Tensor& x);

// What the running node returns for its input i, a weight whose gradient is in main_grad: zeros of
// dy's dtype if torch.autograd.grad asks for it, else undefined
at::Tensor placeholder_grad(const at::Tensor& main_grad, const at::Tensor& dy, size_t i);

}  // namespace tp_ext
