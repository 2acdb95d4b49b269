// bias_act on CUDA: y = act(x + bias), x [rows, n]; backward: dx = grad * act'(x + bias) and rows
// of partial column sums of dx, x + bias recomputed. Without a bias the rows are those of
// flat_columns.
//
// A thread owns N neighbouring columns, loads their bias once and walks down the rows
// (column_sum.cuh). N elements are one 16-byte access; only a single row may have a remainder,
// which its last thread handles one by one.

#pragma once

#include "brief_activation.h"
#include "column_sum.cuh"
#include "vec.cuh"

namespace tp_ext {

// Whether 16-byte accesses can be used: no remainder is allowed with several rows or with column
// sums
template <typename T>
bool bias_act_forward_vectors(int64_t rows, int64_t n, const T* x, const T* bias, const T* y) {
  return vectorisable<T>(rows == 1 ? 0 : n, x, bias, y);
}
template <typename T>
bool bias_act_backward_vectors(int64_t n, const T* grad, const T* x, const T* bias, const T* dx) {
  return vectorisable<T>(bias ? n : 0, grad, x, bias, dx);
}

template <typename Act, bool kBias, int N, typename T>
__global__ void __launch_bounds__(kColumnThreads)
    bias_act_forward_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y,
                            int64_t rows, int64_t n) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= n) return;
  const auto activate = [](T v, acc_t<T> b) {
    return from_acc<T>(DeviceForm<Act, T>::value(with_bias<kBias>(v, b)));
  };
  if (column + N > n) {
    for (int64_t i = column; i < n; ++i)
      y[i] = activate(x[i], kBias ? to_acc(bias[i]) : acc_t<T>(0));
    return;
  }
  acc_t<T> b[N] = {};
  if constexpr (kBias) {
    const Vec<T, N> raw = load<N>(bias, column);
#pragma unroll
    for (int k = 0; k < N; ++k) b[k] = to_acc(raw.v[k]);
  }
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
       row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const Vec<T, N> in = load<N>(x, row * n + column);
    Vec<T, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) out.v[k] = activate(in.v[k], b[k]);
    store<N>(y, row * n + column, out);
  }
}

// 48 registers: on sm_80 ptxas alone keeps to 40 for silu and spills
template <typename T>
constexpr int kBiasActBlocks = sizeof(T) == 8 ? kColumnBlocks<T> : 5;

// partial: [gridDim.y, n], written when kBias
template <typename Act, bool kBias, int N, typename T>
__global__ void __launch_bounds__(kColumnThreads, kBiasActBlocks<T>)
    bias_act_backward_kernel(const T* __restrict__ grad, const T* __restrict__ x,
                             const T* __restrict__ bias, T* __restrict__ dx,
                             acc_t<T>* __restrict__ partial, int64_t rows, int64_t n) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const auto backward = [](T g, T v, acc_t<T> b) {
    return DeviceForm<Act, T>::backward(to_acc(g), with_bias<kBias>(v, b));
  };
  acc_t<T> sum[N] = {};
  if (!kBias && column < n && column + N > n) {
    for (int64_t i = column; i < n; ++i) dx[i] = from_acc<T>(backward(grad[i], x[i], acc_t<T>(0)));
  } else if (column < n) {
    acc_t<T> b[N] = {};
    if constexpr (kBias) {
      const Vec<T, N> raw = load<N>(bias, column);
#pragma unroll
      for (int k = 0; k < N; ++k) b[k] = to_acc(raw.v[k]);
    }
    for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
         row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
      const int64_t i = row * n + column;
      const Vec<T, N> g = load<N>(grad, i), in = load<N>(x, i);
      Vec<T, N> out;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const acc_t<T> d = backward(g.v[k], in.v[k], b[k]);
        out.v[k] = from_acc<T>(d);
        sum[k] += d;
      }
      store<N>(dx, i, out);
    }
  }
  if constexpr (kBias) {  // all threads take part, those past the last column with zeros
    block_column_sum(sum);
    if (threadIdx.y == 0 && column < n) {
#pragma unroll
      for (int k = 0; k < N; ++k) partial[blockIdx.y * n + column + k] = sum[k];
    }
  }
}

}  // namespace tp_ext
