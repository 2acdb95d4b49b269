// Rows by warps: a warp accesses 32 vectors of one row, grid-stride.

#pragma once

#include "divide.h"
#include "vec.cuh"

namespace tp_ext {

constexpr int kWarp = 32;

// Threads of a launch: a warp for each 32 vectors of a row
template <int N>
int64_t warp_row_threads(int64_t rows, int64_t width) {
  return rows * ((width + kWarp * N - 1) / (kWarp * N)) * kWarp;
}

// The number of this warp in the grid, and of all
__device__ __forceinline__ int64_t warp_index() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
}
__device__ __forceinline__ int64_t warp_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
}

// Calls f(row, column) for this lane's vectors; column may lie past the end of the row
template <int N, typename F>
__device__ __forceinline__ void for_warp_rows(int64_t rows, int64_t width, F f) {
  const int64_t parts = (width + kWarp * N - 1) / (kWarp * N), stride = warp_count();
  for (int64_t item = warp_index(); item < rows * parts; item += stride) {
    const int64_t row = divide(item, parts);
    f(row, ((item - row * parts) * kWarp + threadIdx.x % kWarp) * N);
  }
}

}  // namespace tp_ext
