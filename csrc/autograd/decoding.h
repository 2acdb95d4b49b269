// [Note: decoding has kernels for few rows]

#pragma once

#include <ATen/TensorSubclassLikeUtils.h>

#include "autograd/differentiation.h"
#include "comm/collectives.h"
#include "skinny_linear.h"

namespace tp_ext {

// Whether a call on plain tensors is computed at once and nothing of it is recorded
inline bool is_inference(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return !comm::traced(x) && !needs_graph(x) && !needs_graph(weight) &&
         !is_any(needs_graph, bias) && !at::areAnyTensorSubclassLike({x, weight, bias.value_or(x)});
}

// x weight^T of few rows
inline bool is_decoding(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return is_inference(x, weight, bias) && is_skinny(x, weight);
}

}  // namespace tp_ext
