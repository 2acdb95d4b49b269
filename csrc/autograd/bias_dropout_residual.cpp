// y = residual + dropout(x + bias), fused: x and residual [.., n], bias [n] or None. The mask is a
// pure function of seed and global index, so backward draws it again:
//
//   dx = dropout(dy) with the same mask    dbias = sum of dx over rows    dresidual = dy itself
//
// Saved: the seed. In a backward in two halves (split_backward.h) the first keeps dbias, which
// comes from the same pass as dx. Dropout is linear and its own transpose: the derivative of dx is
// the same operator, and so is the tangent in forward mode.

#include <utility>

#include "autograd/call.h"
#include "autograd/split_backward.h"
#include "operators.h"
#include "rows.h"

namespace tp_ext {
namespace {

// The probability, and which elements of the full tensor these are
struct Mask {
  double p = 0;
  SymInt local_inner, full_inner, offset;
  bool has_bias = false, has_residual = false;

  auto fields() { return std::tie(p, local_inner, full_inner, offset, has_bias, has_residual); }
};

struct BiasDropoutResidual : Function<BiasDropoutResidual> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& bias,
                        const OptionalTensor& residual, const Tensor& seed, const Mask& mask) {
    static const auto op = TP_OP(_bias_dropout_residual_fwd);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({seed});
    put_call(ctx, mask);
    return op.call(x, bias, residual, seed, mask.p, mask.local_inner, mask.full_inner, mask.offset);
  }

  // dx, and the gradient of the bias if it is needed
  static std::tuple<Tensor, Tensor> dropout_again(AutogradContext* ctx, const Mask& mask,
                                                  const Tensor& grad, bool bias_wanted) {
    static const auto op = TP_OP(_dropout_bwd);
    static const auto op_with_bias = TP_OP(_bias_dropout_bwd);
    const auto saved = ctx->get_saved_variables();
    if (at::GradMode::is_enabled()) {  // create_graph: differentiable forms of both
      const Tensor dx = bias_dropout_residual(grad, std::nullopt, std::nullopt, saved[0], mask.p,
                                              mask.local_inner, mask.full_inner, mask.offset);
      return {dx, bias_wanted ? sum_to_last_dim(dx) : Tensor()};
    }
    if (bias_wanted)
      return op_with_bias.call(grad, saved[0], mask.p, mask.local_inner, mask.full_inner,
                               mask.offset);
    return {op.call(grad, saved[0], mask.p, mask.local_inner, mask.full_inner, mask.offset),
            Tensor()};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result = gradients();
    const Tensor& grad = grads[0];
    if (!grad.defined()) return result;
    // needs_input_grad counts defined tensors only
    const auto mask = get_call<Mask>(ctx);
    const bool bias_wanted = mask.has_bias && ctx->needs_input_grad(1);
    const bool residual_wanted = mask.has_residual && ctx->needs_input_grad(mask.has_bias ? 2 : 1);
    if (ctx->needs_input_grad(0)) {
      const bool keeps_bias = mask.has_bias && !at::GradMode::is_enabled() && asked_later(ctx, 1);
      std::tie(result[0], result[1]) = dropout_again(ctx, mask, grad, bias_wanted || keeps_bias);
      if (keeps_bias) keep_results(ctx, grad, {std::exchange(result[1], Tensor())});
    } else if (bias_wanted) {
      const auto kept = take_results(ctx, grad);
      result[1] = kept.empty() ? std::get<1>(dropout_again(ctx, mask, grad, true)) : kept[0];
    }
    if (residual_wanted) result[2] = grad;
    return result;
  }
};

}  // namespace

// Dtypes as in torch's composition: the bias follows x; x and the residual get their common type
Tensor bias_dropout_residual(const Tensor& x, const OptionalTensor& bias,
                             const OptionalTensor& residual, const Tensor& seed, double p,
                             SymInt local_inner, SymInt full_inner, SymInt offset) {
  const bool has_bias = has(bias), has_residual = has(residual);
  const auto dtype =
      has_residual ? c10::promoteTypes(x.scalar_type(), residual->scalar_type()) : x.scalar_type();
  if (any_tangent(x, bias, residual)) {
    static const auto op = TP_OP(bias_dropout_residual);
    const auto tangent = [](const OptionalTensor& t) {
      return has_tangent(t) ? OptionalTensor(tangent_of(*t)) : std::nullopt;
    };
    return make_dual(op.call(primal_of(x), primal_of(bias), primal_of(residual), seed, p,
                             local_inner, full_inner, offset),
                     op.call(tangent_of(x).to(dtype), tangent(bias), tangent(residual), seed, p,
                             local_inner, full_inner, offset));
  }
  return BiasDropoutResidual::apply(
      x.to(dtype), has_bias ? OptionalTensor(bias->to(dtype)) : std::nullopt,
      has_residual ? OptionalTensor(residual->to(dtype)) : std::nullopt, seed,
      Mask{p, local_inner, full_inner, offset, has_bias, has_residual});
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<bias_dropout_residual>(m, "bias_dropout_residual");
}

}  // namespace tp_ext
