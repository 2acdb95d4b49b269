// float8_grouped_linear: grouped_linear whose products are of 8-bit floating point. Each expert is
// a linear of its own, with scales of its rows and its weight:
//
//   y_r = weight_e x_r      dx_r = weight_e^T dy_r      dweight_e = grad_scale sum of dy_r x_r^T
//
// The ranks of `group` share each weight, along its outputs or (`inputs`) its inputs, and with them
// what a scale is of, as in float8_linear.cpp: one max-reduce of the numbers of all experts
// precedes the products of forward, and of backward. Results are this rank's: their sums are the
// caller's. An expert without rows has the gradient 0. Saved: x, weight and, per tensor, their
// largest values.

#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/stack.h>

#include <numeric>

#include "autograd/autocast.h"
#include "autograd/call.h"
#include "autograd/float8.h"
#include "check.h"
#include "operators.h"

namespace tp_ext {
namespace {

constexpr const char* kGroupedFloat8 = "experts with float8";
using Dim = std::optional<int64_t>;

struct GroupedFloat8Call {
  std::vector<int64_t> counts;
  std::string group;
  bool inputs = false, by_row = false;
  at::ScalarType forward = at::kFloat, gradient = at::kFloat, weight_dtype = at::kFloat;
  double grad_scale = 1;

  int64_t experts() const { return static_cast<int64_t>(counts.size()); }
  int64_t start(int64_t e) const {
    return std::accumulate(counts.begin(), counts.begin() + e, int64_t{0});
  }
  Tensor rows(const Tensor& x, int64_t e) const { return x.narrow(0, start(e), counts[e]); }

  // The largest values of each expert's rows of x, and of its weight, along a dim
  std::vector<Tensor> of_rows(const Tensor& x, Dim dim) const {
    std::vector<Tensor> found;
    for (int64_t e = 0; e < experts(); ++e) found.push_back(amax_of(rows(x, e), dim));
    return found;
  }
  std::vector<Tensor> of_weights(const Tensor& weight, Dim dim) const {
    std::vector<Tensor> found;
    for (int64_t e = 0; e < experts(); ++e) found.push_back(amax_of(weight.select(0, e), dim));
    return found;
  }

  // Of several lists those marked become the maxima over the ranks
  void over_ranks(std::vector<std::pair<std::vector<Tensor>*, bool>> lists) const {
    std::vector<Tensor> shared;
    for (const auto& [list, is_shared] : lists)
      if (is_shared) shared.insert(shared.end(), list->begin(), list->end());
    shared = max_over(group, std::move(shared));
    size_t at = 0;
    for (auto& [list, is_shared] : lists)
      if (is_shared)
        for (auto& one : *list) one = shared[at++];
  }

  auto fields() {
    return std::tie(counts, group, inputs, by_row, forward, gradient, weight_dtype, grad_scale);
  }
};

struct Float8GroupedLinear : Function<Float8GroupedLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const GroupedFloat8Call& call) {
    const Unrecorded guard(x);
    const Dim dim = call.by_row ? Dim(1) : std::nullopt;
    auto of_x = call.of_rows(x, dim), of_w = call.of_weights(weight, dim);
    // Shared inputs: parts of a row of both. Shared outputs: the weight alone, if a scale is of all
    call.over_ranks({{&of_x, call.inputs}, {&of_w, call.inputs || !call.by_row}});
    variable_list saved = operands(x, weight);
    if (!call.by_row)
      for (const auto* list : {&of_x, &of_w})
        saved.push_back(list->empty() ? Tensor() : at::cat(*list));
    ctx->save_for_backward(saved);
    put_call(ctx, call);
    std::vector<Tensor> results;
    for (int64_t e = 0; e < call.experts(); ++e)
      results.push_back(scaled_product(quantized(call.rows(x, e), of_x[e], call.forward),
                                       quantized(weight.select(0, e), of_w[e], call.forward).t(),
                                       call.by_row, x.scalar_type()));
    return results.empty() ? x.new_zeros_symint({0, weight.sym_size(1)}) : at::cat(results);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kGroupedFloat8, grads);
    const auto call = get_call<GroupedFloat8Call>(ctx);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &dy = grads[0];
    const bool wants_x = ctx->needs_input_grad(0), wants_w = ctx->needs_input_grad(1);
    const bool outputs = !call.inputs;
    const Unrecorded guard(dy);
    std::vector<Tensor> of_x, of_w, of_dy, rows_of_dy, dx, dw;
    if (call.by_row) {
      if (wants_x) {
        rows_of_dy = call.of_rows(dy, 1), of_w = call.of_weights(weight, 0);
        call.over_ranks({{&rows_of_dy, outputs}, {&of_w, outputs}});
      }
      if (wants_w) of_dy = call.of_rows(dy, 0), of_x = call.of_rows(x, 0);
    } else {
      rows_of_dy = call.of_rows(dy, std::nullopt);
      call.over_ranks({{&rows_of_dy, outputs}});
      of_dy = rows_of_dy;
      if (call.experts() > 0) of_x = saved[2].split(1), of_w = saved[3].split(1);
    }
    for (int64_t e = 0; e < call.experts(); ++e) {
      const Tensor own = call.rows(dy, e);
      if (wants_x)
        dx.push_back(scaled_product(quantized(own, rows_of_dy[e], call.gradient),
                                    quantized(weight.select(0, e), of_w[e], call.forward),
                                    call.by_row, dy.scalar_type()));
      if (wants_w) {
        const Tensor grad = scaled_product(quantized(own, of_dy[e], call.gradient).t(),
                                           quantized(call.rows(x, e), of_x[e], call.forward),
                                           call.by_row, call.weight_dtype);
        dw.push_back(call.grad_scale == 1 ? grad : grad * call.grad_scale);
      }
    }
    return gradients({wants_x
                          ? dx.empty() ? dy.new_zeros_symint({0, weight.sym_size(2)}) : at::cat(dx)
                          : Tensor(),
                      wants_w && !dw.empty() ? at::stack(dw) : Tensor()});
  }
};

}  // namespace

Tensor float8_grouped_linear(const Tensor& x, const Tensor& weight, at::IntArrayRef counts,
                             const std::string& group, bool inputs, bool by_row,
                             at::ScalarType forward, at::ScalarType gradient, double grad_scale) {
  refuse_forward_mode(kGroupedFloat8, x, weight);
  check_float8(x, weight, forward, gradient);
  TORCH_CHECK_VALUE(weight.dim() == 3, "weight: shape ", weight.sym_sizes(), " must have 3 dims");
  TORCH_CHECK_VALUE(x.dim() == 2 && x.sym_size(1) == weight.sym_size(2), "x: shape ", x.sym_sizes(),
                    " must be [rows, ", weight.sym_size(2), "], the input features of weight");
  TORCH_CHECK_VALUE(weight.sym_size(0) == static_cast<int64_t>(counts.size()) &&
                        x.sym_size(0) == std::accumulate(counts.begin(), counts.end(), int64_t{0}),
                    "counts: ", counts, " must be a number of rows for each of the ",
                    weight.sym_size(0), " experts of weight, and their sum the ", x.sym_size(0),
                    " rows of x");
  return Float8GroupedLinear::apply(x, weight,
                                    GroupedFloat8Call{counts.vec(), group, inputs, by_row, forward,
                                                      gradient, weight.scalar_type(), grad_scale});
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<float8_grouped_linear, 0>(m, "float8_grouped_linear");
}

}  // namespace tp_ext
