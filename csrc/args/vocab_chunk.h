// The products of a chunk of tokens with the rows of a vocabulary by ATen: used on CUDA, and on the
// CPU where there are no kernels of ours. Also the argument check of both devices.

#pragma once

#include <ATen/ops/mm.h>

#include "check.h"
#include "products.h"
#include "types.h"

namespace tp_ext::composed {

inline void check_vocab_chunk(const Tensor& logits, const Tensor& x, const Tensor& weight) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && x.dim() == 2 && weight.dim() == 2 &&
                        logits.size(0) == x.size(0) && logits.size(1) == weight.size(0) &&
                        x.size(1) == weight.size(1),
                    "logits: shape ", logits.sizes(), " must be [tokens, vocab] of x, ", x.sizes(),
                    ", and weight, ", weight.sizes());
}

inline void vocab_chunk_logits_(const Tensor& logits, const Tensor& x, const Tensor& weight,
                                const OptionalTensor& bias) {
  products::mm_out(logits, x, weight.t(), bias);
}

inline Tensor vocab_chunk_input_grad(const Tensor& dlogits, const Tensor& weight) {
  return products::mm(dlogits, weight);
}

inline void vocab_chunk_weight_grad_(const Tensor& dw, const Tensor& dlogits, const Tensor& x,
                                     bool add) {
  Tensor out = dw;
  if (add)
    products::add_mm_(out, dlogits.t(), x);
  else
    products::mm_out(out, dlogits.t(), x);
}

}  // namespace tp_ext::composed
