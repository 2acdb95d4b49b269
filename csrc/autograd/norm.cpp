// rms_norm and layer_norm, differentiable: x [.., n] -> y [.., n], weight and bias [n] or none;
// with a residual shaped like x also sum = x + residual, rounded to their dtype, and y is the norm
// of sum.
//
//   rms_norm    y = x / sqrt(mean(x^2) + eps) * weight                     saved: x, rstd
//   layer_norm  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias     saved: x, mean, rstd
//
// With a residual, sum is saved instead of x: it is an output and lives anyway. LayerNorm with only
// its bias trained saves nothing. x and residual get the same gradient tensor: the gradient of sum
// through y plus the incoming gradient of sum. The backward kernel adds them, because autograd does
// not add in place to a gradient that something else may hold. The backward kernels compute only
// the needed gradients.
//
// No communication. Under autocast both run in fp32 on CUDA, as torch's layer_norm and rms_norm do;
// torch's CPU autocast keeps the dtype of the input, and so do these: x and residual are cast to
// their common type, as torch's addition would.

#include <array>
#include <tuple>

#include "args/norm.h"
#include "autograd/autocast.h"
#include "autograd/function.h"
#include "operators.h"
#include "rows.h"

namespace tp_ext {
namespace {

// y, sum (undefined without a residual) and rstd
std::tuple<Tensor, Tensor, Tensor> rms_norm_fwd(const Tensor& x, const OptionalTensor& residual,
                                                const OptionalTensor& weight, double eps) {
  static const auto plain = TP_OP(_rms_norm_fwd);
  static const auto adding = TP_OP(_rms_norm_residual_fwd);
  if (has(residual)) return adding.call(x, *residual, weight, eps);
  auto [y, rstd] = plain.call(x, weight, eps);
  return {y, Tensor(), rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad, const Tensor& x,
                                        const OptionalTensor& weight, const Tensor& rstd,
                                        const OptionalTensor& grad_sum,
                                        std::array<bool, 2> wanted) {
  static const auto op = TP_OP(_rms_norm_bwd);
  return op.call(grad, x, weight, rstd, grad_sum, wanted);
}

// y, sum (undefined without a residual), mean and rstd
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& x,
                                                          const OptionalTensor& residual,
                                                          const OptionalTensor& weight,
                                                          const OptionalTensor& bias, double eps) {
  static const auto plain = TP_OP(_layer_norm_fwd);
  static const auto adding = TP_OP(_layer_norm_residual_fwd);
  if (has(residual)) return adding.call(x, *residual, weight, bias, eps);
  auto [y, mean, rstd] = plain.call(x, weight, bias, eps);
  return {y, Tensor(), mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad, const Tensor& x,
                                                  const OptionalTensor& weight, const Tensor& mean,
                                                  const Tensor& rstd,
                                                  const OptionalTensor& grad_sum,
                                                  std::array<bool, 3> wanted) {
  static const auto op = TP_OP(_layer_norm_bwd);
  return op.call(grad, x, weight, mean, rstd, grad_sum, wanted);
}

bool trained(const OptionalTensor& t) { return has(t) && t->requires_grad(); }

variable_list outputs(const Tensor& y, const Tensor& sum) {
  return sum.defined() ? variable_list{y, sum} : variable_list{y};
}

// Incoming gradients of a backward, and the gradients needed from it. Autograd counts the defined
// inputs only: x, residual, weight, bias.
struct GradInputs {
  GradInputs(AutogradContext* ctx, const variable_list& grads, bool has_weight, bool has_bias)
      : has_residual(grads.size() == 2),
        needs_x(ctx->needs_input_grad(0)),
        needs_residual(has_residual && ctx->needs_input_grad(1)),
        needs_weight(has_weight && ctx->needs_input_grad(1 + has_residual)),
        needs_bias(has_bias && ctx->needs_input_grad(1 + has_residual + has_weight)),
        grad(grads[0]),
        grad_sum(has_residual ? grads[1] : Tensor()) {}

  // Assigns dx to x and residual
  void set_dx(const Tensor& dx, variable_list& result) const {
    if (needs_x) result[0] = dx;
    if (needs_residual) result[1] = dx;
  }

  const bool has_residual, needs_x, needs_residual, needs_weight, needs_bias;
  const Tensor grad, grad_sum;
};

struct RmsNorm : Function<RmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x,
                               const OptionalTensor& residual, const OptionalTensor& weight,
                               double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->set_materialize_grads(false);
    const auto [y, sum, rstd] = rms_norm_fwd(x, residual, weight, eps);
    ctx->save_for_backward({sum.defined() ? sum : x, weight.value_or(Tensor()), rstd});
    return outputs(y, sum);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result = gradients();
    const auto saved = ctx->get_saved_variables();
    const GradInputs in(ctx, grads, saved[1].defined(), false);
    if (!in.grad.defined()) {  // y has no gradient: only sum contributes
      in.set_dx(in.grad_sum, result);
      return result;
    }
    refuse_double_backward("rms_norm", grads);
    const auto [dx, dweight] =
        rms_norm_bwd(in.grad, saved[0], optional(saved[1]), saved[2], optional(in.grad_sum),
                     {in.needs_x || in.needs_residual, in.needs_weight});
    in.set_dx(dx, result);
    if (in.needs_weight) result[2] = dweight;
    return result;
  }
};

struct LayerNorm : Function<LayerNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x,
                               const OptionalTensor& residual, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->set_materialize_grads(false);
    const auto [y, sum, mean, rstd] = layer_norm_fwd(x, residual, weight, bias, eps);
    const Tensor w = weight.value_or(Tensor());
    if (x.requires_grad() || trained(residual) || trained(weight)) {
      ctx->save_for_backward({sum.defined() ? sum : x, w, mean, rstd});
    } else {
      ctx->save_for_backward({Tensor(), w, Tensor(), Tensor()});
    }
    if (has(bias)) ctx->saved_data["bias_dtype"] = static_cast<int64_t>(bias->scalar_type());
    return outputs(y, sum);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result = gradients();
    const auto saved = ctx->get_saved_variables();
    const bool has_weight = saved[1].defined();
    const GradInputs in(ctx, grads, has_weight, ctx->saved_data.count("bias_dtype") != 0);
    if (!in.grad.defined()) {
      in.set_dx(in.grad_sum, result);
      return result;
    }
    refuse_double_backward("layer_norm", grads);
    const bool needs_dx = in.needs_x || in.needs_residual;
    if (saved[0].defined()) {
      const auto [dx, dweight, dbias] =
          layer_norm_bwd(in.grad, saved[0], optional(saved[1]), saved[2], saved[3],
                         optional(in.grad_sum), {needs_dx, in.needs_weight, in.needs_bias});
      in.set_dx(dx, result);
      if (in.needs_weight) result[2] = dweight;
      if (in.needs_bias && has_weight) result[3] = dbias;
    }
    if (in.needs_bias && !result[3].defined()) result[3] = bias_gradient(ctx, in.grad);
    return result;
  }

  // The gradient of the bias where it alone is trained, or there is no weight
  static Tensor bias_gradient(AutogradContext* ctx, const Tensor& grad) {
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["bias_dtype"].toInt());
    return sum_to_last_dim(grad, dtype);
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps) {
  refuse_forward_mode("rms_norm", x, weight);
  return RmsNorm::apply(x, std::nullopt, weight, eps)[0];
}

