// Lists of tensors: their checks, and the stretches of memory they are; the same on every device.

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

// xs, each as one stretch of memory: itself where it is one, whatever the order of its dims, and a
// copy where it has holes
inline std::vector<at::Tensor> as_stretches(at::TensorList xs) {
  std::vector<at::Tensor> result;
  result.reserve(xs.size());
  for (const auto& x : xs) result.push_back(x.is_non_overlapping_and_dense() ? x : x.contiguous());
  return result;
}

// Writes the copies among the stretches back to xs, and tells autograd of the others that they
// have been written
inline void finish_writing(at::TensorList xs, const std::vector<at::Tensor>& stretches) {
  for (size_t i = 0; i < xs.size(); ++i)
    if (!xs[i].is_same(stretches[i]))
      xs[i].copy_(stretches[i]);
    else if (!xs[i].is_inference())
      xs[i].unsafeGetTensorImpl()->bump_version();
}

}  // namespace tp_ext
