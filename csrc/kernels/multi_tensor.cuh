// Many tensors on CUDA: a block per chunk (multi_tensor.h), 16-byte accesses where a tensor is
// aligned to them. Unaligned ones are read element by element by the same threads, so that an
// address changes no sum.

#pragma once

#include "multi_tensor.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace tp_ext {

constexpr int kListThreads = 256, kSumThreads = 1024;

// Calls f(i, n) for groups of up to N elements from i on
template <int N, typename F>
__device__ __forceinline__ void for_each_group(int64_t length, F f) {
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * N; i < length;
       i += static_cast<int64_t>(blockDim.x) * N)
    f(i, length - i < N ? static_cast<int>(length - i) : N);
}

// n elements from i on; the rest are zero
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load_group(const T* x, int64_t i, int n, bool aligned) {
  if (aligned && n == N) return load<N>(x, i);
  Vec<T, N> group;
#pragma unroll
  for (int k = 0; k < N; ++k) group.v[k] = k < n ? x[i + k] : from_acc<T>(0);
  return group;
}

template <typename T>
__device__ __forceinline__ bool aligned_to_vector(const T* x) {
  return reinterpret_cast<uintptr_t>(x) % kVecBytes == 0;
}

// partial[blockIdx.x] = sum of the squares of the block's chunk
template <typename T>
__global__ void __launch_bounds__(kListThreads)
    squared_norm_kernel(TensorList list, double* __restrict__ partial) {
  constexpr int kN = kVec<T>;
  __shared__ double scratch[32];
  const TensorChunk chunk = chunk_at(list, blockIdx.x);
  const T* const x = static_cast<const T*>(list.data[chunk.tensor]) + chunk.start;
  const bool aligned = aligned_to_vector(x);
  double sum = 0;
  for_each_group<kN>(chunk.length, [&](int64_t i, int n) {
    const Vec<T, kN> group = load_group<kN>(x, i, n, aligned);
#pragma unroll
    for (int k = 0; k < kN; ++k) sum += squared(group.v[k]);
  });
  sum = block_reduce(sum, Sum{}, 0.0, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// *total = sum of n partial sums; one block
__global__ void __launch_bounds__(kSumThreads)
    sum_of_partials_kernel(const double* __restrict__ partial, int64_t n, double* total) {
  __shared__ double scratch[32];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
  sum = block_reduce(sum, Sum{}, 0.0, scratch);
  if (threadIdx.x == 0) *total = sum;
}

// x *= *scale; nothing is written for a scale of 1
template <typename T>
__global__ void __launch_bounds__(kListThreads)
    multi_tensor_scale_kernel(TensorList list, const double* __restrict__ scale) {
  constexpr int kN = kVec<T>;
  if (*scale == 1.0) return;
  const acc_t<T> factor = static_cast<acc_t<T>>(*scale);
  const TensorChunk chunk = chunk_at(list, blockIdx.x);
  T* const x = static_cast<T*>(list.data[chunk.tensor]) + chunk.start;
  const bool aligned = aligned_to_vector(x);
  for_each_group<kN>(chunk.length, [&](int64_t i, int n) {
    Vec<T, kN> group = load_group<kN>(static_cast<const T*>(x), i, n, aligned);
#pragma unroll
    for (int k = 0; k < kN; ++k) group.v[k] = scaled(group.v[k], factor);
    if (aligned && n == kN) return store(x, i, group);
#pragma unroll
    for (int k = 0; k < kN; ++k)
      if (k < n) x[i + k] = group.v[k];
  });
}

}  // namespace tp_ext
