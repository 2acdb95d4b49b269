// Raw pointers and dtype dispatch, for the callers of kernels on both devices.

#pragma once

#include <ATen/core/Tensor.h>

namespace tp_ext {

// Calls f(T{}), T the element type of dtype: double, float, BFloat16 or Half
template <typename BFloat16, typename Half, typename F>
void dispatch_storage(at::ScalarType dtype, const char* op, F f) {
  switch (dtype) {
    case at::kDouble:
      return f(double{});
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(BFloat16{});
    case at::kHalf:
      return f(Half{});
    default:
      TORCH_CHECK_TYPE(false, op, ": dtype ", dtype,
                       " must be float64, float32, bfloat16 or float16");
  }
}

template <typename T>
const T* in(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
const T* in(const std::optional<at::Tensor>& t) {
  return t.has_value() && t->defined() ? in<T>(*t) : nullptr;
}
template <typename T>
T* out(const at::Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace tp_ext
