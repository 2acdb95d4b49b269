// Checks of the rotary embedding, the same on every device.

#pragma once

#include <utility>

#include "check.h"
#include "kernels/rope.h"

namespace tp_ext {

inline void check_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                       const std::optional<at::Tensor>& positions) {
  check_floating(x, "x");
  const int64_t dims = x.dim();
  TORCH_CHECK_VALUE(dims == 3 || dims == 4, "x: shape ", x.sizes(),
                    " must be [tokens, heads, head_dim] or [batch, seq, heads, head_dim]");
  const bool given = positions && positions->defined();
  const int64_t rows = given ? 0 : x.size(dims - 3);
  const auto angle_dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const auto& [t, name] : {std::pair{&cos, "cos"}, std::pair{&sin, "sin"}}) {
    TORCH_CHECK_TYPE(t->scalar_type() == angle_dtype, name, ": dtype ", t->scalar_type(),
                     " must be ", angle_dtype, " for x of ", x.scalar_type());
    check_same_device(*t, name, x, "x");
    TORCH_CHECK_VALUE(
        t->dim() == 2 && 2 * t->size(1) <= x.size(dims - 1) && t->size(0) >= rows, name, ": shape ",
        t->sizes(),
        " must be [positions, rotary_dim / 2], rotary_dim <= head_dim, without positions at least ",
        rows, " rows, for x of shape ", x.sizes());
  }
  TORCH_CHECK_VALUE(cos.sizes() == sin.sizes(), "sin: shape ", sin.sizes(),
                    " must be that of cos, ", cos.sizes());
  if (!given) return;
  TORCH_CHECK_TYPE(positions->scalar_type() == at::kLong, "positions: dtype ",
                   positions->scalar_type(), " must be int64");
  check_same_device(*positions, "positions", x, "x");
  TORCH_CHECK_VALUE(positions->sizes() == x.sizes().slice(0, dims - 2), "positions: shape ",
                    positions->sizes(), " must be one for each token of x, of shape ", x.sizes());
}

using GivenFrequencies = std::optional<at::ArrayRef<double>>;

inline void check_rope_tables(const at::Tensor& positions, int64_t rotary_dim, double base,
                              at::ScalarType dtype, const GivenFrequencies& frequencies) {
  TORCH_CHECK_VALUE(positions.dim() == 1, "positions: shape ", positions.sizes(),
                    " must be [positions]");
  TORCH_CHECK_TYPE(!positions.is_complex() && positions.scalar_type() != at::kBool,
                   "positions: dtype ", positions.scalar_type(), " must be an integer type");
  TORCH_CHECK_VALUE(rotary_dim >= 0 && rotary_dim % 2 == 0, "rotary_dim: ", rotary_dim,
                    " must be even and not negative");
  TORCH_CHECK_VALUE(base > 0, "base: ", base, " must be a positive number");
  TORCH_CHECK_TYPE(dtype == at::kDouble || dtype == at::kFloat, "dtype: ", dtype,
                   " must be float32 or float64");
  if (!frequencies) return;
  const int64_t given = static_cast<int64_t>(frequencies->size()), most = RopeFrequencies::kMax;
  TORCH_CHECK_VALUE(2 * given == rotary_dim && given <= most, "frequencies: ", given,
                    " numbers must be rotary_dim / 2 = ", rotary_dim / 2, ", and at most ", most);
}

// x itself if the elements of a head are next to each other (a slice of fused q, k, v, say), a
// contiguous copy otherwise
inline at::Tensor rope_input(const at::Tensor& x) {
  return x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) == 1 ? x : x.contiguous();
}

inline RopeShape rope_shape(const at::Tensor& x, const at::Tensor& cos) {
  const int64_t dims = x.dim(), batch = dims == 4 ? x.size(0) : 1, seq = x.size(dims - 3);
  // The stride of a dim of size 1 is never used and may be anything
  const auto stride = [&](int64_t dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; };
  return {batch * seq,     seq,         x.size(dims - 2),          x.size(dims - 1),
          cos.size(1),     cos.size(0), dims == 4 ? stride(0) : 0, stride(dims - 3),
          stride(dims - 2)};
}

}  // namespace tp_ext
