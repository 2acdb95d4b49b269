// Argument checks of _tree_total.

#pragma once

#include <algorithm>

#include "check.h"
#include "types.h"

namespace tp_ext {

// Returns how many sums wait at a time
inline int64_t check_tree_total(const Tensor& nodes, at::IntArrayRef joins, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      nodes.dim() >= 1 && !joins.empty() && nodes.size(0) == static_cast<int64_t>(joins.size()),
      "joins: ", joins.size(), " numbers must be one for each of the nodes, of shape ",
      nodes.sizes());
  TORCH_CHECK_TYPE(nodes.scalar_type() == (dtype == at::kDouble ? at::kDouble : at::kFloat),
                   "nodes: dtype ", nodes.scalar_type(),
                   " must be float32, and float64 for a sum in float64");
  int64_t waiting = 0, depth = 0;
  for (const int64_t number : joins) {
    TORCH_CHECK_VALUE(0 <= number && number <= waiting, "joins: ", joins,
                      " must add sums that wait");
    waiting += 1 - number;
    depth = std::max(depth, waiting);
  }
  TORCH_CHECK_VALUE(waiting == 1, "joins: ", joins, " must leave one sum, not ", waiting);
  return depth;
}

}  // namespace tp_ext
