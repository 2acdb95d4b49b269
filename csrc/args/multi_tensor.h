// Lists of tensors: their checks, and each tensor as one contiguous range; the same on every
// device.

#pragma once

#include <vector>

#include "check.h"
#include "kernels/multi_tensor.h"

namespace tp_ext {

inline void check_tensor_list(at::TensorList xs, const at::Tensor& device_of, const char* name) {
  for (size_t i = 0; i < xs.size(); ++i) {
    TORCH_CHECK_TYPE(at::isFloatingType(xs[i].scalar_type()), "xs[", i, "]: dtype ",
                     xs[i].scalar_type(), " must be a floating point type");
    TORCH_CHECK_VALUE(xs[i].device() == device_of.device(), "xs[", i, "]: device ", xs[i].device(),
                      " must be that of ", name, ", ", device_of.device());
  }
}

inline void check_scale(at::TensorList xs, const at::Tensor& scale) {
  check_floating(scale, "scale");
  TORCH_CHECK_VALUE(scale.dim() == 0, "scale: shape ", scale.sizes(), " must have no dim");
  check_tensor_list(xs, scale, "scale");
  for (size_t i = 0; i < xs.size(); ++i)
    for (int64_t d = 0; d < xs[i].dim(); ++d)
      TORCH_CHECK_VALUE(xs[i].stride(d) != 0 || xs[i].size(d) < 2, "xs[", i, "]: strides ",
                        xs[i].strides(), " must not let elements share memory: it is written");
}

// Each tensor as one contiguous range of memory: the tensor itself where it is dense, whatever the
// order of its dims, a copy where it has holes
inline std::vector<at::Tensor> as_dense(at::TensorList xs) {
  std::vector<at::Tensor> result;
  result.reserve(xs.size());
  for (const auto& x : xs) result.push_back(x.is_non_overlapping_and_dense() ? x : x.contiguous());
  return result;
}

// Writes the copies in `dense` back to xs; for the tensors written in place, bumps the version
// counter of autograd
inline void finish_writing(at::TensorList xs, const std::vector<at::Tensor>& dense) {
  for (size_t i = 0; i < xs.size(); ++i)
    if (!xs[i].is_same(dense[i]))
      xs[i].copy_(dense[i]);
    else if (!xs[i].is_inference())
      xs[i].unsafeGetTensorImpl()->bump_version();
}

}  // namespace tp_ext
