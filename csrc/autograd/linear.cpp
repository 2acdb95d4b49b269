// The tensor-parallel linears. weight is [out_local, in] (column: its rows are sharded) or [out,
// in_local] (row: its columns are sharded); under sequence parallelism (SP) the first dim of x
// (column) or of y (row) is sharded too: [..] below marks the steps that SP adds.
//
//        column                                       row
//   y    [gather x] w^T + b                           sum over ranks of x w^T, [local rows] + b
//   dx   sum over ranks of dy w, [local rows]         [gather dy] w
//   dw   dy^T [gather x]                              [gather dy]^T x
//   db   sum over rows of dy                          sum over rows of dy, [and over ranks]
//
// Saved: the input x (the shard) and w, each only if the other's gradient may be needed. Column
// backward: the sum of dx overlaps the GEMM of dw, and under SP the gather of x overlaps the GEMM
// of dx. Row backward under SP: the sum of db overlaps both GEMMs. Double backward is composed of
// regions and matmuls, by the same table. With main_grad, dw is added to it and autograd gets no
// gradient (main_grad.h). overlap_chunks splits communication that has no such GEMM to overlap with
// (linear_overlap.h). Without sum_bias_grad the caller sums db over the ranks. In a backward in two
// halves (split_backward.h) the row linear keeps the gathered dy for dw.

#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include "autograd/autocast.h"
#include "autograd/decoding.h"
#include "autograd/exchange.h"
#include "autograd/function.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"
#include "autograd/main_grad.h"
#include "autograd/split_backward.h"
#include "operators.h"
#include "products.h"

namespace tp_ext {
namespace {

Tensor bias_grad(const Tensor& dy) { return as_rows(dy).sum(0); }

// How a call is computed
struct LinearCall {
  Exchange tokens;  // cut under SP
  OptionalTensor main_grad{};
  int64_t overlap_chunks = 1;
  bool sum_bias_grad = true;
  bool has_bias = false;

  auto fields() {
    return std::tuple_cat(tokens.fields(),
                          std::tie(main_grad, overlap_chunks, sum_bias_grad, has_bias));
  }
};
using Saved = SavedLinear<LinearCall>;

// The gradient of the weight, or what autograd gets in its place if it is added to main_grad
Tensor accumulate_weight_grad(const Saved& s, const Tensor& dy, const Tensor& x) {
  if (!s.main_grad.has_value()) return weight_grad(dy, x);
  add_weight_grad(*s.main_grad, as_rows(dy), as_rows(x));
  return placeholder_grad(*s.main_grad, dy, 1);
}

// Whether backward will itself be differentiated, in either mode
bool differentiated(const Tensor& dy, const Saved& s) {
  if (s.main_grad.has_value())
    refuse_double_backward("a linear with grad_accumulation_fusion", {dy});
  return at::GradMode::is_enabled() || has_tangent(dy);
}

// [Note: overlap on every backend]
struct ColumnLinear : Function<ColumnLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const LinearCall& call) {
    Saved::put(ctx, x, weight, call);
    const Unrecorded guard(x);
    const auto& [group, tokens, dim] = call.tokens;
    const auto chunks = call.tokens.cut() ? chunks_of(x, tokens.total(), call.overlap_chunks) : 1;
    if (chunks > 1) return gather_linear(x, weight, bias, group, tokens, chunks);
    return products::linear(call.tokens.gather(x), weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& dy = grads[0];
    const Saved s(ctx);
    if (differentiated(dy, s)) return differentiable(dy, s);

    const Unrecorded guard(dy);
    std::optional<comm::Pending> x_full, dx;
    if (s.wants_w) x_full.emplace(s.tokens.gather_async(s.x));
    if (s.wants_x) dx.emplace(s.tokens.sum_async(input_grad(dy, s.weight)));
    // After issuing the collective: it waits for everything queued before it, so db and dw must
    // come later to overlap
    const Tensor db = s.wants_b ? bias_grad(dy) : Tensor();
    const Tensor dw = s.wants_w ? accumulate_weight_grad(s, dy, x_full->wait()) : Tensor();
    return gradients({dx ? dx->wait() : Tensor(), dw, db});
  }

