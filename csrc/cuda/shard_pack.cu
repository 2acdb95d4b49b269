// Packing of shards on CUDA, from the full tensor to the blocks of a collective and back
// (kernels/shard_pack.h).

#include <torch/library.h>

#include "args/shard_pack.h"
#include "cuda/launch.h"
#include "kernels/shard_pack.cuh"

namespace tp_ext {
namespace {

// Calls f(U{}), U a type of `unit` bytes
template <typename F>
void dispatch_unit(int64_t bytes, F f) {
  switch (bytes) {
    case 16:
      return f(uint4{});
    case 8:
      return f(uint2{});
    case 4:
      return f(uint32_t{});
    case 2:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

// Calls launch(grid, chunks) for all ranks, kShardChunks of them at a time; a block holds `row`
// units per row of full
template <typename Row, typename Launch>
void for_each_launch(const ShardPlan& plan, Row row, Launch launch) {
  for (size_t first = 0; first < plan.chunks.size(); first += kShardChunks) {
    const size_t ranks = std::min<size_t>(kShardChunks, plan.chunks.size() - first);
    ShardChunks chunks{};
    int64_t most = 0;
    for (size_t k = 0; k < ranks; ++k) {
      chunks.of[k] = plan.chunks[first + k];
      most = std::max(most, row(chunks.of[k]));
    }
    if (most == 0) continue;
    launch(dim3(grid_for(plan.outer * most), static_cast<unsigned>(ranks)), chunks);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

struct CudaShards {
  static constexpr int64_t kWidest = 16;

  static void unpack(const Tensor& blocks, const Tensor& full, const ShardPlan& plan) {
    const c10::cuda::CUDAGuard guard(full.device());
    dispatch_unit(plan.unit, [&](auto tag) {
      using U = decltype(tag);
      for_each_launch(
          plan, [](const ShardChunk& chunk) { return chunk.length; },
          [&](dim3 grid, const ShardChunks& chunks) {
            unpack_shards_kernel<U><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                in<U>(blocks), out<U>(full), plan.outer, plan.full_row, chunks);
          });
    });
  }

  static void pack(const Tensor& full, const Tensor& blocks, const ShardPlan& plan) {
    const c10::cuda::CUDAGuard guard(blocks.device());
    dispatch_unit(plan.unit, [&](auto tag) {
      using U = decltype(tag);
      for_each_launch(
          plan, [](const ShardChunk& chunk) { return chunk.block_row; },
          [&](dim3 grid, const ShardChunks& chunks) {
            pack_shards_kernel<U><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                in<U>(full), out<U>(blocks), plan.outer, plan.full_row, chunks);
          });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  using Primitives = ShardPrimitives<CudaShards>;
  m.impl("_unpack_shards", Primitives::unpack);
  m.impl("_pack_shards", Primitives::pack);
}

}  // namespace tp_ext
