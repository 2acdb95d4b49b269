// torch's symmetric memory: memory of each rank that the other ranks read and write directly, over
// NVLink or PCIe, and the operators torch::symm_mem that sum and multiply through it. For groups
// whose name asks for it (group_name.h).
//
// Each function returns nothing where the group's backend must do the work. The criteria (name,
// dtype, size, device type, streams of captures) are the same on every rank. torch owns the buffer,
// which it calls a persistent allocation, and finds it by its number; this file only keeps the
// stream that last used a group's memory, since uses on several streams must wait for each other
// (stream_order.h).

#pragma once

#include <ATen/core/Tensor.h>
#include <optional>
#include <string>

#include "comm/split.h"

namespace tp_ext::comm {

// Algorithm of the sum of a CUDA tensor over the group: "one_shot" (every rank reads all partials
// and adds them in the order of the ranks), "two_shot" (each rank sums its shard, then all read the
// shards) or "backend"
const char* all_reduce_algorithm(at::ScalarType dtype, int64_t numel, const std::string& group);

// Sum over the ranks, a new tensor. x is not written.
std::optional<at::Tensor> symmetric_all_reduce(const at::Tensor& x, const std::string& group);

// all_gather(x, dim 0) w, or w^T, and optionally the gathered x; transfers overlap the GEMM
struct GatherMatmul {
  at::Tensor y, x;
};
std::optional<GatherMatmul> fused_all_gather_matmul(const at::Tensor& x, const at::Tensor& w,
                                                    bool transposed, const std::string& group,
                                                    const Split& tokens, bool wants_x);

// reduce_scatter(x w^T, dim 0); transfers overlap the GEMM
std::optional<at::Tensor> fused_matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& w,
                                                      const std::string& group,
                                                      const Split& tokens);

}  // namespace tp_ext::comm
