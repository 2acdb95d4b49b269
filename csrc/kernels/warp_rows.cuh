// Rows by warps: a warp accesses 32 vectors of one row, grid-stride.

#pragma once

#include "divide.h"
#include "vec.cuh"

namespace tp_ext {

constexpr int kWarp = 32;

// Of a long row a warp takes this many times 32 vectors where each lane has them in flight
// together: what is read or computed once per row is then shared by as many
constexpr int kParts = 4;

// Warps for a row, of parts times 32 vectors
template <int N>
__host__ __device__ __forceinline__ int64_t warps_of_row(int64_t width, int parts) {
  const int64_t each = int64_t{kWarp} * N * parts;
  return (width + each - 1) / each;
}

// Threads of a launch over rows that for_warp_rows divides alike
template <int N>
int64_t warp_row_threads(int64_t rows, int64_t width, int parts = 1) {
  return rows * warps_of_row<N>(width, parts) * kWarp;
}

// The number of this warp in the grid, and of all
__device__ __forceinline__ int64_t warp_index() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
}
__device__ __forceinline__ int64_t warp_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
}

// Calls f(row, column) for this lane's vectors, `parts` of them with kWarp * N elements from one to
// the next; column may lie past the end of the row. All lanes of a warp get the same row.
template <int N, typename F>
__device__ __forceinline__ void for_warp_rows(int64_t rows, int64_t width, int parts, F f) {
  const int64_t each = warps_of_row<N>(width, parts), items = rows * each, stride = warp_count();
  for (int64_t item = warp_index(); item < items; item += stride) {
    const int64_t row = divide(item, each);
    f(row, ((item - row * each) * parts * kWarp + threadIdx.x % kWarp) * N);
  }
}
template <int N, typename F>
__device__ __forceinline__ void for_warp_rows(int64_t rows, int64_t width, F f) {
  for_warp_rows<N>(rows, width, 1, f);
}

// Elements of the row from this lane's column on, as far as kParts vectors reach; at most 0: none
template <int N>
__device__ __forceinline__ int parts_left(int64_t column, int64_t width) {
  const int64_t left = width - column;
  return static_cast<int>(left < kParts * kWarp * N ? left : kParts * kWarp * N);
}

// Calls f(part, offset) for those of this lane's vectors that lie in the row
template <int N, typename F>
__device__ __forceinline__ void for_parts(int left, F f) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    if (part * kWarp * N < left) f(part, part * kWarp * N);
}

// One row's vectors of this lane, at p + column, past the end of the row any of its others: without
// a branch around each the loads are in flight together
template <int N, typename T>
struct Parts {
  Vec<T, N> v[kParts];
};
template <int N, typename T>
__device__ __forceinline__ Parts<N, T> load_parts(const T* row, int64_t column, int left) {
  const T* const p = left > 0 ? row + column : row;
  Parts<N, T> parts;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = part * kWarp * N;
    parts.v[part] = load<N>(p, i < left ? i : 0);
  }
  return parts;
}

}  // namespace tp_ext
