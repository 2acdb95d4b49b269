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
#include "autograd/call.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"
#include "autograd/main_grad.h"
#include "comm/collectives.h"
#include "operators.h"
#include "products.h"

namespace tp_ext {
namespace {

struct AllToAllCall {
  std::string group;
  Split sent, received;
  OptionalTensor main_grad{};

  auto fields() { return std::tie(group, sent, received, main_grad); }
};

struct AllToAllLinear : Function<AllToAllLinear> {
  static variable_list forward(AutogradContext* ctx, const Tensor& rows, const Tensor& x,
                               const Tensor& weight, const AllToAllCall& call) {
    ctx->save_for_backward(operands(x, weight));
    put_call(ctx, call);
    const Unrecorded guard(comm::traced(rows) || comm::traced(x));
    auto arriving = comm::all_to_all_async(rows, call.group, 0, 0, call.sent, call.received);
    Tensor y = products::linear(x, weight);
    return {arriving.wait(), y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &drows = grads[0], &dy = grads[1];
    const auto [group, sent, received, main_grad] = get_call<AllToAllCall>(ctx);
    const bool wants_rows = ctx->needs_input_grad(0), wants_x = ctx->needs_input_grad(1);
    const bool wants_w = ctx->needs_input_grad(2);
    if (main_grad) refuse_double_backward("a linear with grad_accumulation_fusion", grads);
    variable_list result = gradients();
    if (at::GradMode::is_enabled() || any_tangent(drows, dy)) {
      if (wants_rows) result[0] = all_to_all_region(drows, group, 0, 0, received.sizes, sent.sizes);
      if (wants_x) result[1] = at::matmul(dy, weight);
      if (wants_w) result[2] = at::mm(as_rows(dy).t(), as_rows(x));
      return result;
    }
    const Unrecorded guard(comm::traced(drows) || comm::traced(dy));
    std::optional<comm::Pending> returning;
    if (wants_rows) returning.emplace(comm::all_to_all_async(drows, group, 0, 0, received, sent));
    if (wants_x) result[1] = input_grad(dy, weight);
    if (wants_w && main_grad) {
      add_weight_grad(*main_grad, as_rows(dy), as_rows(x));
      result[2] = placeholder_grad(*main_grad, dy, 2);
    } else if (wants_w) {
      result[2] = weight_grad(dy, x);
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
  auto both = AllToAllLinear::apply(rows, x, weight, AllToAllCall{group, split, concat, main_grad});
  return {both[0], both[1]};
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<all_to_all_linear, 4, 5>(m, "all_to_all_linear");
}

}  // namespace tp_ext
