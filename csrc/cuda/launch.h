// What every launcher needs: the device guard, the current stream, dtype dispatch, grid size, the
// launch check.

#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "storage.h"

namespace tp_ext {

constexpr int kThreads = 256;

// Enough blocks to fill any GPU; kernels are grid-stride
inline int grid_for(int64_t items, int threads = kThreads) {
  const int64_t blocks = (items + threads - 1) / threads;
  return static_cast<int>(blocks < 1 ? 1 : blocks > 65535 ? 65535 : blocks);
}

template <typename F>
void dispatch_floating(at::ScalarType dtype, const char* op, F f) {
  dispatch_storage<__nv_bfloat16, __half>(dtype, op, f);
}

}  // namespace tp_ext
