// Checks that the operators of a sharded vocabulary share.

#pragma once

#include <ATen/core/Tensor.h>

#include "check.h"

namespace tp_ext {

// [vocab_start, vocab_start + vocab_local) must lie in the vocabulary and in this rank's shard
inline void check_vocab_range(int64_t vocab_start, int64_t vocab_local, int64_t vocab_size,
                              int64_t held, const char* held_name) {
  TORCH_CHECK_VALUE(vocab_start >= 0 && vocab_local >= 0 && vocab_start + vocab_local <= vocab_size,
                    "vocab_start, vocab_local: [", vocab_start, ", ", vocab_start + vocab_local,
                    ") must lie in [0, vocab_size), [0, ", vocab_size, ")");
  TORCH_CHECK_VALUE(vocab_local <= held, "vocab_local: ", vocab_local, " must be at most the ",
                    held, " ", held_name);
}

inline void check_embedding(const at::Tensor& weight, const at::Tensor& ids, int64_t vocab_start,
                            int64_t vocab_local, int64_t vocab_size) {
  check_floating(weight, "weight");
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sizes(), " must be [rows, hidden]");
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids: dtype ",
                   ids.scalar_type(), " must be int64 or int32");
  check_same_device(ids, "ids", weight, "weight");
  check_vocab_range(vocab_start, vocab_local, vocab_size, weight.size(0), "rows of weight");
}

// Returns the gradient viewed as [tokens, hidden]
inline at::Tensor check_embedding_grad(const at::Tensor& grad, const at::Tensor& ids,
                                       int64_t num_rows, int64_t vocab_start, int64_t vocab_local) {
  check_floating(grad, "grad");
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, "ids: dtype ",
                   ids.scalar_type(), " must be int64 or int32");
  check_same_device(ids, "ids", grad, "grad");
  TORCH_CHECK_VALUE(grad.dim() >= 1 && ids.sizes() == grad.sizes().slice(0, grad.dim() - 1),
                    "grad: shape ", grad.sizes(), " must be that of ids, ", ids.sizes(),
                    ", and one more dim");
  check_vocab_range(vocab_start, vocab_local, vocab_start + vocab_local, num_rows,
                    "rows (num_rows)");
  return grad.contiguous();
}

}  // namespace tp_ext
