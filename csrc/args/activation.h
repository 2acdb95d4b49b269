// Argument checks of bias_act and gated_act, the same on every device.

#pragma once

#include <string_view>

#include "check.h"
#include "kernels/activation.h"
#include "ops.h"

namespace tp_ext {

inline void check_activation_bias(const Tensor& x, const OptionalTensor& bias) {
  if (!bias.has_value()) return;
  check_same_device(*bias, "bias", x, "x");
  check_same_dtype(*bias, "bias", x, "x");
  TORCH_CHECK_VALUE(x.dim() >= 1 && bias->dim() == 1 && bias->size(0) == x.size(-1), "bias: shape ",
                    bias->sizes(), " must be [n], n the last dim of x, ", x.sizes());
}

inline void check_bias_act(const Tensor& x, const OptionalTensor& bias,
                           std::string_view activation) {
  check_floating(x, "x");
  TORCH_CHECK_VALUE(dispatch_activation(activation, [](auto) {}), "activation: '", activation,
                    "' must be one of ", kActivations);
  check_activation_bias(x, bias);
}

inline void check_gated_act(const Tensor& x, const OptionalTensor& bias,
                            std::string_view activation) {
  check_floating(x, "x");
  TORCH_CHECK_VALUE(dispatch_gated_activation(activation, [](auto) {}), "activation: '", activation,
                    "' must be one of ", kGatedActivations);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) % 2 == 0, "x: shape ", x.sizes(),
                    " must have an even last dim, gate | up");
  check_activation_bias(x, bias);
}

// grad: the gradient of an output that has x's leading dims and 1 / `fraction` of its last dim
inline void check_activation_grad(const Tensor& grad, const Tensor& x, int64_t fraction) {
  check_same_device(grad, "grad", x, "x");
  check_same_dtype(grad, "grad", x, "x");
  std::vector<int64_t> shape = x.sizes().vec();
  if (!shape.empty()) shape.back() /= fraction;
  TORCH_CHECK_VALUE(grad.sizes() == at::IntArrayRef(shape), "grad: shape ", grad.sizes(),
                    " must be that of the output, ", shape);
}

}  // namespace tp_ext
