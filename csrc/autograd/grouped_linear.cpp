// grouped_linear: linear layers of several experts over consecutive rows, counts[e] for expert e.
//
//   y_r = weight_e x_r      dx_r = weight_e^T dy_r      dweight_e = grad_scale sum of dy_r x_r^T
//
// dx is a grouped linear, too, with the transposed weights; dweight is a grouped outer product,
// zero for an expert without rows. A GEMM for each expert writes into one result, so that nothing
// is concatenated; or torch's grouped GEMM computes all. With main_grad, dweight is added to it
// expert by expert (main_grad.h). Saved: x and weight, each only if the other's gradient may be
// needed. Derivatives of any order.

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tensor.h>

#include <numeric>

#include "autograd/autocast.h"
#include "autograd/call.h"
#include "autograd/decoding.h"
#include "autograd/main_grad.h"
#include "check.h"
#include "comm/collectives.h"
#include "operators.h"
#include "products.h"

namespace tp_ext {
namespace {

using Counts = std::vector<int64_t>;

// How the products are computed
struct Grouping {
  Counts counts;
  std::optional<bool> grouped_gemm;
  OptionalTensor main_grad{};
  double grad_scale = 1;

  // torch's grouped GEMM takes bf16 on CUDA, rows of whole 16 bytes, at least one
  bool uses_grouped_gemm(const Tensor& a, const Tensor& b) const {
    if (grouped_gemm.has_value()) return *grouped_gemm;
    const auto fits = [](const Tensor& t) {
      const auto whole = [&](int64_t dim) { return t.size(dim) % 8 == 0; };
      return whole(-1) && (t.dim() == 2 || whole(-2)) &&
             (t.is_contiguous() || t.transpose(-2, -1).is_contiguous());
    };
    return a.is_cuda() && a.scalar_type() == at::kBFloat16 && a.size(0) > 0 && fits(a) && fits(b);
  }

  Tensor ends(const Tensor& like) const {
    return at::tensor(counts, like.options().dtype(at::kInt)).cumsum(0, at::kInt);
  }

  // f(e, rows of t, ..) for each expert
  template <typename F, typename... Tensors>
  void for_each(const F& f, const Tensors&... ts) const {
    int64_t start = 0;
    for (size_t e = 0; e < counts.size(); start += counts[e++])
      f(static_cast<int64_t>(e), ts.narrow(0, start, counts[e])...);
  }

  auto fields() { return std::tie(counts, grouped_gemm, main_grad, grad_scale); }
};

Tensor rows_times(const Tensor& x, const Tensor& weight, const Grouping& grouping,
                  bool inference = false) {
  if (grouping.uses_grouped_gemm(x, weight))
    return at::_grouped_mm(x, weight.transpose(1, 2), grouping.ends(x));
  const Tensor y = x.new_empty_symint({x.sym_size(0), weight.sym_size(1)});
  grouping.for_each(
      [&](int64_t e, const Tensor& own, Tensor result) {
        if (grouping.counts[e] == 0) return;
        const Tensor w = weight.select(0, e);
        if (inference && is_skinny(own, w))
          result.copy_(skinny_linear_cpu(own, w, std::nullopt));
        else
          products::mm_out(result, own, w.t());
      },
      x, y);
  return y;
}

Tensor outer(const Tensor& a, const Tensor& b, const Grouping& grouping) {
  const auto experts = static_cast<int64_t>(grouping.counts.size());
  if (grouping.uses_grouped_gemm(a, b)) {
    const Tensor z = at::_grouped_mm(a.t(), b, grouping.ends(a));
    // On some GPUs it returns other numbers for a group without rows (pytorch/pytorch#172439)
    for (int64_t e = 0; e < experts; ++e)
      if (grouping.counts[e] == 0) z.select(0, e).zero_();
    return z;
  }
  const Tensor z = a.new_empty_symint({experts, a.sym_size(1), b.sym_size(1)});
  grouping.for_each(
      [&](int64_t e, const Tensor& own_a, const Tensor& own_b) {
        Tensor result = z.select(0, e);
        if (grouping.counts[e] > 0)
          products::mm_out(result, own_a.t(), own_b);
        else
          result.zero_();
      },
      a, b);
  return z;
}

// z_e = a_e^T b_e; da = b z^T and db = a z, each for the rows of e
struct GroupedOuter : Function<GroupedOuter> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b,
                        const Grouping& grouping) {
    ctx->save_for_backward(operands(a, b));
    put_call(ctx, grouping);
    const Unrecorded guard(a);
    return outer(a, b, grouping);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto grouping = get_call<Grouping>(ctx);
    const auto times = [&](const Tensor& x, const Tensor& weight) {
      return grouped_linear(x, weight, grouping.counts, std::nullopt, 1, grouping.grouped_gemm);
    };
    return gradients(
        {ctx->needs_input_grad(0) ? times(saved[1], grads[0]) : Tensor(),
         ctx->needs_input_grad(1) ? times(saved[0], grads[0].transpose(1, 2)) : Tensor()});
  }
};

