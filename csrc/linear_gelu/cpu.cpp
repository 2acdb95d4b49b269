// linear_gelu on the CPU: ATen's products, and our kernel for the activation.

#include <torch/library.h>

#include "linear_gelu/linear_gelu.h"

namespace tp_ext {
namespace {

std::tuple<Tensor, Tensor> linear_gelu_fwd(const Tensor& x, const Tensor& weight,
                                           const Tensor& bias, bool keep_pre) {
  composed::check_linear_gelu(x, weight, bias);
  return composed::linear_gelu_fwd(x, weight, bias, keep_pre);
}

std::tuple<Tensor, Tensor> linear_dgelu_bwd(const Tensor& dy, const Tensor& weight,
                                            const Tensor& pre) {
  composed::check_linear_dgelu(dy, weight, pre);
  return composed::linear_dgelu_bwd(dy, weight, pre);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_linear_gelu_fwd", linear_gelu_fwd);
  m.impl("_linear_dgelu_bwd", linear_dgelu_bwd);
}

}  // namespace tp_ext
