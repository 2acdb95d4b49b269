// Shards on CUDA, between the full tensor and the blocks of a collective: one read and one write.
//
// blockIdx.y counts ranks, so that nobody searches whose run an element is in; along x threads
// walk over the units of a rank's block, neighbours on neighbouring units of a run. U is a unit:
// 16 bytes where all runs are aligned to that, else 8, 4, 2 or 1.

#pragma once

#include "divide.h"
#include "shard_pack.h"
#include "vec.cuh"

namespace tp_ext {

// Unit i of the runs, laid out with `row` units each: the row of full, and where in it
struct ShardPlace {
  int64_t o, j;
};
TP_HD ShardPlace shard_place(int64_t i, int64_t row) {
  const int64_t o = divide(i, row);
  return {o, i - o * row};
}

template <typename U>
__global__ void __launch_bounds__(256)
    unpack_shards_kernel(const U* __restrict__ blocks, U* __restrict__ full, int64_t outer,
                         int64_t full_row, ShardRuns runs) {
  const ShardRun run = runs.of[blockIdx.y];
  grid_stride(outer * run.length, 1, [&](int64_t i) {
    const ShardPlace at = shard_place(i, run.length);
    full[at.o * full_row + run.full_start + at.j] =
        blocks[run.block_start + at.o * run.block_row + at.j];
  });
}

template <typename U>
__global__ void __launch_bounds__(256)
    pack_shards_kernel(const U* __restrict__ full, U* __restrict__ blocks, int64_t outer,
                       int64_t full_row, ShardRuns runs) {
  const ShardRun run = runs.of[blockIdx.y];
  grid_stride(outer * run.block_row, 1, [&](int64_t i) {
    const ShardPlace at = shard_place(i, run.block_row);
    blocks[run.block_start + i] =
        at.j < run.length ? full[at.o * full_row + run.full_start + at.j] : U{};
  });
}

}  // namespace tp_ext
