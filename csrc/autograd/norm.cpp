// rms_norm and layer_norm, differentiable: x [.., n] -> y [.., n], weight and bias [n] or none.
//
//   rms_norm    y = x / sqrt(mean(x^2) + eps) * weight                     saved: x, weight, rstd
//   layer_norm  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias     saved: x, weight, mean,
//   rstd
//
// No communication. Under autocast both run in fp32 on CUDA, as torch's layer_norm and rms_norm do;
// torch's CPU autocast leaves them in the dtype of their input, and so does this.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/sum.h>

#include <tuple>

#include "norm_args.h"

namespace tp_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& x, const OptionalTensor& weight, double eps) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, double)>(
          "tp_ext::_rms_norm_fwd");
  return op.call(x, weight, eps);
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad, const Tensor& x,
                                        const OptionalTensor& weight, const Tensor& rstd) {
  static const auto op = find_op<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&)>("tp_ext::_rms_norm_bwd");
  return op.call(grad, x, weight, rstd);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& x, const OptionalTensor& weight,
                                                  const OptionalTensor& bias, double eps) {
  static const auto op = find_op<std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, double)>(
      "tp_ext::_layer_norm_fwd");
  return op.call(x, weight, bias, eps);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad, const Tensor& x,
                                                  const OptionalTensor& weight, const Tensor& mean,
                                                  const Tensor& rstd) {
  static const auto op = find_op<std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&)>(
      "tp_ext::_layer_norm_bwd");
  return op.call(grad, x, weight, mean, rstd);
}

// An undefined saved tensor stands for a missing weight
OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// The i-th gradient if that input has one: autograd counts the defined tensors only
Tensor wanted(AutogradContext* ctx, size_t i, const Tensor& grad) {
  return ctx->needs_input_grad(i) ? grad : Tensor();
}

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight,
                        double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, rstd] = rms_norm_fwd(x, weight, eps);
    ctx->save_for_backward({x, weight.value_or(Tensor()), rstd});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("rms_norm");
    const auto saved = ctx->get_saved_variables();
    const auto weight = optional(saved[1]);
    const auto [dx, dweight] = rms_norm_bwd(grads[0], saved[0], weight, saved[2]);
    return {wanted(ctx, 0, dx), weight ? wanted(ctx, 1, dweight) : Tensor(), Tensor()};
  }
};

struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, mean, rstd] = layer_norm_fwd(x, weight, bias, eps);
    ctx->save_for_backward({x, weight.value_or(Tensor()), mean, rstd});
    ctx->saved_data["has_bias"] = has(bias);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("layer_norm");
    const auto saved = ctx->get_saved_variables();
    const auto weight = optional(saved[1]);
    auto [dx, dweight, dbias] = layer_norm_bwd(grads[0], saved[0], weight, saved[2], saved[3]);
    variable_list result = {wanted(ctx, 0, dx), weight ? wanted(ctx, 1, dweight) : Tensor(),
                            Tensor(), Tensor()};
    const size_t bias = weight ? 2 : 1;
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(bias)) {
      // The kernel returns parameter gradients next to a weight only; a bias alone is rare
      result[2] = weight ? dbias : grads[0].reshape({-1, grads[0].size(-1)}).sum(0);
    }
    return result;
  }
};

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps) {
  return RmsNorm::apply(x, weight, eps);
}

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps) {
  return LayerNorm::apply(x, weight, bias, eps);
}

Tensor rms_norm_autocast(const Tensor& x, const OptionalTensor& weight, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  using at::autocast::cached_cast;
  return rms_norm(cached_cast(at::kFloat, x, at::kCUDA), cached_cast(at::kFloat, weight, at::kCUDA),
                  eps);
}

Tensor layer_norm_autocast(const Tensor& x, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  using at::autocast::cached_cast;
  return layer_norm(cached_cast(at::kFloat, x, at::kCUDA),
                    cached_cast(at::kFloat, weight, at::kCUDA),
                    cached_cast(at::kFloat, bias, at::kCUDA), eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("layer_norm", layer_norm);
}

TORCH_LIBRARY_IMPL(tp_ext, AutocastCUDA, m) {
  m.impl("rms_norm", rms_norm_autocast);
  m.impl("layer_norm", layer_norm_autocast);
}

}  // namespace tp_ext
