// For every launcher: the device guard, the current stream, dtype dispatch, the launch check. The
// shape of a launch is computed in kernels/, where it is tested without a GPU.

#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "dtype_dispatch.h"
#include "kernels/launch_table.h"

namespace tp_ext {

template <typename F>
void dispatch_floating(at::ScalarType dtype, const char* op, F f) {
  dispatch_storage<__nv_bfloat16, __half>(dtype, op, f);
}

// Multiprocessors of the current device
inline int multiprocessors() {
  int device = 0, count = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// How to launch kernels on rows of `width` elements of T on the current device
template <typename T>
LaunchChoice choose_launch(Family family, int64_t width) {
  int device = 0, major = 0, minor = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return choose_launch(family, sizeof(T), width, 10 * major + minor);
}

}  // namespace tp_ext
