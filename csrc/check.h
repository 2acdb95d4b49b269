// Named checks. An error names the argument, its value and the rule; TORCH_CHECK_VALUE becomes
// ValueError, TORCH_CHECK_TYPE TypeError and TORCH_CHECK_INDEX IndexError in Python, the types that
// the Python side of tp_ext raises.

#pragma once

#include <ATen/core/Tensor.h>

namespace tp_ext {

inline void check_floating(const at::Tensor& t, const char* name) {
  TORCH_CHECK_TYPE(at::isFloatingType(t.scalar_type()), name, ": dtype ", t.scalar_type(),
                   " must be a floating point type");
}

// purpose: of the dtype, such as " with float8"
inline void check_up_to_float32(const at::Tensor& t, const char* name, const char* purpose = "") {
  check_floating(t, name);
  TORCH_CHECK_TYPE(t.scalar_type() != at::kDouble, name, ": dtype ", t.scalar_type(),
                   " must be float32, bfloat16 or float16", purpose);
}

inline void check_same_dtype(const at::Tensor& t, const char* name, const at::Tensor& like,
                             const char* like_name) {
  TORCH_CHECK_TYPE(t.scalar_type() == like.scalar_type(), name, ": dtype ", t.scalar_type(),
                   " must be that of ", like_name, ", ", like.scalar_type());
}

inline void check_same_device(const at::Tensor& t, const char* name, const at::Tensor& like,
                              const char* like_name) {
  TORCH_CHECK_VALUE(t.device() == like.device(), name, ": device ", t.device(), " must be that of ",
                    like_name, ", ", like.device());
}

// dim of a tensor with ndim dims, counted from 0
inline int64_t check_dim(int64_t dim, int64_t ndim, const char* name) {
  TORCH_CHECK_INDEX(-ndim <= dim && dim < ndim, name, ": ", dim, " must be in [", -ndim, ", ", ndim,
                    ") for a tensor of ", ndim, " dims");
  return dim < 0 ? dim + ndim : dim;
}

}  // namespace tp_ext
