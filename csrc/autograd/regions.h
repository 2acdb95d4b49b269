// The regions as C++ functions for the layers, and the signatures of their operators; formulas in
// regions.cpp.

#pragma once

#include <ATen/core/Tensor.h>
#include <string>

#include "comm/split.h"

namespace tp_ext {

using Region = at::Tensor(const at::Tensor&, const std::string&);
using DimRegion = at::Tensor(const at::Tensor&, const std::string&, int64_t, Sizes);
using ExchangeRegion = at::Tensor(const at::Tensor&, const std::string&, int64_t, int64_t, Sizes,
                                  Sizes);
using ReplicasRegion = at::Tensor(const at::Tensor&, const std::string&, at::IntArrayRef,
                                  at::IntArrayRef, at::IntArrayRef, int64_t);

at::Tensor copy_to_region(const at::Tensor& x, const std::string& group);
at::Tensor reduce_from_region(const at::Tensor& x, const std::string& group);
at::Tensor all_gather_region(const at::Tensor& x, const std::string& group, int64_t dim,
                             Sizes sizes);
at::Tensor reduce_scatter_region(const at::Tensor& x, const std::string& group, int64_t dim,
                                 Sizes sizes);

}  // namespace tp_ext
