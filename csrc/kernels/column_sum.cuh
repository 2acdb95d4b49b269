// Column sums of a [rows, n] matrix within a pass over it, in a fixed order and without atomics.
//
// A block of tx x ty threads works on tx * N columns; its threads keep N sums each in registers
// while they walk down the rows, then the block adds its ty rows of threads and writes one row of
// partial sums. A second kernel adds those.

#pragma once

#include "launch_table.h"
#include "scalar.h"

namespace tp_ext {

constexpr int kColumnThreads = 256;

// Minimum number of blocks per multiprocessor in backward; 0: the compiler's choice. In fp64 it
// would save registers for more blocks and spill.
template <typename T>
constexpr int kColumnBlocks = sizeof(T) == 8 ? 2 : 0;

struct ColumnGrid {
  int tx, ty;          // threads of a block along columns and rows
  int64_t tiles;       // blocks along columns
  int64_t row_blocks;  // blocks along rows = rows of partial sums
};

// Blocks of a grid, at most. With sums: as many as 132 multiprocessors hold of 3 and of 5 blocks in
// whole waves; 2048 of 5 were three waves and a tenth, in the time of four. Without sums each wave
// may be small, and the last one hardly counts.
constexpr int kSummedBlocks = 15 * 132, kForwardBlocks = 1 << 14;

// With sums a function of the shape alone, so that results are the same on every GPU. Up to 32
// lanes along a row (one or more whole sectors each), more where there are too few rows for the
// other threads; along the rows enough blocks for a large GPU, each thread with at least 4 rows.
inline ColumnGrid column_grid(int64_t rows, int64_t n, int vec, int blocks = kSummedBlocks) {
  const int64_t vecs = (n + vec - 1) / vec;
  ColumnGrid grid;
  grid.tx = 1;
  while (grid.tx < vecs && grid.tx < (rows < kColumnThreads / grid.tx ? kColumnThreads : 32))
    grid.tx *= 2;
  grid.ty = kColumnThreads / grid.tx;
  grid.tiles = (vecs + grid.tx - 1) / grid.tx;
  if (grid.tiles < 1) grid.tiles = 1;
  const int64_t wanted = blocks / grid.tiles;
  const int64_t useful = (rows + 4 * grid.ty - 1) / (4 * grid.ty);
  grid.row_blocks = wanted < useful ? wanted : useful;
  if (grid.row_blocks < 1) grid.row_blocks = 1;
  return grid;
}

inline ColumnGrid forward_grid(int64_t rows, int64_t n, int vec, const LaunchChoice& tuned) {
  return column_grid(rows, n, vec, tuned.blocks > 0 ? tuned.blocks : kForwardBlocks);
}

// Columns of n elements without a bias: as many as the lanes of a warp have, so that a thread walks
// down rows and computes its address once, or one row where there is a remainder
inline int64_t flat_columns(int64_t n, int vec) {
  return n % (32 * vec) == 0 && n > 0 ? 32 * vec : n;
}

// x + b; without a bias not even + 0, which an addition keeps
template <bool kBias, typename T>
__device__ __forceinline__ acc_t<T> with_bias(T x, acc_t<T> b) {
  return kBias ? to_acc(x) + b : to_acc(x);
}

inline dim3 block_of(const ColumnGrid& grid) { return dim3(grid.tx, grid.ty); }
inline dim3 grid_of(const ColumnGrid& grid) {
  return dim3(static_cast<unsigned>(grid.tiles), static_cast<unsigned>(grid.row_blocks));
}

// Sums the N values of the threads with the same threadIdx.x; the result is with threadIdx.y == 0.
// blockDim.y is a power of two. The index keeps neighbouring threads in neighbouring banks.
template <int N, typename A>
__device__ __forceinline__ void block_column_sum(A (&sum)[N]) {
  __shared__ A scratch[N * kColumnThreads];
  const int me = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // scratch may still be read for the previous tile
#pragma unroll
  for (int k = 0; k < N; ++k) scratch[k * kColumnThreads + me] = sum[k];
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        A* const slot = scratch + k * kColumnThreads + me;
        *slot += slot[half * blockDim.x];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k)
    sum[k] = scratch[k * kColumnThreads + me];  // this thread's slot, for threadIdx.y == 0
}

// out[j] = sum over r of partial[r, j]; one column per threadIdx.x
inline dim3 sum_partials_block() { return dim3(32, kColumnThreads / 32); }
inline dim3 sum_partials_grid(int64_t n) { return dim3(static_cast<unsigned>((n + 31) / 32)); }
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    sum_partials_kernel(const acc_t<T>* __restrict__ partial, T* __restrict__ out, int64_t rows,
                        int64_t n) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  acc_t<T> sum[1] = {0};
  if (column < n) {
#pragma unroll 4  // loads in flight
    for (int64_t r = threadIdx.y; r < rows; r += blockDim.y) sum[0] += partial[r * n + column];
  }
  block_column_sum(sum);
  if (threadIdx.y == 0 && column < n) out[column] = from_acc<T>(sum[0]);
}

}  // namespace tp_ext
