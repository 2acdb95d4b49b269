// Packing of shards on CUDA, from the full tensor to the blocks of a collective and back
// (kernels/shard_pack.h).

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cuda/launch.h"
#include "kernels/shard_pack.cuh"
#include "ops.h"
#include "args/shard_pack.h"

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

Tensor unpack_shards(const Tensor& blocks_any, int64_t dim, at::IntArrayRef sizes,
                     at::OptionalIntArrayRef given_shape) {
  const auto shape = check_unpack(blocks_any, dim, sizes, given_shape);
  const c10::cuda::CUDAGuard guard(blocks_any.device());
  const Tensor blocks = blocks_any.contiguous();
  const Tensor full = at::empty(shape, blocks.options());
  if (full.numel() == 0) return full;
  const void* const from = blocks.const_data_ptr();
  void* const to = full.mutable_data_ptr();
  const ShardPlan plan = shard_plan(shape, dim, sizes, !given_shape.has_value(),
                                    row_stride_of(full, dim), full.element_size(), to, from, 16);
  dispatch_unit(plan.unit, [&](auto tag) {
    using U = decltype(tag);
    for_each_launch(
        plan, [](const ShardChunk& chunk) { return chunk.length; },
        [&](dim3 grid, const ShardChunks& chunks) {
          unpack_shards_kernel<U><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              static_cast<const U*>(from), static_cast<U*>(to), plan.outer, plan.full_row, chunks);
        });
  });
  return full;
}

Tensor pack_shards(const Tensor& x, int64_t dim, at::IntArrayRef sizes, bool padded) {
  check_pack(x, dim, sizes);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor blocks = padded ? at::empty(padded_shape(x.sizes(), dim, sizes), x.options())
                               : at::empty({x.numel()}, x.options());
  if (blocks.numel() == 0) return blocks;
  const int64_t row_stride = row_stride_of(x, dim);
  if (row_stride < 0) {
    pack_by_copies(x, dim, sizes, padded, blocks);
    return blocks;
  }
  const void* const from = x.const_data_ptr();
  void* const to = blocks.mutable_data_ptr();
  const ShardPlan plan =
      shard_plan(x.sizes(), dim, sizes, padded, row_stride, x.element_size(), from, to, 16);
  dispatch_unit(plan.unit, [&](auto tag) {
    using U = decltype(tag);
    for_each_launch(
        plan, [](const ShardChunk& chunk) { return chunk.block_row; },
        [&](dim3 grid, const ShardChunks& chunks) {
          pack_shards_kernel<U><<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              static_cast<const U*>(from), static_cast<U*>(to), plan.outer, plan.full_row, chunks);
        });
  });
  return blocks;
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_unpack_shards", unpack_shards);
  m.impl("_pack_shards", pack_shards);
}

}  // namespace tp_ext
