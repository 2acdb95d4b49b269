// Shared by the CPU and CUDA launchers of the vocabulary operators: checks, and a tensor viewed as
// rows.

#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>

#include <utility>

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

inline void check_ce_target(const at::Tensor& target) {
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, "target: dtype ", target.scalar_type(),
                   " must be int64");
}

inline void check_ce_logits(const at::Tensor& logits, const at::Tensor& target, int64_t vocab_start,
                            int64_t vocab_local, int64_t vocab_size) {
  check_floating(logits, "logits");
  check_ce_target(target);
  check_same_device(target, "target", logits, "logits");
  TORCH_CHECK_VALUE(
      logits.dim() >= 1 && target.sizes() == logits.sizes().slice(0, logits.dim() - 1),
      "target: shape ", target.sizes(), " must be that of logits, ", logits.sizes(),
      ", without the last dim");
  check_vocab_range(vocab_start, vocab_local, vocab_size, logits.size(-1), "columns of logits");
}

// Statistics are fp32, or fp64 for fp64
inline at::ScalarType ce_stats_dtype(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_ce_stats(const at::Tensor& stats, const at::Tensor& target) {
  check_ce_target(target);
  check_same_device(target, "target", stats, "stats");
  TORCH_CHECK_TYPE(stats.scalar_type() == at::kFloat || stats.scalar_type() == at::kDouble,
                   "stats: dtype ", stats.scalar_type(), " must be float32 or float64");
  const int64_t rows = target.numel();
  TORCH_CHECK_VALUE(stats.dim() == 3 && stats.size(0) >= 1 && stats.size(2) == 4 &&
                        (stats.size(1) == rows || stats.size(1) == rows + 1),
                    "stats: shape ", stats.sizes(), " must be [ranks, rows, 4] with ", rows,
                    " rows, or one more, that of the shard");
}

// Whether the shard's row follows the token rows
inline bool has_shard_row(const at::Tensor& stats, const at::Tensor& target) {
  return stats.size(1) == target.numel() + 1;
}

inline void check_ce_grad(const at::Tensor& grad, const at::Tensor& lse, const at::Tensor& logits,
                          const at::Tensor& target) {
  const int64_t rows = target.numel();
  for (const auto& [t, name] : {std::make_pair(grad, "grad"), std::make_pair(lse, "lse")}) {
    TORCH_CHECK_TYPE(t.scalar_type() == ce_stats_dtype(logits), name, ": dtype ", t.scalar_type(),
                     " must be ", ce_stats_dtype(logits), " for logits of ", logits.scalar_type());
    check_same_device(t, name, logits, "logits");
  }
  TORCH_CHECK_VALUE(grad.dim() == 1 && grad.size(0) == rows, "grad: shape ", grad.sizes(),
                    " must be [", rows, "]");
  TORCH_CHECK_VALUE(lse.dim() == 2 && lse.size(0) == rows && lse.size(1) == 2, "lse: shape ",
                    lse.sizes(), " must be [", rows, ", 2]");
}

inline void check_ce_writable(const at::Tensor& logits) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(logits) != at::MemOverlap::Yes,
                    "logits: an expanded tensor (strides ", logits.strides(),
                    ") cannot hold its own gradient; use inplace_backward=False");
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

// A tensor viewed as rows of its last dim: elements contiguous, `stride` from row to row
struct Rows {
  at::Tensor tensor;  // keeps the memory alive
  int64_t count, width, stride;
};

// Without a copy where the strides allow it (logits are often the first columns of a wider, padded
// tensor); false where they do not.
inline bool rows_of(const at::Tensor& t, Rows& rows) {
  rows.width = t.size(-1);
  rows.count = 1;
  for (const int64_t size : t.sizes().slice(0, t.dim() - 1)) rows.count *= size;
  rows.tensor = t;
  rows.stride = rows.width;
  if (t.numel() == 0) return true;
  const int64_t shape[2] = {rows.count, rows.width};
  const auto strides = at::detail::computeStride(t.sizes(), t.strides(), at::IntArrayRef(shape, 2));
  if (!strides.has_value() || (rows.width > 1 && (*strides)[1] != 1)) return false;
  rows.stride = (*strides)[0];
  return true;
}

inline Rows rows_of(const at::Tensor& t) {
  Rows rows;
  if (!rows_of(t, rows)) rows_of(t.contiguous(), rows);
  return rows;
}

}  // namespace tp_ext
