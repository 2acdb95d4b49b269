// Argument checks of _column_sums.

#pragma once

#include <numeric>

#include "check.h"
#include "types.h"

namespace tp_ext {

inline void check_column_sums(const Tensor& x, at::IntArrayRef lengths) {
  check_floating(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2, "x: shape ", x.sizes(), " must have 2 dims");
  TORCH_CHECK_VALUE(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) == x.size(1),
                    "lengths: ", lengths, " must sum to the columns of x, ", x.size(1));
}

inline at::ScalarType column_sums_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace tp_ext
