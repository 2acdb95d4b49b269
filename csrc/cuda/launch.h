// For every launcher: the device guard, the current stream, dtype dispatch, the launch check. The
// shape of a launch is computed in kernels/, where it is tested without a GPU.

#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "dtype_dispatch.h"

namespace tp_ext {

template <typename F>
void dispatch_floating(at::ScalarType dtype, const char* op, F f) {
  dispatch_storage<__nv_bfloat16, __half>(dtype, op, f);
}

}  // namespace tp_ext
