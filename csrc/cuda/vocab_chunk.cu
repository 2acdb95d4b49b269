// The products of a chunk of tokens with the rows of a vocabulary on CUDA: ATen's.

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "args/vocab_chunk.h"

namespace tp_ext {
namespace {

void chunk_logits_(const Tensor& logits, const Tensor& x, const Tensor& weight,
                   const OptionalTensor& bias) {
  composed::check_vocab_chunk(logits, x, weight);
  const c10::cuda::CUDAGuard guard(x.device());
  composed::vocab_chunk_logits_(logits, x, weight, bias);
}

Tensor chunk_input_grad(const Tensor& dlogits, const Tensor& weight) {
  const c10::cuda::CUDAGuard guard(dlogits.device());
  return composed::vocab_chunk_input_grad(dlogits, weight);
}

void chunk_weight_grad_(const Tensor& dw, const Tensor& dlogits, const Tensor& x, bool add) {
  composed::check_vocab_chunk(dlogits, x, dw);
  const c10::cuda::CUDAGuard guard(x.device());
  composed::vocab_chunk_weight_grad_(dw, dlogits, x, add);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_vocab_chunk_logits_", chunk_logits_);
  m.impl("_vocab_chunk_input_grad", chunk_input_grad);
  m.impl("_vocab_chunk_weight_grad_", chunk_weight_grad_);
}

}  // namespace tp_ext
