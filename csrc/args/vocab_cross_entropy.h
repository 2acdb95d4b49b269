// Argument checks of the primitives of a vocab-parallel cross entropy, and these primitives out of
// three functions of a device.

#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>
#include <utility>

#include "args/vocab.h"
#include "kernels/vocab_cross_entropy.h"
#include "types.h"

namespace tp_ext {

// This rank's ids, [start, start + local) of `size`
struct VocabShard {
  int64_t start, local, size;
};

// What the primitives of the loss are given besides tensors
struct CrossEntropyArgs {
  VocabShard vocab;
  int64_t ignore_index;
  double label_smoothing = 0, z_loss = 0;

  template <typename A>
  CeOptions<A> options() const {
    return {A(label_smoothing), A(z_loss), A(vocab.size)};
  }
};

inline void check_ce_target(const Tensor& target) {
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, "target: dtype ", target.scalar_type(),
                   " must be int64");
}

inline void check_ce_logits(const Tensor& logits, const Tensor& target, const VocabShard& vocab) {
  check_floating(logits, "logits");
  check_ce_target(target);
  check_same_device(target, "target", logits, "logits");
  TORCH_CHECK_VALUE(
      logits.dim() >= 1 && target.sizes() == logits.sizes().slice(0, logits.dim() - 1),
      "target: shape ", target.sizes(), " must be that of logits, ", logits.sizes(),
      ", without the last dim");
  check_vocab_range(vocab.start, vocab.local, vocab.size, logits.size(-1), "columns of logits");
}

// Statistics are fp32, or fp64 for fp64
inline at::ScalarType ce_stats_dtype(const Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_ce_stats(const Tensor& stats, const Tensor& target) {
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
inline bool has_shard_row(const Tensor& stats, const Tensor& target) {
  return stats.size(1) == target.numel() + 1;
}

inline void check_ce_grad(const Tensor& grad, const Tensor& lse, const Tensor& logits,
                          const Tensor& target) {
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

inline void check_ce_writable(const Tensor& logits) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(logits) != at::MemOverlap::Yes,
                    "logits: an expanded tensor (strides ", logits.strides(),
                    ") cannot hold its own gradient; use inplace_backward=False");
}

// A tensor viewed as rows of its last dim: elements contiguous, `stride` from row to row
struct Rows {
  Tensor tensor;  // keeps the memory alive
  int64_t count, width, stride;
};

// Without a copy where the strides allow it (logits are often the first columns of a wider, padded
// tensor); false where they do not.
inline bool rows_of(const Tensor& t, Rows& rows) {
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

inline Rows rows_of(const Tensor& t) {
  Rows rows;
  if (!rows_of(t, rows)) rows_of(t.contiguous(), rows);
  return rows;
}

// What the gradient of the logits is computed from, contiguous
struct CrossEntropyGrad {
  Tensor grad, target, lse;
};

// Device::stats(rows, target, args, shard_row, vocab_size_given, result), Device::loss(stats,
// target, args, loss, lse) and Device::gradient(inputs, x, dx, args) fill their results; dx may be
// x.
template <typename Device>
struct CrossEntropyPrimitives {
  static Tensor stats(const Tensor& logits, const Tensor& target, int64_t vocab_start,
                      int64_t vocab_local, int64_t vocab_size, int64_t ignore_index, bool shard_row,
                      bool vocab_size_given) {
    const CrossEntropyArgs args{{vocab_start, vocab_local, vocab_size}, ignore_index};
    check_ce_logits(logits, target, args.vocab);
    const Rows rows = rows_of(logits);
    const Tensor result =
        at::empty({rows.count + shard_row, 4}, logits.options().dtype(ce_stats_dtype(logits)));
    Device::stats(rows, target.contiguous(), args, shard_row, vocab_size_given, result);
    return result;
  }

  static std::tuple<Tensor, Tensor> loss(const Tensor& stats, const Tensor& target,
                                         int64_t vocab_size, int64_t ignore_index,
                                         double label_smoothing, double z_loss) {
    check_ce_stats(stats, target);
    const int64_t count = target.numel();
    const Tensor loss = at::empty({count}, stats.options());
    const Tensor lse = at::empty({count, 2}, stats.options());
    Device::loss(stats.contiguous(), target.contiguous(),
                 {{0, 0, vocab_size}, ignore_index, label_smoothing, z_loss}, loss, lse);
    return {loss, lse};
  }

  static Tensor bwd(const Tensor& grad, const Tensor& logits, const Tensor& target,
                    const Tensor& lse, int64_t vocab_start, int64_t vocab_local, int64_t vocab_size,
                    int64_t ignore_index, double label_smoothing, double z_loss) {
    return gradient(
        grad, logits, target, lse,
        {{vocab_start, vocab_local, vocab_size}, ignore_index, label_smoothing, z_loss});
  }

  static void bwd_inplace(const Tensor& grad, const Tensor& logits, const Tensor& target,
                          const Tensor& lse, int64_t vocab_start, int64_t vocab_local,
                          int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                          double z_loss) {
    const CrossEntropyArgs args{
        {vocab_start, vocab_local, vocab_size}, ignore_index, label_smoothing, z_loss};
    check_ce_writable(logits);
    Rows rows;
    if (!rows_of(logits, rows)) {  // no row structure in memory: copy
      logits.copy_(gradient(grad, logits, target, lse, args));
      return;
    }
    Device::gradient(checked(grad, logits, target, lse, args), rows, rows, args);
  }

 private:
  static Tensor gradient(const Tensor& grad, const Tensor& logits, const Tensor& target,
                         const Tensor& lse, const CrossEntropyArgs& args) {
    const auto inputs = checked(grad, logits, target, lse, args);
    const Tensor dx = at::empty_like(logits, at::MemoryFormat::Contiguous);
    Device::gradient(inputs, rows_of(logits), rows_of(dx), args);
    return dx;
  }

  static CrossEntropyGrad checked(const Tensor& grad, const Tensor& logits, const Tensor& target,
                                  const Tensor& lse, const CrossEntropyArgs& args) {
    check_ce_logits(logits, target, args.vocab);
    check_ce_grad(grad, lse, logits, target);
    return {grad.contiguous(), target.contiguous(), lse.contiguous()};
  }
};

}  // namespace tp_ext
