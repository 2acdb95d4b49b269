// Frozen weights of 8 and 4 bits on CUDA: rows in fp32, and products of few tokens, in which a warp
// reads a row of the weight once for each kLowBitsTokens.

#pragma once

#include "low_bits.h"
#include "reduce.cuh"
#include "warp_rows.cuh"

namespace tp_ext {

constexpr int kLowBitsTokens = 4;

// Value i of the bytes q: of int4, input 2j is in the low, 2j + 1 in the high four bits
template <bool four, int N>
__device__ __forceinline__ float value_of(const Vec<uint8_t, N>& q, int i) {
  if constexpr (!four) return static_cast<float>(static_cast<int8_t>(q.v[i]));
  return static_cast<float>((i % 2 == 0 ? q.v[i / 2] & 15 : q.v[i / 2] >> 4) - 8);
}

// N bytes, or one where rows and blocks are not whole vectors of the kernel
template <bool four>
constexpr int kRowBytes = four ? 2 : 4;  // four values, a vector of the result
constexpr int kProductBytes = 16;

// Whether N bytes lie in one block, and all rows of packed and of values start aligned
template <int N>
bool low_bits_in_vectors(LowBitsRows rows, const void* packed, const void* values) {
  return rows.bytes % N == 0 && rows.bytes_of_block % N == 0 &&
         reinterpret_cast<uintptr_t>(packed) % N == 0 &&
         reinterpret_cast<uintptr_t>(values) % kVecBytes == 0;
}

template <bool four, int N>
__global__ void __launch_bounds__(kThreads)
    low_bits_rows_kernel(const uint8_t* __restrict__ packed, const float* __restrict__ scale,
                         float* __restrict__ weight, LowBitsRows rows) {
  constexpr int values = four ? 2 : 1;
  grid_stride(rows.count * rows.bytes, N, [&](int64_t i) {
    const int64_t row = divide(i, rows.bytes), j = i - row * rows.bytes;
    const float s = scale[row * rows.blocks() + divide(j, rows.bytes_of_block)];
    const auto q = load<N>(packed, i);
    Vec<float, N * values> w;
#pragma unroll
    for (int k = 0; k < N * values; ++k) w.v[k] = value_of<four>(q, k) * s;
    if constexpr (N == 1)
      for (int k = 0; k < values; ++k) weight[i * values + k] = w.v[k];
    else
      store_global(weight, i * values, w);
  });
}

// y [tokens, rows] = x W^T. Two blocks of a multiprocessor at least: left to itself ptxas spills
// registers for more of them
template <bool four, int N, typename T>
__global__ void __launch_bounds__(kThreads, 2)
    low_bits_product_kernel(const T* __restrict__ x, const uint8_t* __restrict__ packed,
                            const float* __restrict__ scale, T* __restrict__ y, int64_t tokens,
                            LowBitsRows rows) {
  constexpr int values = four ? 2 : 1, width = N == 1 ? 1 : kVec<T>;
  const int lane = threadIdx.x % kWarp;
  for (int64_t row = warp_index(); row < rows.count; row += warp_count())
    for (int64_t first = 0; first < tokens; first += kLowBitsTokens) {
      float sums[kLowBitsTokens] = {};
      for (int64_t j = int64_t{lane} * N; j < rows.bytes; j += kWarp * N) {
        const auto q = load<N>(packed, row * rows.bytes + j);
        const float s = scale[row * rows.blocks() + divide(j, rows.bytes_of_block)];
#pragma unroll
        for (int t = 0; t < kLowBitsTokens; ++t) {
          if (first + t >= tokens) break;
          const int64_t from = ((first + t) * rows.bytes + j) * values;
          float part = 0;
#pragma unroll
          for (int k = 0; k < N * values; k += width) {
            const auto v = widen(load<width>(x, from + k));
#pragma unroll
            for (int e = 0; e < width; ++e) part += value_of<four>(q, k + e) * v.v[e];
          }
          sums[t] += part * s;
        }
      }
#pragma unroll
      for (int t = 0; t < kLowBitsTokens; ++t) {
        const float sum = warp_reduce(sums[t], Sum());
        if (lane == 0 && first + t < tokens) y[(first + t) * rows.count + row] = from_acc<T>(sum);
      }
    }
}

}  // namespace tp_ext
