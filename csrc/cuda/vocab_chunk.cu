// The products of a chunk of tokens with the rows of a vocabulary on CUDA: ATen's.

#include <torch/library.h>

#include "args/vocab_chunk.h"

namespace tp_ext {
namespace {

void chunk_logits_(const Tensor& logits, const Tensor& x, const Tensor& weight,
                   const OptionalTensor& bias) {
  composed::check_vocab_chunk(logits, x, weight);
  composed::vocab_chunk_logits_(logits, x, weight, bias);
}

void chunk_weight_grad_(const Tensor& dw, const Tensor& dlogits, const Tensor& x, bool add) {
  composed::check_vocab_chunk(dlogits, x, dw);
  composed::vocab_chunk_weight_grad_(dw, dlogits, x, add);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_vocab_chunk_logits_", chunk_logits_);
  m.impl("_vocab_chunk_input_grad", composed::vocab_chunk_input_grad);
  m.impl("_vocab_chunk_weight_grad_", chunk_weight_grad_);
}

}  // namespace tp_ext
