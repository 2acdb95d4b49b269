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
#include "autograd/function.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"
#include "autograd/main_grad.h"
#include "autograd/split_backward.h"
#include "comm/collectives.h"
#include "operators.h"
#include "products.h"

namespace tp_ext {
namespace {

Tensor bias_grad(const Tensor& dy) { return as_rows(dy).sum(0); }

// How a call is computed
struct LinearCall {
  std::string group;
  bool sequence_parallel;
  Split tokens;  // under SP: tokens per rank
  OptionalTensor main_grad;
  int64_t overlap_chunks;
  bool sum_bias_grad = true;
};

// State saved by forward for backward. Every entry of saved_data costs time, so absent ones are not
// written.
struct Saved : LinearCall {
  Tensor x, weight;
  bool has_bias;

  static void put(AutogradContext* ctx, const Tensor& x, const Tensor& weight, bool has_bias,
                  const LinearCall& call) {
    ctx->save_for_backward(
        {weight.requires_grad() ? x : Tensor(), x.requires_grad() ? weight : Tensor()});
    auto& data = ctx->saved_data;
    data["group"] = call.group;
    if (has_bias) data["has_bias"] = true;
    if (call.sequence_parallel) data["tokens"] = c10::SymIntArrayRef(call.tokens.sizes);
    if (call.overlap_chunks > 1) data["overlap_chunks"] = call.overlap_chunks;
    if (!call.sum_bias_grad) data["caller_sums_bias_grad"] = true;
    // Not saved as a variable: it is written between forward and backward, in every microbatch
    if (call.main_grad.has_value()) data["main_grad"] = *call.main_grad;
  }
  static Saved get(AutogradContext* ctx) {
    auto tensors = ctx->get_saved_variables();
    const auto& data = ctx->saved_data;
    const auto none = data.end();
    const auto tokens = data.find("tokens"), main_grad = data.find("main_grad"),
               overlap_chunks = data.find("overlap_chunks");
    return {{data.find("group")->second.toStringRef(), tokens != none,
             tokens == none ? Split() : Split{tokens->second.toSymIntVector()},
             main_grad == none ? std::nullopt : OptionalTensor(main_grad->second.toTensor()),
             overlap_chunks == none ? 1 : overlap_chunks->second.toInt(),
             data.count("caller_sums_bias_grad") == 0},
            std::move(tensors[0]),
            std::move(tensors[1]),
            data.count("has_bias") > 0};
  }
};

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
    Saved::put(ctx, x, weight, bias.has_value(), call);
    const Unrecorded guard(x);
    if (!call.sequence_parallel) return products::linear(x, weight, bias);
    const std::string& group = call.group;
    const Split& tokens = call.tokens;
    const auto chunks = chunks_of(x, tokens.total(), call.overlap_chunks);
    if (chunks > 1) return gather_linear(x, weight, bias, group, tokens, chunks);
    return products::linear(comm::all_gather(x, group, 0, tokens), weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& dy = grads[0];
    const auto s = Saved::get(ctx);
    const bool wants_x = ctx->needs_input_grad(0), wants_w = ctx->needs_input_grad(1);
    const bool wants_b = s.has_bias && ctx->needs_input_grad(2);
    if (differentiated(dy, s)) return differentiable(dy, s, wants_x, wants_w, wants_b);

    const Unrecorded guard(dy);
    std::optional<comm::Pending> x_full, dx;
    if (wants_w && s.sequence_parallel)
      x_full.emplace(comm::all_gather_async(s.x, s.group, 0, s.tokens));
    if (wants_x) {
      const Tensor partial = input_grad(dy, s.weight);
      dx.emplace(s.sequence_parallel ? comm::reduce_scatter_async(partial, s.group, 0, s.tokens)
                                     : comm::all_reduce_async(partial, s.group));
    }
    // After issuing the collective: it waits for everything queued before it, so db and dw must
    // come later to overlap
    const Tensor db = wants_b ? bias_grad(dy) : Tensor();
    const Tensor dw =
        wants_w ? accumulate_weight_grad(s, dy, x_full ? x_full->wait() : s.x) : Tensor();
    return gradients({dx ? dx->wait() : Tensor(), dw, db});
  }

