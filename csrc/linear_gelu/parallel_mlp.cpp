// parallel_mlp: the feed-forward block with gelu_tanh as one Function, so that its GEMMs can fuse
// their epilogues: bias and activation in forward, the gradients of activation and bias in
// backward. Letters as in linear.cpp: [..] marks the steps that sequence parallelism (SP) adds.
//
//   forward   h, pre = gelu_tanh(pre), [gather x] W_up^T + b_up
//             y = sum over ranks of h W_down^T, [local rows] + b_down
//   backward  dpre, db_up = (([gather dy] W_down) * gelu_tanh'(pre)), its sums over rows
//             dx = sum over ranks of dpre W_up, [local rows]
//             dW_down = [gather dy]^T h, dW_up = dpre^T [gather x]
//             db_down = sum over rows of dy, [and over ranks]
//
// Communicates the same as the two linears. The sum of dx overlaps the GEMMs of both weights; under
// SP the gather of x overlaps the GEMMs of dpre and dx, and the sum of db_down all of them.
//
// Saved: the input x (the shard), pre, h and the weights, each only if a gradient may need it: as
// many bytes as the three separate operators save. Recomputing h from pre would cost one more pass
// over both. In a backward in two halves (split_backward.h) the first keeps the gathered dy, dpre
// and db_up.

#include <ATen/ops/add.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "autograd/autocast.h"
#include "autograd/function.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"
#include "autograd/main_grad.h"
#include "autograd/split_backward.h"
#include "comm/collectives.h"
#include "operators.h"

