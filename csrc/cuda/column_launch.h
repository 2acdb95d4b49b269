// Shared by the launchers of kernels that walk down columns: choice of the kernel, sum of the
// partial sums.

#pragma once

#include <ATen/core/Tensor.h>
#include <type_traits>

#include "cuda/launch.h"
#include "kernels/column_sum.cuh"
#include "kernels/vec.cuh"

namespace tp_ext {

// Calls f(integral constants kBias, N): whether there is a bias, elements per access
template <typename T, typename F>
void dispatch_shape(bool bias, bool vector, F f) {
  using One = std::integral_constant<int, 1>;
  using Many = std::integral_constant<int, kVec<T>>;
  if (bias)
    vector ? f(std::true_type{}, Many{}) : f(std::true_type{}, One{});
  else
    vector ? f(std::false_type{}, Many{}) : f(std::false_type{}, One{});
}

// dbias [n] = column sums of partial [row_blocks, n]
template <typename T>
void sum_partials(const at::Tensor& partial, const at::Tensor& dbias, cudaStream_t stream) {
  const int64_t n = dbias.numel();
  if (n == 0) return;
  sum_partials_kernel<T><<<sum_partials_grid(n), sum_partials_block(), 0, stream>>>(
      in<acc_t<T>>(partial), out<T>(dbias), partial.size(0), n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace tp_ext
