// The GEMMs of a chunk of tokens with the rows of a vocabulary: a few tokens, many rows.

#pragma once

#include <ATen/core/Tensor.h>
#include <optional>

#include "types.h"

namespace tp_ext {

// x weight^T + bias of one chunk after another, in the same memory unless the call is traced
class LogitsBuffer {
 public:
  LogitsBuffer(const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool traced)
      : weight_(weight), bias_(bias), traced_(traced) {}
  at::Tensor logits(const at::Tensor& x);

 private:
  const at::Tensor& weight_;
  const std::optional<at::Tensor>& bias_;
  const bool traced_;
  at::Tensor memory_;
};

// dlogits weight
at::Tensor input_grad(const at::Tensor& dlogits, const at::Tensor& weight, bool traced);

// dw += dlogits^T x, in sum_dtype; an undefined dw is 0
void sum_weight_grad(at::Tensor& dw, const at::Tensor& dlogits, const at::Tensor& x, bool traced);

}  // namespace tp_ext
