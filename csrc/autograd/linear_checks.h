// Argument checks of the linears; they run before any communication.

#pragma once

#include "autograd/main_grad.h"
#include "check.h"
#include "types.h"

namespace tp_ext {

inline void check_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         const OptionalTensor& main_grad, int64_t overlap_chunks,
                         bool row = false) {
  TORCH_CHECK_VALUE(overlap_chunks >= 1, "overlap_chunks: ", overlap_chunks,
                    " must be an integer of at least 1");
  check_floating(x, "x");
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sym_sizes(), " must have 2 dims");
  TORCH_CHECK_VALUE(x.dim() > 0 && x.sym_size(-1) == weight.sym_size(1), "x: shape ", x.sym_sizes(),
                    " must end in the ", weight.sym_size(1),
                    " input features of weight on this rank",
                    row && x.dim() > 0 && x.sym_size(-1) > weight.sym_size(1)
                        ? "; x with the features of all ranks needs input_is_parallel=False"
                        : "");
  check_same_dtype(x, "x", weight, "weight");
  check_same_device(x, "x", weight, "weight");
  check_main_grad(main_grad, weight);
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), "bias: shape ",
                    bias->sym_sizes(), " must be the ", weight.sym_size(0),
                    " output features of weight on this rank");
  check_same_dtype(*bias, "bias", weight, "weight");
}

inline c10::SymInt tokens_of(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() > 1, "x: shape ", x.sym_sizes(),
                    " must have a dim of tokens under sequence_parallel");
  return x.sym_size(0);
}

}  // namespace tp_ext
