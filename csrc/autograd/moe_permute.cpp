// moe_permute, moe_unpermute and moe_dot, differentiable: the derivatives of
//
//   F(x, y, weights) = sum over slots s of weights[s] * <x[s / choices], y[rows[s]]>
//
// by y, by x and by weights (kernels/moe_permute.h). The derivatives of each are the other two, so
// they have derivatives of any order, in reverse mode:
//
//   y = permute(x, weights)      dx = unpermute(dy, weights)        dweights = dot(x, dy)
//   x = unpermute(y, weights)    dy = permute(dx, weights)          dweights = dot(dx, y)
//   d = dot(x, y)                dx = unpermute(y, weights = dd)    dy = permute(x, weights = dd)
//
// Saved: rows, and of the two factors those of which the other one needs a gradient. The two
// gradients of unpermute share one pass over dx.

#include <tuple>

#include "args/moe_permute.h"
#include "autograd/function.h"
#include "operators.h"

namespace tp_ext {
namespace {

bool any_needs_graph(const OptionalTensor& t) { return t.has_value() && needs_graph(*t); }

// What to save of a factor: nothing if the other one needs no gradient
Tensor saved_if(bool needed, const OptionalTensor& factor) {
  return needed && factor.has_value() ? *factor : Tensor();
}

Tensor permute(const Tensor& x, const Tensor& rows, const SymInt& num_rows,
               const OptionalTensor& weights) {
  static const auto op = TP_OP(_moe_permute);
  return op.call(x, rows, num_rows, weights);
}

Tensor unpermute(const Tensor& y, const Tensor& rows, const OptionalTensor& weights) {
  static const auto op = TP_OP(_moe_unpermute);
  return op.call(y, rows, weights);
}

Tensor dot(const Tensor& x, const Tensor& y, const Tensor& rows) {
  static const auto op = TP_OP(_moe_dot);
  return op.call(x, y, rows);
}

struct Permute : Function<Permute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& rows,
                        const SymInt& num_rows, const OptionalTensor& weights, bool x_needs_graph,
                        bool weights_need_graph) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->saved_data["has_weights"] = weights.has_value();
    ctx->save_for_backward(
        {rows, saved_if(x_needs_graph, weights), saved_if(weights_need_graph, x)});
    return permute(x, rows, num_rows, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result = gradients();
    const Tensor& dy = grads[0];
    if (!dy.defined()) return result;
    const auto saved = ctx->get_saved_variables();
    if (ctx->needs_input_grad(0)) result[0] = moe_unpermute(dy, saved[0], optional(saved[1]));
    if (ctx->saved_data["has_weights"].toBool() && ctx->needs_input_grad(2))
      result[3] = moe_dot(saved[2], dy, saved[0]);
    return result;
  }
};

struct Unpermute : Function<Unpermute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& y, const Tensor& rows,
                        const OptionalTensor& weights, bool y_needs_graph,
                        bool weights_need_graph) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->saved_data["has_weights"] = weights.has_value();
    ctx->saved_data["num_rows"] = y.sym_size(0);
    ctx->save_for_backward(
        {rows, saved_if(y_needs_graph, weights), saved_if(weights_need_graph, y)});
    return unpermute(y, rows, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto both = TP_OP(_moe_unpermute_bwd);
    variable_list result = gradients();
    const Tensor& dx = grads[0];
    if (!dx.defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const bool needs_y = ctx->needs_input_grad(0);
    const bool needs_weights = ctx->saved_data["has_weights"].toBool() && ctx->needs_input_grad(2);
    const bool differentiated = at::GradMode::is_enabled() || has_tangent(dx);
    if (needs_y && needs_weights && !differentiated) {
      std::tie(result[0], result[2]) = both.call(dx, saved[2], saved[0], saved[1]);
      return result;
    }
    if (needs_y)
      result[0] =
          moe_permute(dx, saved[0], ctx->saved_data["num_rows"].toSymInt(), optional(saved[1]));
    if (needs_weights) result[2] = moe_dot(dx, saved[2], saved[0]);
    return result;
  }
};

struct Dot : Function<Dot> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& y, const Tensor& rows,
                        bool x_needs_graph, bool y_needs_graph) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->saved_data["num_rows"] = y.sym_size(0);
    ctx->save_for_backward({rows, saved_if(y_needs_graph, x), saved_if(x_needs_graph, y)});
    return dot(x, y, rows);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result = gradients();
    const Tensor& dweights = grads[0];
    if (!dweights.defined()) return result;
    const auto saved = ctx->get_saved_variables();
    if (ctx->needs_input_grad(0)) result[0] = moe_unpermute(saved[2], saved[0], dweights);
    if (ctx->needs_input_grad(1))
      result[1] = moe_permute(saved[1], saved[0], ctx->saved_data["num_rows"].toSymInt(), dweights);
    return result;
  }
};

// Weights in the dtype that kernels compute in
OptionalTensor weights_of(const OptionalTensor& weights, const Tensor& x) {
  if (!weights.has_value() || !weights->defined()) return std::nullopt;
  TORCH_CHECK_TYPE(
      weights->scalar_type() == x.scalar_type() || weights->scalar_type() == moe_weights_dtype(x),
      "weights: dtype ", weights->scalar_type(), " must be ", x.scalar_type(), " or ",
      moe_weights_dtype(x));
  return weights->to(moe_weights_dtype(x));
}

}  // namespace

Tensor moe_permute(const Tensor& x, const Tensor& rows, SymInt num_rows,
                   const OptionalTensor& weights_any) {
  refuse_forward_mode("moe_permute", x, weights_any);
  const OptionalTensor weights = weights_of(weights_any, x);
  if (!needs_graph(x) && !any_needs_graph(weights)) return permute(x, rows, num_rows, weights);
  return Permute::apply(x, rows, num_rows, weights, needs_graph(x), any_needs_graph(weights));
}

Tensor moe_unpermute(const Tensor& y, const Tensor& rows, const OptionalTensor& weights_any) {
  refuse_forward_mode("moe_unpermute", y, weights_any);
  const OptionalTensor weights = weights_of(weights_any, y);
  if (!needs_graph(y) && !any_needs_graph(weights)) return unpermute(y, rows, weights);
  return Unpermute::apply(y, rows, weights, needs_graph(y), any_needs_graph(weights));
}

Tensor moe_dot(const Tensor& x, const Tensor& y, const Tensor& rows) {
  refuse_forward_mode("moe_dot", x, y);
  if (!needs_graph(x) && !needs_graph(y)) return dot(x, y, rows);
  return Dot::apply(x, y, rows, needs_graph(x), needs_graph(y));
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<moe_permute>(m, "moe_permute");
  impl_composite<moe_unpermute>(m, "moe_unpermute");
  impl_composite<moe_dot>(m, "moe_dot");
}

}  // namespace tp_ext
