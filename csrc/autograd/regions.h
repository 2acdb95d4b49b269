// The regions as C++ functions, for the layers; formulas in regions.cpp.

#pragma once

#include <string>

#include "comm/split.h"

namespace tp_ext {

at::Tensor copy_to_region(const at::Tensor& x, const std::string& group);
at::Tensor reduce_from_region(const at::Tensor& x, const std::string& group);
at::Tensor all_gather_region(const at::Tensor& x, const std::string& group, int64_t dim,
                             Sizes sizes);
at::Tensor reduce_scatter_region(const at::Tensor& x, const std::string& group, int64_t dim,
                                 Sizes sizes);

}  // namespace tp_ext
