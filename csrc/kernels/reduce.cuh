// Sums and maxima over a warp and a block, in a fixed order: the same bits on every run.

#pragma once

#include "scalar.h"

namespace tp_ext {

struct Sum {
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};
struct Max {
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a > b ? a : b;
  }
};

// All 32 lanes take part and get the result
template <typename A, typename Op>
__device__ __forceinline__ A warp_reduce(A x, Op op) {
  for (int lane = 16; lane > 0; lane /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

// All threads of a block of whole warps take part and get the result; scratch holds 32 A's in
// shared memory. The leading barrier lets the same scratch serve consecutive calls. Each warp
// reduces the results of all: that takes no longer than to wait for the first warp.
template <typename A, typename Op>
__device__ __forceinline__ A block_reduce(A x, Op op, A neutral, A* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_reduce(x, op);
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return warp_reduce(lane < warps ? scratch[lane] : neutral, op);
}

// Two sums with the barriers of one; scratch holds 64 A's
template <typename A>
__device__ __forceinline__ void block_sums(A& x, A& y, A* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_reduce(x, Sum());
  y = warp_reduce(y, Sum());
  __syncthreads();
  if (lane == 0) scratch[warp] = x, scratch[32 + warp] = y;
  __syncthreads();
  x = warp_reduce(lane < warps ? scratch[lane] : A(0), Sum());
  y = warp_reduce(lane < warps ? scratch[32 + lane] : A(0), Sum());
}

}  // namespace tp_ext
