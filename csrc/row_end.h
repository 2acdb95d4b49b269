// The end of an all-reduce row by row: what is computed from a row of the sums while the cache has
// it (comm/collectives.h).

#pragma once

#include <cstdint>
#include <functional>

#include "types.h"

namespace tp_ext {

// Gets the sums over the ranks of row `row`, of the tensor's dtype. It may run after its caller has
// given up waiting for the other ranks, so that it owns the tensors that it uses.
using RowEnd = std::function<void(int64_t row, const void* sums)>;

// total = residual + sums, y = rms_norm(total) * weight; all of one dtype, contiguous, on the CPU;
// weight as in args/norm.h. In cpu/norm.cpp.
RowEnd rms_norm_row_end(const Tensor& residual, const OptionalTensor& weight, double eps,
                        const Tensor& y, const Tensor& total);

}  // namespace tp_ext
