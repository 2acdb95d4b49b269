// Checks of the rotary embedding, the same on every device.

#pragma once

#include <utility>

#include "check.h"
#include "kernels/rope.h"

namespace tp_ext {

inline void check_rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  check_floating(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 3, "x: shape ", x.sizes(), " must be [tokens, heads, head_dim]");
  const auto angle_dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const auto& [t, name] : {std::pair{&cos, "cos"}, std::pair{&sin, "sin"}}) {
    TORCH_CHECK_TYPE(t->scalar_type() == angle_dtype, name, ": dtype ", t->scalar_type(),
                     " must be ", angle_dtype, " for x of ", x.scalar_type());
    check_same_device(*t, name, x, "x");
    TORCH_CHECK_VALUE(t->dim() == 2 && t->size(0) == x.size(0) && 2 * t->size(1) <= x.size(2), name,
                      ": shape ", t->sizes(),
                      " must be [tokens, rotary_dim / 2], rotary_dim <= head_dim, for x of shape ",
                      x.sizes());
  }
  TORCH_CHECK_VALUE(cos.size(1) == sin.size(1), "sin: shape ", sin.sizes(),
                    " must be that of cos, ", cos.sizes());
}

// x itself if only its tokens are strided (a slice of fused q, k, v), a contiguous copy otherwise
inline at::Tensor rope_input(const at::Tensor& x) {
  const bool rows =
      (x.stride(2) == 1 || x.size(2) == 1) && (x.stride(1) == x.size(2) || x.size(1) == 1);
  return rows ? x : x.contiguous();
}

inline RopeShape rope_shape(const at::Tensor& x, const at::Tensor& cos) {
  return {x.size(0), x.size(1), x.size(2), cos.size(1), x.stride(0)};
}

}  // namespace tp_ext