std::tuple<Tensor, Tensor> rms_norm_residual(const Tensor& x, const Tensor& residual,
                                             const OptionalTensor& weight, double eps) {
  refuse_forward_mode("rms_norm", x, residual, weight);
  const auto both = RmsNorm::apply(x, residual, weight, eps);
  return {both[0], both[1]};
}

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps) {
  refuse_forward_mode("layer_norm", x, weight, bias);
  return LayerNorm::apply(x, std::nullopt, weight, bias, eps)[0];
}

std::tuple<Tensor, Tensor> layer_norm_residual(const Tensor& x, const Tensor& residual,
                                               const OptionalTensor& weight,
                                               const OptionalTensor& bias, double eps) {
  refuse_forward_mode("layer_norm", x, residual, weight, bias);
  const auto both = LayerNorm::apply(x, residual, weight, bias, eps);
  return {both[0], both[1]};
}

namespace {

std::tuple<Tensor, Tensor> rms_norm_residual_cpu(const Tensor& x, const Tensor& residual,
                                                 const OptionalTensor& weight, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey<c10::kCPU>);
  const auto dtype = c10::promoteTypes(x.scalar_type(), residual.scalar_type());
  return rms_norm_residual(x.to(dtype), residual.to(dtype), weight, eps);
}

std::tuple<Tensor, Tensor> layer_norm_residual_cpu(const Tensor& x, const Tensor& residual,
                                                   const OptionalTensor& weight,
                                                   const OptionalTensor& bias, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey<c10::kCPU>);
  const auto dtype = c10::promoteTypes(x.scalar_type(), residual.scalar_type());
  return layer_norm_residual(x.to(dtype), residual.to(dtype), weight, bias, eps);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_fp32_on_cuda<rms_norm, 0, 1>(m, "rms_norm");
  autocast_to_fp32_on_cuda<rms_norm_residual, 0, 1, 2>(m, "rms_norm_residual");
  autocast_to_fp32_on_cuda<layer_norm, 0, 1, 2>(m, "layer_norm");
  autocast_to_fp32_on_cuda<layer_norm_residual, 0, 1, 2, 3>(m, "layer_norm_residual");
  impl_autocast<c10::kCPU, rms_norm_residual_cpu>(m, "rms_norm_residual");
  impl_autocast<c10::kCPU, layer_norm_residual_cpu>(m, "layer_norm_residual");
}

}  // namespace tp_ext