namespace tp_ext {
namespace {

// How a call is computed
struct MlpCall {
  std::string group;
  bool sequence_parallel;
  Split tokens;  // under SP: tokens per rank
  OptionalTensor up_main_grad, down_main_grad;
  bool sum_bias_grad;
  bool recorded;  // whether there will be a backward
};

void check_mlp(const Tensor& x, const Tensor& up_weight, const Tensor& up_bias,
               const Tensor& down_weight, const Tensor& down_bias,
               const OptionalTensor& up_main_grad, const OptionalTensor& down_main_grad) {
  check_linear(x, up_weight, up_bias, up_main_grad, 1);
  TORCH_CHECK_VALUE(down_weight.dim() == 2 && down_weight.sym_size(1) == up_weight.sym_size(0),
                    "down_weight: shape ", down_weight.sym_sizes(), " must have as many columns as",
                    " up_weight has rows on this rank, ", up_weight.sym_size(0));
  check_same_dtype(down_weight, "down_weight", x, "x");
  check_same_device(down_weight, "down_weight", x, "x");
  check_main_grad(down_main_grad, down_weight);
  TORCH_CHECK_VALUE(down_bias.dim() == 1 && down_bias.sym_size(0) == down_weight.sym_size(0),
                    "down_bias: shape ", down_bias.sym_sizes(), " must be the ",
                    down_weight.sym_size(0), " output features of down_weight");
  check_same_dtype(down_bias, "down_bias", x, "x");
}

std::tuple<Tensor, Tensor> linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                       bool keep_pre) {
  static const auto op = TP_OP(_linear_gelu_fwd);
  return op.call(x, weight, bias, keep_pre);
}

std::tuple<Tensor, Tensor> linear_dgelu(const Tensor& dy, const Tensor& weight, const Tensor& pre) {
  static const auto op = TP_OP(_linear_dgelu_bwd);
  return op.call(dy, weight, pre);
}

// dy^T x, the gradient of input i, or what autograd gets in its place if it is added to main_grad
Tensor weight_grad(AutogradContext* ctx, size_t i, const char* main_grad, const Tensor& dy,
                   const Tensor& x) {
  const auto found = ctx->saved_data.find(main_grad);
  if (found == ctx->saved_data.end()) return at::mm(as_rows(dy).t(), as_rows(x));
  const Tensor sum = found->second.toTensor();
  add_weight_grad(sum, as_rows(dy), as_rows(x));
  return placeholder_grad(sum, dy, i);
}

// [Note: GEMM epilogues belong to a block]
struct ParallelMlp : Function<ParallelMlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& up_weight,
                        const Tensor& up_bias, const Tensor& down_weight, const Tensor& down_bias,
                        const MlpCall& call) {
    const Unrecorded guard(x);
    const auto& [group, sequence_parallel, tokens, up_main_grad, down_main_grad, sum_bias_grad,
                 recorded] = call;
    const bool needs_pre =
        recorded && (x.requires_grad() || up_weight.requires_grad() || up_bias.requires_grad());
    const bool needs_h = recorded && down_weight.requires_grad();
    const auto [h, pre] = linear_gelu(sequence_parallel ? comm::all_gather(x, group, 0, tokens) : x,
                                      up_weight, up_bias, needs_pre);
    const auto kept = [](const Tensor& t, bool needed) { return needed ? t : Tensor(); };
    ctx->save_for_backward({kept(x, recorded && up_weight.requires_grad()),
                            kept(up_weight, recorded && x.requires_grad()), kept(pre, needs_pre),
                            kept(h, needs_h), kept(down_weight, needs_pre)});
    auto& data = ctx->saved_data;
    data["group"] = group;
    if (sequence_parallel) data["tokens"] = c10::SymIntArrayRef(tokens.sizes);
    if (!sum_bias_grad) data["caller_sums_bias_grad"] = true;
    // Not saved as variables: they are written between forward and backward, in every microbatch
    if (up_main_grad.has_value()) data["up_main_grad"] = *up_main_grad;
    if (down_main_grad.has_value()) data["down_main_grad"] = *down_main_grad;

    const Tensor partial = at::linear(h, down_weight);
    Tensor y = sequence_parallel ? comm::reduce_scatter_fresh(partial, group, 0, tokens)
                                 : comm::all_reduce_fresh(partial, group);
    return comm::traced(y) ? at::add(y, down_bias) : y.add_(down_bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("parallel_mlp (gemm_epilogue)", grads);
    const Unrecorded guard(grads[0]);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &up_weight = saved[1], &pre = saved[2], &h = saved[3],
                 &down_weight = saved[4];
    const auto& data = ctx->saved_data;
    const auto& group = data.find("group")->second.toStringRef();
    const auto found = data.find("tokens");
    const bool sequence_parallel = found != data.end();
    const Split tokens = sequence_parallel ? Split{found->second.toSymIntVector()} : Split();
    const bool wants_x = ctx->needs_input_grad(0), wants_up = ctx->needs_input_grad(1);
    const bool wants_up_bias = ctx->needs_input_grad(2), wants_down = ctx->needs_input_grad(3);
    const bool wants_down_bias = ctx->needs_input_grad(4);
    const bool wants_pre = wants_x || wants_up || wants_up_bias;
    const bool up_later = wants_x && asked_later(ctx, 1),
               down_later = wants_x && asked_later(ctx, 3);
    const bool up_bias_later = wants_x && asked_later(ctx, 2);

    Tensor dy = grads[0], dx, dpre, up_bias_grad, down_bias_grad;
    std::optional<comm::Pending> dy_full, x_full, dx_sum, bias_sum;
    const auto kept = wants_x ? variable_list() : take_results(ctx, dy);
    const bool complete =
        !kept.empty() && (!wants_down || kept[0].defined()) && (!wants_up || kept[1].defined());
    if (complete) {
      std::tie(dy, dpre, up_bias_grad) = std::tie(kept[0], kept[1], kept[2]);
    } else if (sequence_parallel && (wants_pre || wants_down)) {
      dy_full.emplace(comm::all_gather_async(dy, group, 0, tokens));
    }
    // A collective waits for everything queued before it: the order below is the one that overlaps
    if (sequence_parallel && wants_up) x_full.emplace(comm::all_gather_async(x, group, 0, tokens));
    if (wants_down_bias) down_bias_grad = as_rows(grads[0]).sum(0);
    if (wants_down_bias && sequence_parallel && data.count("caller_sums_bias_grad") == 0)
      bias_sum.emplace(comm::all_reduce_async(down_bias_grad, group));
    if (dy_full) dy = dy_full->wait();
    if (wants_pre && !complete) std::tie(dpre, up_bias_grad) = linear_dgelu(dy, down_weight, pre);
    if (up_later || down_later || up_bias_later)
      keep_results(ctx, grads[0],
                   {down_later ? dy : Tensor(), up_later ? dpre : Tensor(), up_bias_grad});
    if (wants_x) {
      auto shape = dpre.sym_sizes().vec();
      shape.back() = up_weight.sym_size(1);
      const Tensor partial = at::mm(as_rows(dpre), up_weight).view_symint(shape);
      dx_sum.emplace(sequence_parallel ? comm::reduce_scatter_async(partial, group, 0, tokens)
                                       : comm::all_reduce_async(partial, group));
    }
    variable_list result = gradients();
    if (wants_down) result[3] = weight_grad(ctx, 3, "down_main_grad", dy, h);
    if (wants_up)
      result[1] = weight_grad(ctx, 1, "up_main_grad", dpre, x_full ? x_full->wait() : x);
    if (dx_sum) result[0] = dx_sum->wait();
    if (wants_up_bias) result[2] = up_bias_grad;
    if (wants_down_bias) result[4] = bias_sum ? bias_sum->wait() : down_bias_grad;
    return result;
  }
};

}  // namespace

Tensor parallel_mlp(const Tensor& x, const Tensor& up_weight, const Tensor& up_bias,
                    const Tensor& down_weight, const Tensor& down_bias, const std::string& group,
                    bool sequence_parallel, Sizes sizes, const OptionalTensor& up_main_grad,
                    const OptionalTensor& down_main_grad, bool sum_bias_grad) {
  refuse_forward_mode("parallel_mlp", x, up_weight, up_bias, down_weight, down_bias);
  check_mlp(x, up_weight, up_bias, down_weight, down_bias, up_main_grad, down_main_grad);
  const int64_t p = comm::size(group);
  MlpCall call{group,         sequence_parallel && p > 1, Split(), up_main_grad, down_main_grad,
               sum_bias_grad, at::GradMode::is_enabled()};
  if (call.sequence_parallel) call.tokens = split_local(tokens_of(x), comm::rank(group), p, sizes);
  return ParallelMlp::apply(x, up_weight, up_bias, down_weight, down_bias, call);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<parallel_mlp>(m, "parallel_mlp");
}
TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<parallel_mlp, 0, 1, 2, 3, 4>(m, "parallel_mlp");
}

}  // namespace tp_ext
