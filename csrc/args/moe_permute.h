// Argument checks of moe_sort, moe_permute, moe_unpermute and moe_dot, the same on every device.

#pragma once

#include "check.h"
#include "dtype_dispatch.h"
#include "kernels/moe_permute.h"
#include "types.h"

namespace tp_ext {

// fp32, or fp64 for fp64
inline at::ScalarType moe_weights_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_moe_slots(const Tensor& slots, const char* name) {
  TORCH_CHECK_TYPE(slots.scalar_type() == at::kLong, name, ": dtype ", slots.scalar_type(),
                   " must be int64");
  TORCH_CHECK_VALUE(slots.dim() == 2, name, ": shape ", slots.sizes(),
                    " must be [tokens, choices]");
}

inline void check_moe_sort(const Tensor& experts, int64_t num_experts) {
  check_moe_slots(experts, "experts");
  TORCH_CHECK_VALUE(num_experts >= 1 && num_experts < INT32_MAX, "num_experts: ", num_experts,
                    " must be at least 1 and below 2^31 - 1");
}

inline void check_moe_matrix(const Tensor& t, const char* name) {
  check_floating(t, name);
  TORCH_CHECK_VALUE(t.dim() == 2, name, ": shape ", t.sizes(), " must have two dims");
}

inline void check_moe_tokens(const Tensor& x, const char* name, const Tensor& rows) {
  check_moe_matrix(x, name);
  check_moe_slots(rows, "rows");
  check_same_device(rows, "rows", x, name);
  TORCH_CHECK_VALUE(x.size(0) == rows.size(0), name, ": shape ", x.sizes(),
                    " must have as many tokens as rows, ", rows.size(0));
}

inline void check_moe_weights(const OptionalTensor& weights, const Tensor& x, const Tensor& rows) {
  if (!weights.has_value()) return;
  TORCH_CHECK_TYPE(weights->scalar_type() == moe_weights_dtype(x), "weights: dtype ",
                   weights->scalar_type(), " must be ", moe_weights_dtype(x), " for tensors of ",
                   x.scalar_type());
  check_same_device(*weights, "weights", x, "x");
  TORCH_CHECK_VALUE(weights->sizes() == rows.sizes(), "weights: shape ", weights->sizes(),
                    " must be that of rows, ", rows.sizes());
}

inline MoeShape check_moe_permute(const Tensor& x, const Tensor& rows, int64_t num_rows,
                                  const OptionalTensor& weights) {
  check_moe_tokens(x, "x", rows);
  check_moe_weights(weights, x, rows);
  TORCH_CHECK_VALUE(num_rows >= 0, "num_rows: ", num_rows, " must be at least 0");
  return {rows.size(0), rows.size(1), num_rows, x.size(1)};
}

inline MoeShape check_moe_unpermute(const Tensor& y, const Tensor& rows,
                                    const OptionalTensor& weights) {
  check_moe_matrix(y, "y");
  check_moe_slots(rows, "rows");
  check_same_device(rows, "rows", y, "y");
  check_moe_weights(weights, y, rows);
  return {rows.size(0), rows.size(1), y.size(0), y.size(1)};
}

inline MoeShape check_moe_dot(const Tensor& x, const char* name, const Tensor& y,
                              const Tensor& rows) {
  check_moe_tokens(x, name, rows);
  check_moe_matrix(y, "y");
  check_same_dtype(y, "y", x, name);
  check_same_device(y, "y", x, name);
  TORCH_CHECK_VALUE(x.size(1) == y.size(1), "y: shape ", y.sizes(),
                    " must have as many columns as ", name, ", ", x.size(1));
  return {rows.size(0), rows.size(1), y.size(0), x.size(1)};
}

}  // namespace tp_ext
