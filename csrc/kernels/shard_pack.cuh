// Packing of shards on CUDA, from the full tensor to the blocks of a collective and back: one read
// and one write.
//
// blockIdx.y counts ranks, so that no thread has to search for the chunk of an element; along x
// threads walk over the units of a rank's block, neighbouring threads on neighbouring units. U is a
// unit: 16 bytes where all chunks are aligned to that, otherwise 8, 4, 2 or 1.

#pragma once

#include "divide.h"
#include "shard_pack.h"
#include "vec.cuh"

namespace tp_ext {

// Unit i of the chunks, laid out with `row` units each: the row of full, and the place in it
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
                         int64_t full_row, ShardChunks chunks) {
  const ShardChunk chunk = chunks.of[blockIdx.y];
  grid_stride(outer * chunk.length, 1, [&](int64_t i) {
    const ShardPlace at = shard_place(i, chunk.length);
    full[at.o * full_row + chunk.full_start + at.j] =
        blocks[chunk.block_start + at.o * chunk.block_row + at.j];
  });
}

template <typename U>
__global__ void __launch_bounds__(256)
    pack_shards_kernel(const U* __restrict__ full, U* __restrict__ blocks, int64_t outer,
                       int64_t full_row, ShardChunks chunks) {
  const ShardChunk chunk = chunks.of[blockIdx.y];
  grid_stride(outer * chunk.block_row, 1, [&](int64_t i) {
    const ShardPlace at = shard_place(i, chunk.block_row);
    blocks[chunk.block_start + i] =
        at.j < chunk.length ? full[at.o * full_row + chunk.full_start + at.j] : U{};
  });
}

}  // namespace tp_ext
