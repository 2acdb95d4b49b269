// The sum over all dims but the last: the gradient of a tensor that was added to each row. Half
// types are summed in fp32.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>

#include <numeric>
#include <optional>
#include <vector>

namespace tp_ext {

inline at::Tensor sum_to_last_dim(const at::Tensor& x,
                                  std::optional<at::ScalarType> dtype = std::nullopt) {
  if (x.dim() == 1) return x.to(dtype.value_or(x.scalar_type()));
  std::vector<int64_t> rows(x.dim() - 1);
  std::iota(rows.begin(), rows.end(), 0);
  return at::sum(x, rows, false, dtype);
}

}  // namespace tp_ext
