// Checks of the shard operators, the position of each rank's chunks, and the primitives out of two
// functions of a device.

#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "check.h"
#include "kernels/shard_pack.h"
#include "types.h"

namespace tp_ext {

struct ShardPlan {
  int64_t unit;             // bytes
  int64_t outer, full_row;  // rows of full; distance between rows
  std::vector<ShardChunk> chunks;
};

inline int64_t check_shard_sizes(at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(!sizes.empty(), "sizes: ", sizes, " must have one length per rank");
  int64_t total = 0;
  for (const auto n : sizes) {
    TORCH_CHECK_VALUE(n >= 0, "sizes: ", sizes, " must not hold a negative length");
    total += n;
  }
  return total;
}
inline int64_t longest_shard(at::IntArrayRef sizes) {
  return *std::max_element(sizes.begin(), sizes.end());
}

// shape with n elements along dim
inline std::vector<int64_t> shape_with(at::IntArrayRef shape, int64_t dim, int64_t n) {
  auto result = shape.vec();
  result[dim] = n;
  return result;
}
inline std::vector<int64_t> padded_shape(at::IntArrayRef shape, int64_t dim,
                                         at::IntArrayRef sizes) {
  auto result = shape_with(shape, dim, longest_shard(sizes));
  result.insert(result.begin(), static_cast<int64_t>(sizes.size()));
  return result;
}

inline int64_t product(at::IntArrayRef shape) {
  int64_t n = 1;
  for (const auto size : shape) n *= size;
  return n;
}

// How `full`, whose rows are row_stride elements apart, and the blocks of a collective correspond;
// the unit is the largest power of two up to `widest` bytes that divides all lengths, starts and
// addresses
inline ShardPlan shard_plan(const Tensor& full, const Tensor& blocks, int64_t dim,
                            at::IntArrayRef sizes, bool padded, int64_t row_stride,
                            int64_t widest) {
  const int64_t element_size = full.element_size();
  const int64_t outer = product(full.sizes().slice(0, dim));
  const int64_t inner = product(full.sizes().slice(dim + 1)) * element_size;
  ShardPlan plan{0, outer, row_stride * element_size, {}};
  uint64_t all = reinterpret_cast<uintptr_t>(full.const_data_ptr()) |
                 reinterpret_cast<uintptr_t>(blocks.const_data_ptr()) |
                 static_cast<uint64_t>(widest) | static_cast<uint64_t>(plan.full_row);
  int64_t start = 0, block_start = 0;
  for (const auto n : sizes) {
    const int64_t length = n * inner, row = padded ? longest_shard(sizes) * inner : length;
    plan.chunks.push_back({length, start, block_start, row});
    start += length;
    block_start += outer * row;
    all |= static_cast<uint64_t>(length) | static_cast<uint64_t>(row);
  }
  plan.unit = static_cast<int64_t>(all & (~all + 1));  // its lowest bit
  plan.full_row /= plan.unit;
  for (auto& chunk : plan.chunks)
    chunk = {chunk.length / plan.unit, chunk.full_start / plan.unit, chunk.block_start / plan.unit,
             chunk.block_row / plan.unit};
  return plan;
}

// Elements from one row of x to the next, if all dims from dim on are contiguous and the dims
// before it are one dim with a stride (x contiguous, or a slice of its last dims); -1 otherwise
inline int64_t row_stride_of(const Tensor& x, int64_t dim) {
  int64_t dense = 1;
  for (int64_t d = x.dim() - 1; d >= dim; --d) {
    if (x.size(d) != 1 && x.stride(d) != dense) return -1;
    dense *= x.size(d);
  }
  int64_t row = -1, next = 0;
  for (int64_t d = dim - 1; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (row < 0)
      row = x.stride(d);
    else if (x.stride(d) != next)
      return -1;
    next = x.stride(d) * x.size(d);
  }
  return row < 0 ? dense : row;
}

// pack for other strides of x: one ATen copy per rank
inline void pack_by_copies(const Tensor& x, int64_t dim, at::IntArrayRef sizes, bool padded,
                           const Tensor& blocks) {
  const int64_t longest = longest_shard(sizes);
  int64_t start = 0, at = 0;
  for (int64_t k = 0; k < static_cast<int64_t>(sizes.size()); ++k) {
    const auto shard = x.narrow(dim, start, sizes[k]);
    const auto block =
        padded ? blocks.select(0, k) : blocks.narrow(0, at, shard.numel()).view(shard.sizes());
    block.narrow(dim, 0, sizes[k]).copy_(shard);
    if (padded) block.narrow(dim, sizes[k], longest - sizes[k]).zero_();
    start += sizes[k];
    at += shard.numel();
  }
}

// Checks the blocks given to unpack: [p, *shard], or the shape of full with one dim and no padding.
// Returns that shape.
inline std::vector<int64_t> check_unpack(const Tensor& blocks, int64_t& dim, at::IntArrayRef sizes,
                                         at::OptionalIntArrayRef shape) {
  const int64_t total = check_shard_sizes(sizes);
  if (shape.has_value()) {
    dim = check_dim(dim, static_cast<int64_t>(shape->size()), "dim");
    TORCH_CHECK_VALUE((*shape)[dim] == total, "sizes: ", sizes, " must sum to ", (*shape)[dim],
                      ", the length of dim ", dim, " of shape ", *shape);
    TORCH_CHECK_VALUE(blocks.dim() == 1 && blocks.size(0) == product(*shape), "blocks: shape ",
                      blocks.sizes(), " must be one dim with the elements of shape ", *shape);
    return shape->vec();
  }
  dim = check_dim(dim, blocks.dim() - 1, "dim");
  const auto block = blocks.sizes().slice(1);
  TORCH_CHECK_VALUE(
      blocks.size(0) == static_cast<int64_t>(sizes.size()) && block[dim] == longest_shard(sizes),
      "blocks: shape ", blocks.sizes(), " must be [ranks, ..], with the longest of sizes, ", sizes,
      ", in dim ", dim, " of each block");
  return shape_with(block, dim, total);
}

inline void check_pack(const Tensor& x, int64_t& dim, at::IntArrayRef sizes) {
  dim = check_dim(dim, x.dim(), "dim");
  TORCH_CHECK_VALUE(check_shard_sizes(sizes) == x.size(dim), "sizes: ", sizes, " must sum to ",
                    x.size(dim), ", the length of dim ", dim, " of x");
}

// Device::pack(full, blocks, plan) and Device::unpack(blocks, full, plan) fill their second
// argument, which is not empty, in units of up to Device::kWidest bytes.
template <typename Device>
struct ShardPrimitives {
  static Tensor unpack(const Tensor& blocks_any, int64_t dim, at::IntArrayRef sizes,
                       at::OptionalIntArrayRef given_shape) {
    const auto shape = check_unpack(blocks_any, dim, sizes, given_shape);
    const Tensor blocks = blocks_any.contiguous();
    const Tensor full = at::empty(shape, blocks.options());
    if (full.numel() == 0) return full;
    Device::unpack(blocks, full,
                   shard_plan(full, blocks, dim, sizes, !given_shape.has_value(),
                              row_stride_of(full, dim), Device::kWidest));
    return full;
  }

  static Tensor pack(const Tensor& x, int64_t dim, at::IntArrayRef sizes, bool padded) {
    check_pack(x, dim, sizes);
    const Tensor blocks = padded ? at::empty(padded_shape(x.sizes(), dim, sizes), x.options())
                                 : at::empty({x.numel()}, x.options());
    if (blocks.numel() == 0) return blocks;
    const int64_t row_stride = row_stride_of(x, dim);
    if (row_stride < 0)
      pack_by_copies(x, dim, sizes, padded, blocks);
    else
      Device::pack(x, blocks,
                   shard_plan(x, blocks, dim, sizes, padded, row_stride, Device::kWidest));
    return blocks;
  }
};

}  // namespace tp_ext
