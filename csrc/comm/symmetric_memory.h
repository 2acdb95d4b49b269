// torch's symmetric memory: memory of each rank that the others read and write directly, over
// NVLink or PCIe, and the operators torch::symm_mem that sum and multiply through it. For groups
// whose name asks for it, behind rank and size (tp_ext/symmetric_memory.py makes the name):
//
//   name@rank/size/one_shot_bytes/max_bytes/buffer/fused
//
// Each function returns nothing where the group's backend is to do the work. What decides (name,
// dtype, size, device type, streams of captures) is the same on every rank. torch holds the buffer,
// which it calls a persistent allocation, by its number; here is only kept which stream used a
// group's memory last, since uses on several streams wait for each other (stream_order.h).

#pragma once

#include <ATen/core/Tensor.h>
#include <optional>
#include <string>

#include "comm/split.h"

namespace tp_ext::comm {

// How a CUDA tensor is summed over the group: "one_shot" (every rank reads all addends and adds
// them in the order of the ranks), "two_shot" (each rank sums its part, then all read the parts) or
// "backend"
const char* all_reduce_algorithm(at::ScalarType dtype, int64_t numel, const std::string& group);

// Sum over the ranks, a fresh tensor. x is not written.
std::optional<at::Tensor> symmetric_all_reduce(const at::Tensor& x, const std::string& group);

// all_gather(x, dim 0) w, or w^T, and the gathered x if it is wanted; transfers run under the GEMM
struct GatherMatmul {
  at::Tensor y, x;
};
std::optional<GatherMatmul> fused_all_gather_matmul(const at::Tensor& x, const at::Tensor& w,
                                                    bool transposed, const std::string& group,
                                                    const Split& tokens, bool wants_x);

// reduce_scatter(x w^T, dim 0); transfers run under the GEMM
std::optional<at::Tensor> fused_matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& w,
                                                      const std::string& group,
                                                      const Split& tokens);

}  // namespace tp_ext::comm