struct GroupedLinear : Function<GroupedLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Grouping& grouping) {
    ctx->save_for_backward(operands(x, weight));
    put_call(ctx, grouping);
    const Unrecorded guard(x);
    return rows_times(x, weight, grouping);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto grouping = get_call<Grouping>(ctx);
    const Tensor &x = saved[0], &weight = saved[1], &dy = grads[0];
    const double scale = grouping.grad_scale;
    if (grouping.main_grad) refuse_double_backward("a linear with grad_accumulation_fusion", grads);
    const bool wants_x = ctx->needs_input_grad(0), wants_w = ctx->needs_input_grad(1);
    Tensor dx, dw;
    // A derivative of this backward is wanted: products that autograd records, nothing in place
    if (at::GradMode::is_enabled() || has_tangent(dy)) {
      if (wants_x)
        dx = grouped_linear(dy, weight.transpose(1, 2), grouping.counts, std::nullopt, 1,
                            grouping.grouped_gemm);
      if (wants_w)
        dw = GroupedOuter::apply(dy, x, Grouping{grouping.counts, grouping.grouped_gemm});
      if (wants_w && scale != 1) dw = at::mul(dw, scale);
      return gradients({dx, dw});
    }
    const Unrecorded guard(dy);
    if (wants_x) dx = rows_times(dy, weight.transpose(1, 2), grouping);
    if (wants_w && grouping.main_grad) {
      const Tensor& main_grad = *grouping.main_grad;
      // The factor is applied to dy: main_grad holds earlier microbatches, which must not be scaled
      grouping.for_each(
          [&](int64_t e, const Tensor& own_dy, const Tensor& own_x) {
            if (grouping.counts[e] > 0) add_weight_grad(main_grad.select(0, e), own_dy, own_x);
          },
          scale == 1 ? dy : at::mul(dy, scale), x);
      dw = placeholder_grad(main_grad, dy, 1);
    } else if (wants_w) {
      dw = outer(dy, x, grouping);
      if (scale != 1) dw = comm::traced(dw) ? at::mul(dw, scale) : dw.mul_(scale);
    }
    return gradients({dx, dw});
  }
};

}  // namespace

Tensor grouped_linear(const Tensor& x, const Tensor& weight, at::IntArrayRef counts,
                      const OptionalTensor& main_grad, double grad_scale,
                      std::optional<bool> grouped_gemm) {
  refuse_forward_mode("grouped_linear", x, weight);
  check_floating(x, "x");
  TORCH_CHECK_VALUE(weight.dim() == 3, "weight: shape ", weight.sym_sizes(), " must have 3 dims");
  TORCH_CHECK_VALUE(x.dim() == 2 && x.sym_size(1) == weight.sym_size(2), "x: shape ", x.sym_sizes(),
                    " must be [rows, ", weight.sym_size(2), "], the input features of weight");
  check_same_dtype(weight, "weight", x, "x");
  check_same_device(weight, "weight", x, "x");
  check_main_grad(main_grad, weight);
  const auto negative = [](int64_t n) { return n < 0; };
  TORCH_CHECK_VALUE(weight.sym_size(0) == static_cast<int64_t>(counts.size()) &&
                        std::none_of(counts.begin(), counts.end(), negative) &&
                        x.sym_size(0) == std::accumulate(counts.begin(), counts.end(), int64_t{0}),
                    "counts: ", counts, " must be a number of rows for each of the ",
                    weight.sym_size(0), " experts of weight, and their sum the ", x.sym_size(0),
                    " rows of x");
  const Grouping grouping{counts.vec(), grouped_gemm, main_grad, grad_scale};
  if (is_inference(x, weight, std::nullopt)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return rows_times(x, weight, grouping, true);
  }
  return GroupedLinear::apply(x, weight, grouping);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<grouped_linear, 0, 1>(m, "grouped_linear");
}

}  // namespace tp_ext
