// gated_act on CUDA: x [rows, 2f] = gate | up, y [rows, f] = act(gate + bias_gate) * (up +
// bias_up); backward: both halves of dx and rows of partial column sums of dx, the two factors
// recomputed.
//
// A thread owns N neighbouring columns of y, loads their biases once and walks down the rows
// (column_sum.cuh). N divides f: N elements are one 16-byte access, or N is 1.

#pragma once

#include "brief_activation.h"
#include "column_sum.cuh"
#include "vec.cuh"

namespace tp_ext {

template <bool kBias, int N, typename T>
__device__ __forceinline__ void load_gated_bias(const T* bias, int64_t column, int64_t f,
                                                acc_t<T> (&gate)[N], acc_t<T> (&up)[N]) {
  if constexpr (kBias) {
    const Vec<T, N> raw_gate = load<N>(bias, column), raw_up = load<N>(bias, f + column);
#pragma unroll
    for (int k = 0; k < N; ++k) gate[k] = to_acc(raw_gate.v[k]), up[k] = to_acc(raw_up.v[k]);
  }
}

template <typename Act, bool kBias, int N, typename T>
__global__ void __launch_bounds__(kColumnThreads)
    gated_act_forward_kernel(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y,
                             int64_t rows, int64_t f) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= f) return;
  acc_t<T> bias_gate[N] = {}, bias_up[N] = {};
  load_gated_bias<kBias>(bias, column, f, bias_gate, bias_up);
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
       row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    const int64_t i = row * 2 * f + column;
    const Vec<T, N> gate = load<N>(x, i), up = load<N>(x, i + f);
    Vec<T, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const acc_t<T> value = DeviceForm<Act, T>::value(with_bias<kBias>(gate.v[k], bias_gate[k]));
      out.v[k] = from_acc<T>(value * with_bias<kBias>(up.v[k], bias_up[k]));
    }
    store<N>(y, row * f + column, out);
  }
}

// partial: [gridDim.y, 2f], written when kBias
template <typename Act, bool kBias, int N, typename T>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks<T>)
    gated_act_backward_kernel(const T* __restrict__ grad, const T* __restrict__ x,
                              const T* __restrict__ bias, T* __restrict__ dx,
                              acc_t<T>* __restrict__ partial, int64_t rows, int64_t f) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  acc_t<T> sum_gate[N] = {}, sum_up[N] = {};
  if (column < f) {
    acc_t<T> bias_gate[N] = {}, bias_up[N] = {};
    load_gated_bias<kBias>(bias, column, f, bias_gate, bias_up);
    for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
         row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
      const int64_t i = row * 2 * f + column;
      const Vec<T, N> g = load<N>(grad, row * f + column), gate = load<N>(x, i),
                      up = load<N>(x, i + f);
      Vec<T, N> dgate, dup;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const auto act = DeviceForm<Act, T>::value_slope(with_bias<kBias>(gate.v[k], bias_gate[k]));
        const acc_t<T> dy = to_acc(g.v[k]);
        const acc_t<T> da = dy * with_bias<kBias>(up.v[k], bias_up[k]) * act.slope,
                       db = dy * act.value;
        dgate.v[k] = from_acc<T>(da);
        dup.v[k] = from_acc<T>(db);
        sum_gate[k] += da;
        sum_up[k] += db;
      }
      store<N>(dx, i, dgate);
      store<N>(dx, i + f, dup);
    }
  }
  if constexpr (kBias) {  // all threads take part, those past the last column with zeros
    block_column_sum(sum_gate);
    block_column_sum(sum_up);
    if (threadIdx.y == 0 && column < f) {
      acc_t<T>* const row = partial + blockIdx.y * 2 * f + column;
#pragma unroll
      for (int k = 0; k < N; ++k) row[k] = sum_gate[k], row[f + k] = sum_up[k];
    }
  }
}

}  // namespace tp_ext
