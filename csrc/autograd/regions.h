// The regions as C++ functions, for the layers; formulas in regions.cpp.

#pragma once

#include <ATen/core/grad_mode.h>
#include <string>

#include "comm/split.h"

namespace tp_ext {

// Whether an operation on x has to be recorded
inline bool needs_graph(const at::Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

at::Tensor copy_to_region(const at::Tensor& x, const std::string& group);
at::Tensor reduce_from_region(const at::Tensor& x, const std::string& group);
at::Tensor all_gather_region(const at::Tensor& x, const std::string& group, int64_t dim,
                             Sizes sizes);
at::Tensor reduce_scatter_region(const at::Tensor& x, const std::string& group, int64_t dim,
                                 Sizes sizes);

}  // namespace tp_ext
