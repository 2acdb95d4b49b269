// Operands and products of 8-bit floating point, for the linears of float8_linear.cpp and
// float8_grouped.cpp.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "types.h"

namespace tp_ext {

// A matrix in 8 bits and the inverse of its scale: [1, 1], [m, 1] or [1, n]
struct Scaled {
  Tensor values, inverse;

  // The scales as a view whose strides torch's product takes
  Scaled t() const {
    return {values.t(), inverse.view_symint({inverse.sym_size(1), inverse.sym_size(0)})};
  }
};

// The largest finite magnitude: of all, [1, 1], of each row (dim 1) or column (dim 0)
Tensor amax_of(const Tensor& x, std::optional<int64_t> dim = std::nullopt);
Scaled quantized(const Tensor& x, const Tensor& amax, at::ScalarType format);

// Maxima over the ranks, by one collective
std::vector<Tensor> max_over(const std::string& group, std::vector<Tensor> all);

// a b in `dtype`; by_row: scales per row of a and column of b, else one each
Tensor scaled_product(Scaled a, Scaled b, bool by_row, at::ScalarType dtype);

void check_float8(const Tensor& x, const Tensor& weight, at::ScalarType forward,
                  at::ScalarType gradient);

}  // namespace tp_ext
