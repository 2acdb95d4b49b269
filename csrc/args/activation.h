// Argument checks of bias_act and gated_act, and their primitives out of two functions of a device.

#pragma once

#include <ATen/ops/empty.h>

#include <string_view>
#include <tuple>
#include <vector>

#include "check.h"
#include "kernels/activation.h"
#include "types.h"

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

// Device::forward(x, bias, y, activation) and Device::backward(grad, x, bias, dx, dbias,
// activation) fill y, dx and dbias; tensors are contiguous, bias is undefined if there is none. y
// has 1 / fraction of the last dim of x: 1 for bias_act, 2 for gated_act.
template <typename Device, auto check, int64_t fraction>
struct ActivationPrimitives {
  static Tensor fwd(const Tensor& x, const OptionalTensor& bias, std::string_view activation) {
    check(x, bias, activation);
    std::vector<int64_t> shape = x.sizes().vec();
    if constexpr (fraction > 1) shape.back() /= fraction;
    const Tensor y = at::empty(shape, x.options());
    if (y.numel() > 0) Device::forward(x.contiguous(), contiguous(bias), y, activation);
    return y;
  }

  static std::tuple<Tensor, Tensor> bwd(const Tensor& grad, const Tensor& x,
                                        const OptionalTensor& bias, std::string_view activation) {
    check(x, bias, activation);
    check_activation_grad(grad, x, fraction);
    const Tensor dx = at::empty(x.sizes(), x.options());
    const Tensor dbias = at::empty({bias.has_value() ? bias->numel() : 0}, x.options());
    if (dx.numel() > 0 || dbias.numel() > 0)
      Device::backward(grad.contiguous(), x.contiguous(), contiguous(bias), dx, dbias, activation);
    return {dx, dbias};
  }

 private:
  static Tensor contiguous(const OptionalTensor& bias) {
    return bias.has_value() ? bias->contiguous() : Tensor();
  }
};

}  // namespace tp_ext
