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

// All threads of a block of whole warps take part and get the result; scratch holds 33 A's in
// shared memory. The leading barrier lets the same scratch serve consecutive calls.
template <typename A, typename Op>
__device__ __forceinline__ A block_reduce(A x, Op op, A neutral, A* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_reduce(x, op);
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  if (warp == 0) {
    x = warp_reduce(lane < warps ? scratch[lane] : neutral, op);
    if (lane == 0) scratch[32] = x;
  }
  __syncthreads();
  return scratch[32];
}

}  // namespace tp_ext
