// Alternatives to a group's backend, for groups whose name asks for one (group_name.h). A folder of
// comm/ sets the functions when the library is loaded; no other file knows it. They return nothing
// where the backend must do the work, by criteria that are the same on every rank.

#pragma once

#include <ATen/core/Tensor.h>
#include <optional>
#include <string>

#include "comm/group_name.h"
#include "comm/split.h"
#include "tp_ext/export.h"

namespace tp_ext::comm {

struct GatherMatmul {
  at::Tensor y, x;
};

struct Alternative {
  const char* (*all_reduce_algorithm)(at::ScalarType, int64_t numel, const std::string& group);
  std::optional<at::Tensor> (*all_reduce)(const at::Tensor& x, const std::string& group);
  std::optional<GatherMatmul> (*all_gather_matmul)(const at::Tensor& x, const at::Tensor& w,
                                                   bool transposed, const std::string& group,
                                                   const Split& tokens, bool wants_x);
  std::optional<at::Tensor> (*matmul_reduce_scatter)(const at::Tensor& x, const at::Tensor& w,
                                                     const std::string& group, const Split& tokens);
};
TP_EXT_API inline Alternative alternative{};  // one in the library and the module

inline bool has_alternative(const std::string& group) {
  return alternative.all_reduce && !GroupName(group).options.empty();
}

// Algorithm of the sum of a CUDA tensor over the group: "one_shot" (every rank reads all partials
// and adds them in the order of the ranks), "two_shot" (each rank sums its shard, then all read the
// shards) or "backend"
inline const char* all_reduce_algorithm(at::ScalarType dtype, int64_t numel,
                                        const std::string& group) {
  return has_alternative(group) ? alternative.all_reduce_algorithm(dtype, numel, group) : "backend";
}

// Sum over the ranks, a new tensor. x is not written.
inline std::optional<at::Tensor> alternative_all_reduce(const at::Tensor& x,
                                                        const std::string& group) {
  return has_alternative(group) ? alternative.all_reduce(x, group) : std::nullopt;
}

// all_gather(x, dim 0) w, or w^T, and optionally the gathered x; transfers overlap the GEMM
inline std::optional<GatherMatmul> fused_all_gather_matmul(const at::Tensor& x, const at::Tensor& w,
                                                           bool transposed,
                                                           const std::string& group,
                                                           const Split& tokens, bool wants_x) {
  return has_alternative(group)
             ? alternative.all_gather_matmul(x, w, transposed, group, tokens, wants_x)
             : std::nullopt;
}

// reduce_scatter(x w^T, dim 0); transfers overlap the GEMM
inline std::optional<at::Tensor> fused_matmul_reduce_scatter(const at::Tensor& x,
                                                             const at::Tensor& w,
                                                             const std::string& group,
                                                             const Split& tokens) {
  return has_alternative(group) ? alternative.matmul_reduce_scatter(x, w, group, tokens)
                                : std::nullopt;
}

}  // namespace tp_ext::comm
