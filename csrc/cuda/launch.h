// What every launcher needs: the device guard, the current stream, dtype dispatch, grid size, the
// launch check.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace tp_ext {

constexpr int kThreads = 256;

// Enough blocks to fill any GPU; kernels are grid-stride
inline int grid_for(int64_t items, int threads = kThreads) {
  const int64_t blocks = (items + threads - 1) / threads;
  return static_cast<int>(blocks < 1 ? 1 : blocks > 65535 ? 65535 : blocks);
}

// Calls f(T{}) with the device type of dtype: double, float, __nv_bfloat16 or __half
template <typename F>
void dispatch_floating(at::ScalarType dtype, const char* op, F f) {
  switch (dtype) {
    case at::kDouble:
      return f(double{});
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(__nv_bfloat16{});
    case at::kHalf:
      return f(__half{});
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
