// Newton-Schulz orthogonalization of a matrix. In C++, since it is 15 small products, before each of
// which Python would take a tenth of its time.

#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "tp_ext/export.h"

namespace tp_ext {

// X <- a X + (b G + c G^2) X with G = X X^T, `steps` times, from X = update / |update|
// (tp_ext/optim/newton_schulz.py). Operators and their order are those of torch.optim.Muon, so that
// of equal matrices in bfloat16 the bits are the same.
TP_EXT_API at::Tensor orthogonalized(const at::Tensor& update,
                                     const std::array<double, 3>& coefficients, int64_t steps,
                                     double eps);

}  // namespace tp_ext