  static variable_list differentiable(const Tensor& dy, const Saved& s, bool wants_x, bool wants_w,
                                      bool wants_b) {
    Tensor dx, dw;
    if (wants_x) {
      const Tensor partial = at::matmul(dy, s.weight);
      dx = s.sequence_parallel ? reduce_scatter_region(partial, s.group, 0, s.tokens.sizes)
                               : reduce_from_region(partial, s.group);
    }
    if (wants_w)
      dw = weight_grad(dy, s.sequence_parallel ? all_gather_region(s.x, s.group, 0, s.tokens.sizes)
                                               : copy_to_region(s.x, s.group));
    return gradients({dx, dw, wants_b ? bias_grad(dy) : Tensor()});
  }
};

struct RowLinear : Function<RowLinear> {
  static Tensor summed(const Tensor& x, const Tensor& weight, const LinearCall& call) {
    const std::string& group = call.group;
    const Split& tokens = call.tokens;
    if (call.overlap_chunks > 1) {
      const auto rows = call.sequence_parallel ? tokens.total() : as_rows(x).sym_size(0);
      const auto chunks = chunks_of(x, rows, call.overlap_chunks);
      if (chunks > 1)
        return call.sequence_parallel ? linear_reduce_scatter(x, weight, group, tokens, chunks)
                                      : linear_all_reduce(x, weight, group, chunks);
    }
    const Tensor partial = products::linear(x, weight);
    return call.sequence_parallel ? comm::reduce_scatter_fresh(partial, group, 0, tokens)
                                  : comm::all_reduce_fresh(partial, group);
  }

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const LinearCall& call) {
    Saved::put(ctx, x, weight, bias.has_value(), call);
    const Unrecorded guard(x);
    Tensor y = summed(x, weight, call);
    if (!bias.has_value()) return y;
    return comm::traced(y) ? at::add(y, *bias) : y.add_(*bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto s = Saved::get(ctx);
    const bool wants_x = ctx->needs_input_grad(0), wants_w = ctx->needs_input_grad(1);
    const bool wants_b = s.has_bias && ctx->needs_input_grad(2);
    if (differentiated(grads[0], s)) return differentiable(grads[0], s, wants_x, wants_w, wants_b);

    const Unrecorded guard(grads[0]);
    std::optional<comm::Pending> dy_full, db;
    Tensor dx, dy = grads[0];
    const bool keeps_dy = s.sequence_parallel && wants_x && asked_later(ctx, 1);
    const auto kept =
        s.sequence_parallel && wants_w && !wants_x ? take_results(ctx, dy) : variable_list();
    if (!kept.empty()) {
      dy = kept[0];
    } else if (s.sequence_parallel) {
      const auto chunks = wants_x ? chunks_of(dy, s.tokens.total(), s.overlap_chunks) : 1;
      if (chunks > 1)
        std::tie(dx, dy) = gather_mm(dy, s.weight, s.group, s.tokens, chunks, wants_w || keeps_dy);
      else if (wants_x || wants_w)
        dy_full.emplace(comm::all_gather_async(dy, s.group, 0, s.tokens));
    }
    // After issuing the gather: it waits for everything queued before it, so db must come later to
    // overlap
    const Tensor db_local = wants_b ? bias_grad(grads[0]) : Tensor();
    if (wants_b && s.sequence_parallel && s.sum_bias_grad)
      db.emplace(comm::all_reduce_async(db_local, s.group));
    if (dy_full) dy = dy_full->wait();
    if (keeps_dy) keep_results(ctx, grads[0], {dy});
    if (wants_x && !dx.defined()) dx = input_grad(dy, s.weight);
    const Tensor dw = wants_w ? accumulate_weight_grad(s, dy, s.x) : Tensor();
    return gradients({dx, dw, db ? db->wait() : db_local});
  }

  static variable_list differentiable(const Tensor& grad, const Saved& s, bool wants_x,
                                      bool wants_w, bool wants_b) {
    const Tensor dy = s.sequence_parallel ? all_gather_region(grad, s.group, 0, s.tokens.sizes)
                                          : copy_to_region(grad, s.group);
    Tensor db = wants_b ? bias_grad(grad) : Tensor();
    if (wants_b && s.sequence_parallel && s.sum_bias_grad) db = reduce_from_region(db, s.group);
    return gradients({wants_x ? at::matmul(dy, s.weight) : Tensor(),
                      wants_w ? weight_grad(dy, s.x) : Tensor(), db});
  }
};

// Without parallelism and main_grad this is torch's own linear, where torch's product is as fast
bool is_plain(int64_t p, const OptionalTensor& main_grad, const Tensor& x, const Tensor& weight,
              const OptionalTensor& bias) {
  return p == 1 && !main_grad.has_value() && !products::differs(x, weight, bias);
}

// Forward mode: composed of regions and torch's linear, which knows the product rule. Regions go
// through the dispatcher, since an input may belong to a level of torch.func further out.
c10::SymIntArrayRef sizes_of(const Split& tokens) { return tokens.sizes; }
Tensor accumulating(const Tensor& weight, const OptionalTensor& main_grad) {
  if (!main_grad.has_value()) return weight;
  return TP_OP(accumulate_grad_into).call(weight, *main_grad);
}

Tensor column_by_regions(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         const LinearCall& call) {
  const Tensor x_full = call.sequence_parallel
                            ? TP_OP(all_gather_region).call(x, call.group, 0, sizes_of(call.tokens))
                            : TP_OP(copy_to_region).call(x, call.group);
  return at::linear(x_full, accumulating(weight, call.main_grad), bias);
}

Tensor row_by_regions(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                      const LinearCall& call) {
  const Tensor partial = at::linear(x, accumulating(weight, call.main_grad));
  const Tensor y =
      call.sequence_parallel
          ? TP_OP(reduce_scatter_region).call(partial, call.group, 0, sizes_of(call.tokens))
          : TP_OP(reduce_from_region).call(partial, call.group);
  if (!bias.has_value()) return y;
  const bool sum = call.sequence_parallel && call.sum_bias_grad;
  return at::add(y, sum ? TP_OP(copy_to_region).call(*bias, call.group) : *bias);
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
  LinearCall call{group, sequence_parallel && p > 1, Split(), main_grad, overlap_chunks};
  if (call.sequence_parallel) call.tokens = split_local(tokens_of(x), comm::rank(group), p, sizes);
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
    const Tensor y = comm::all_reduce_fresh(skinny_linear_cpu(x, weight, std::nullopt), group);
    return bias.has_value() ? y.add_(*bias) : y;
  }
  if (is_plain(p, main_grad, x, weight, bias)) return at::linear(x, weight, bias);
  LinearCall call{group,     sequence_parallel && p > 1, Split(),
                  main_grad, p > 1 ? overlap_chunks : 1, sum_bias_grad};
  if (call.sequence_parallel) call.tokens = split_full(tokens_of(x), p, sizes);
  if (any_tangent(x, weight, bias)) return row_by_regions(x, weight, bias, call);
  return RowLinear::apply(x, weight, bias, call);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<column_parallel_linear>(m, "column_parallel_linear");
  impl_composite<row_parallel_linear>(m, "row_parallel_linear");
}
TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<column_parallel_linear, 0, 1, 2>(m, "column_parallel_linear");
  autocast_to_low_precision<row_parallel_linear, 0, 1, 2>(m, "row_parallel_linear");
}

}  // namespace tp_ext
