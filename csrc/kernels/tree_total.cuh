// The root of a tree on CUDA: one read of every node, one write. Each thread keeps the sums that
// wait in its own column of shared memory, since registers cannot be indexed.

#pragma once

#include "tree_total.h"
#include "vec.cuh"

namespace tp_ext {

constexpr int kTreeThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kTreeThreads)
    tree_total_kernel(const acc_t<T>* __restrict__ nodes, T* __restrict__ root, int64_t n,
                      TreeJoins joins) {
  __shared__ acc_t<T> waiting[kTreeDepth * kTreeThreads];
  acc_t<T>* const own = waiting + threadIdx.x;
  grid_stride(n, 1, [&](int64_t i) {
    int top = 0;
    acc_t<T> sum = 0;
    for (int k = 0; k < joins.nodes; ++k) {
      sum = nodes[k * n + i];
      for (int left = joins.after[k]; left > 0; --left) sum = own[--top * kTreeThreads] + sum;
      own[top++ * kTreeThreads] = sum;
    }
    root[i] = from_acc<T>(sum);
  });
}

}  // namespace tp_ext