  static variable_list differentiable(const Tensor& dy, const Saved& s) {
    return gradients({s.wants_x ? s.tokens.sum_region(at::matmul(dy, s.weight)) : Tensor(),
                      s.wants_w ? weight_grad(dy, s.tokens.gather_region(s.x)) : Tensor(),
                      s.wants_b ? bias_grad(dy) : Tensor()});
  }
};

struct RowLinear : Function<RowLinear> {
  static Tensor summed(const Tensor& x, const Tensor& weight, const LinearCall& call) {
    const auto& [group, tokens, dim] = call.tokens;
    if (call.overlap_chunks > 1) {
      const auto rows = call.tokens.cut() ? tokens.total() : as_rows(x).sym_size(0);
      const auto chunks = chunks_of(x, rows, call.overlap_chunks);
      if (chunks > 1)
        return call.tokens.cut() ? linear_reduce_scatter(x, weight, group, tokens, chunks)
                                 : linear_all_reduce(x, weight, group, chunks);
    }
    return call.tokens.sum(products::linear(x, weight));
  }

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const LinearCall& call) {
    Saved::put(ctx, x, weight, call);
    const Unrecorded guard(x);
    return plus_bias(summed(x, weight, call), bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s(ctx);
    if (differentiated(grads[0], s)) return differentiable(grads[0], s);

    const Unrecorded guard(grads[0]);
    const bool sp = s.tokens.cut();
    std::optional<comm::Pending> dy_full, db;
    Tensor dx, dy = grads[0];
    const bool keeps_dy = sp && s.wants_x && asked_later(ctx, 1);
    const auto kept = sp && s.wants_w && !s.wants_x ? take_results(ctx, dy) : variable_list();
    if (!kept.empty()) {
      dy = kept[0];
    } else if (sp) {
      const auto& [group, tokens, dim] = s.tokens;
      const auto chunks = s.wants_x ? chunks_of(dy, tokens.total(), s.overlap_chunks) : 1;
      if (chunks > 1)
        std::tie(dx, dy) = gather_mm(dy, s.weight, group, tokens, chunks, s.wants_w || keeps_dy);
      else if (s.wants_x || s.wants_w)
        dy_full.emplace(s.tokens.gather_async(dy));
    }
    // After issuing the gather: it waits for everything queued before it, so db must come later to
    // overlap
    const Tensor db_local = s.wants_b ? bias_grad(grads[0]) : Tensor();
    if (s.wants_b && sp && s.sum_bias_grad)
      db.emplace(comm::all_reduce_async(db_local, s.tokens.group));
    if (dy_full) dy = dy_full->wait();
    if (keeps_dy) keep_results(ctx, grads[0], {dy});
    if (s.wants_x && !dx.defined()) dx = input_grad(dy, s.weight);
    const Tensor dw = s.wants_w ? accumulate_weight_grad(s, dy, s.x) : Tensor();
    return gradients({dx, dw, db ? db->wait() : db_local});
  }

  static variable_list differentiable(const Tensor& grad, const Saved& s) {
    const Tensor dy = s.tokens.gather_region(grad);
    Tensor db = s.wants_b ? bias_grad(grad) : Tensor();
    if (s.wants_b && s.tokens.cut() && s.sum_bias_grad) db = reduce_from_region(db, s.tokens.group);
    return gradients({s.wants_x ? at::matmul(dy, s.weight) : Tensor(),
                      s.wants_w ? weight_grad(dy, s.x) : Tensor(), db});
  }
};

// Without parallelism and main_grad this is torch's own linear, where torch's product is as fast
bool is_plain(int64_t p, const OptionalTensor& main_grad, const Tensor& x, const Tensor& weight,
              const OptionalTensor& bias) {
  return p == 1 && !main_grad.has_value() && !products::differs(x, weight, bias);
}

// Forward mode: composed of regions and torch's linear, which knows the product rule
Tensor accumulating(const Tensor& weight, const OptionalTensor& main_grad) {
  if (!main_grad.has_value()) return weight;
  return TP_OP(accumulate_grad_into).call(weight, *main_grad);
}

Tensor column_by_regions(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         const LinearCall& call) {
  return at::linear(call.tokens.gather_region(x), accumulating(weight, call.main_grad), bias);
}

Tensor row_by_regions(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                      const LinearCall& call) {
  const Tensor y = call.tokens.sum_region(at::linear(x, accumulating(weight, call.main_grad)));
  if (!bias.has_value()) return y;
  const bool sum = call.tokens.cut() && call.sum_bias_grad;
  return at::add(y, sum ? TP_OP(copy_to_region).call(*bias, call.tokens.group) : *bias);
}

}  // namespace

Tensor column_parallel_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              const std::string& group, bool sequence_parallel, Sizes sizes,
                              const OptionalTensor& main_grad, int64_t overlap_chunks) {
  check_linear(x, weight, bias, main_grad, overlap_chunks);
  const int64_t p = comm::size(group);
  if (!(sequence_parallel && p > 1) && is_decoding(x, weight, bias))
    return skinny_linear_cpu(x, weight, bias);
  if (is_plain(p, main_grad, x, weight, bias)) return at::linear(x, weight, bias);
  LinearCall call{{group}, main_grad, overlap_chunks, true, bias.has_value()};
  if (sequence_parallel && p > 1)
    call.tokens.split = split_local(tokens_of(x), comm::rank(group), p, sizes);
  if (any_tangent(x, weight, bias)) return column_by_regions(x, weight, bias, call);
  return ColumnLinear::apply(x, weight, bias, call);
}

Tensor row_parallel_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const std::string& group, bool sequence_parallel, Sizes sizes,
                           const OptionalTensor& main_grad, int64_t overlap_chunks,
                           bool sum_bias_grad) {
  check_linear(x, weight, bias, main_grad, overlap_chunks, true);
  const int64_t p = comm::size(group);
  if (!(sequence_parallel && p > 1) && is_decoding(x, weight, bias)) {
    if (p == 1) return skinny_linear_cpu(x, weight, bias);
    return plus_bias(comm::all_reduce_fresh(skinny_linear_cpu(x, weight, std::nullopt), group),
                     bias);
  }
  if (is_plain(p, main_grad, x, weight, bias)) return at::linear(x, weight, bias);
  LinearCall call{{group}, main_grad, p > 1 ? overlap_chunks : 1, sum_bias_grad, bias.has_value()};
  if (sequence_parallel && p > 1) call.tokens.split = split_full(tokens_of(x), p, sizes);
  if (any_tangent(x, weight, bias)) return row_by_regions(x, weight, bias, call);
  return RowLinear::apply(x, weight, bias, call);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<column_parallel_linear, 0, 1, 2>(m, "column_parallel_linear");
  autocast_to_low_precision<row_parallel_linear, 0, 1, 2>(m, "row_parallel_linear");
}

}  // namespace tp_ext
