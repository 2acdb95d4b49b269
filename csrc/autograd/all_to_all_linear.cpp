// all_to_all_linear: an exchange of rows during a linear that does not need them.
//
//   forward   rows' = all_to_all(rows)            during   y = x weight^T
//   backward  drows = the inverse of drows'       during   dx = dy weight, dweight = dy^T x
//
// Both start the exchange first, compute, and wait for it. The linear communicates nothing: with
// sharded weights, the caller sums y or dx. Saved: x and weight, each only if the other's gradient
// may be needed. Double backward is composed of all_to_all_region and a linear.
// In a backward in two halves (split_backward.h) the second one has no exchange.

#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>

#include "autograd/autocast.h"
#include "autograd/function.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"
#include "autograd/main_grad.h"
#include "comm/collectives.h"
#include "operators.h"
#include "products.h"

namespace tp_ext {
namespace {

struct AllToAllLinear : Function<AllToAllLinear> {
  static variable_list forward(AutogradContext* ctx, const Tensor& rows, const std::string& group,
                               const Split& split, const Split& concat, const Tensor& x,
                               const Tensor& weight, const OptionalTensor& main_grad) {
    ctx->save_for_backward(
        {weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor()});
    auto& data = ctx->saved_data;
    data["group"] = group;
    data["sent"] = c10::SymIntArrayRef(split.sizes);
    data["received"] = c10::SymIntArrayRef(concat.sizes);
    // Not saved as a variable: it is written between forward and backward, in every microbatch
    if (main_grad.has_value()) data["main_grad"] = *main_grad;
    const Unrecorded guard(comm::traced(rows) || comm::traced(x));
    auto arriving = comm::all_to_all_async(rows, group, 0, 0, split, concat);
    Tensor y = products::linear(x, weight);
    return {arriving.wait(), y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &drows = grads[0], &dy = grads[1];
    auto& data = ctx->saved_data;
    const auto group = data["group"].toStringRef();
    const Split sent{data["sent"].toSymIntVector()}, received{data["received"].toSymIntVector()};
    const bool wants_rows = ctx->needs_input_grad(0), wants_x = ctx->needs_input_grad(1);
    const bool wants_w = ctx->needs_input_grad(2);
    const bool accumulates = data.count("main_grad") > 0;
    if (accumulates) refuse_double_backward("a linear with grad_accumulation_fusion", grads);
    variable_list result = gradients();
    if (at::GradMode::is_enabled() || any_tangent(drows, dy)) {
      if (wants_rows) result[0] = all_to_all_region(drows, group, 0, 0, received.sizes, sent.sizes);
      if (wants_x) result[4] = at::matmul(dy, weight);
      if (wants_w) result[5] = at::mm(as_rows(dy).t(), as_rows(x));
      return result;
    }
    const Unrecorded guard(comm::traced(drows) || comm::traced(dy));
    std::optional<comm::Pending> returning;
    if (wants_rows) returning.emplace(comm::all_to_all_async(drows, group, 0, 0, received, sent));
    if (wants_x) result[4] = input_grad(dy, weight);
    if (wants_w && accumulates) {
      const Tensor main_grad = data["main_grad"].toTensor();
      add_weight_grad(main_grad, as_rows(dy), as_rows(x));
      result[5] = placeholder_grad(main_grad, dy, 2);
    } else if (wants_w) {
      result[5] = weight_grad(dy, x);
    }
    if (returning) result[0] = returning->wait();
    return result;
  }
};

}  // namespace

std::tuple<Tensor, Tensor> all_to_all_linear(const Tensor& rows, const std::string& group,
                                             Sizes split_sizes, Sizes concat_sizes, const Tensor& x,
                                             const Tensor& weight,
                                             const OptionalTensor& main_grad) {
  refuse_forward_mode("all_to_all_linear", rows, x, weight);
  check_linear(x, weight, std::nullopt, main_grad, 1);
  check_floating(rows, "rows");
  TORCH_CHECK_VALUE(rows.dim() > 0, "rows: shape ", rows.sym_sizes(), " must have a dim of rows");
  const int64_t p = comm::size(group), rank = comm::rank(group);
  const auto split = split_full(rows.sym_size(0), p, split_sizes, "split_sizes");
  const auto concat = split_local(split.sizes[rank], rank, p, concat_sizes, "concat_sizes");
  if (p == 1)
    return {rows,
            column_parallel_linear(x, weight, std::nullopt, "", false, std::nullopt, main_grad, 1)};
  auto both = AllToAllLinear::apply(rows, group, split, concat, x, weight, main_grad);
  return {both[0], both[1]};
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<all_to_all_linear>(m, "all_to_all_linear");
}
TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<all_to_all_linear, 4, 5>(m, "all_to_all_linear");
}

}  // namespace tp_ext
