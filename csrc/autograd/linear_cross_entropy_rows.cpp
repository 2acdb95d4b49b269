// linear_cross_entropy without a reduction, or with entropies: the upstream gradients, one a token,
// are known in backward only, which computes the logits again, four GEMMs. Saved: x, w, b, lse.

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "autograd/function.h"
#include "autograd/linear_cross_entropy.h"
#include "autograd/linear_cross_entropy_grads.h"
#include "autograd/main_grad.h"

namespace tp_ext {
namespace {

// The logarithms of the probabilities of this rank's columns, in the dtype of lse
Tensor log_probabilities(const Tensor& logits, const Tensor& lse, const LinearLoss& call) {
  const Tensor own = logits.narrow_symint(1, 0, call.vocab_local);
  return cast(own, lse.scalar_type()).sub(lse.narrow(1, 0, 1)).sub(lse.narrow(1, 1, 1));
}
// p (log p + entropy), 0 where p is: a masked column has log p = -inf
Tensor times_probability(const Tensor& log_p, const Tensor& entropy) {
  return log_p.exp().mul(
      log_p.clamp_min(std::numeric_limits<float>::lowest()).add(entropy.unsqueeze(1)));
}
// This rank's part of -sum p log p
Tensor entropies(const Tensor& logits, const Tensor& lse, const LinearLoss& call) {
  const Tensor log_p = log_probabilities(logits, lse, call);
  return times_probability(log_p, lse.new_zeros_symint({lse.sym_size(0)})).sum(1).neg();
}

// d entropy / d logits_j = -p_j (log p_j + entropy)
Tensor add_entropy_grad(const Tensor& dlogits, const Tensor& logits, const Tensor& lse,
                        const Tensor& entropy, const Tensor& grad, const LinearLoss& call) {
  Tensor own =
      times_probability(log_probabilities(logits, lse, call), entropy).mul(grad.unsqueeze(1));
  const auto padding = logits.sym_size(1) - call.vocab_local;
  if (padding != 0) own = at::constant_pad_nd_symint(own, {0, padding}, 0);
  return cast(cast(dlogits, own.scalar_type()).sub(own), dlogits.scalar_type());
}

struct RowResults {
  Tensor losses, lse, entropies;
};

// Losses and what backward needs of each row, without gradients. One exchange; with entropies,
// which need lse while the logits exist, one a chunk and one of the sums.
RowResults row_results(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& target, const LinearLoss& call) {
  LogitsChunks chunks(x, weight, bias, call);
  Collected stats(chunks.rows(), chunks.traced), entropy = stats, losses = stats, lse = stats;
  Tensor shard_row;
  chunks.each([&](const TokenChunk& chunk, const Tensor&, const Tensor& logits) {
    const Tensor targets = rows_in(target, chunk), own = call.stats(logits, targets);
    if (!call.entropy) {
      const auto rows = targets.sym_size(0);
      stats.put(own.narrow_symint(0, 0, rows), chunk);
      shard_row = own.narrow_symint(0, rows, own.sym_size(0) - rows);
      return;
    }
    const auto [loss_c, lse_c] = call.rows(own, targets);
    losses.put(loss_c, chunk);
    lse.put(lse_c, chunk);
    entropy.put(entropies(logits, lse_c, call), chunk);
  });
  if (!call.entropy) {
    auto [loss, log_sums] = call.rows(at::cat({stats.all(), shard_row}), target);
    return {loss, log_sums, Tensor()};
  }
  const Tensor sum = comm::all_reduce_fresh(entropy.all(), call.group);
  const Tensor kept = target.ne(call.ignore_index);
  return {losses.all(), lse.all(), at::where(kept, sum, at::zeros({}, sum.options()))};
}

struct RowLosses : Function<RowLosses> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& target,
                               const LinearLoss& call) {
    const Unrecorded guard(comm::traced(x));
    const auto results = row_results(x, weight, bias, target, call);
    ctx->save_for_backward(
        {x, weight, bias.value_or(Tensor()), target, results.lse, results.entropies});
    put_call(ctx, call);
    if (!call.entropy) return {results.losses};
    return {results.losses, results.entropies};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    refuse_double_backward("linear_cross_entropy", upstream);
    const auto saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &target = saved[3], &lse = saved[4];
    const OptionalTensor bias = optional(saved[2]);
    const auto call = get_call<LinearLoss>(ctx);
    const bool traced = comm::traced(x);
    const bool wants_w = ctx->needs_input_grad(1);
    const Unrecorded guard(traced);
    LogitsChunks chunks(x, weight, bias, call);
    LinearLossGrads grads(x, weight, call, traced, ctx->needs_input_grad(0), wants_w,
                          bias.has_value() && ctx->needs_input_grad(2), call.main_grad);
    Tensor grad_entropy;
    if (call.entropy) {
      const Tensor kept = target.ne(call.ignore_index);
      grad_entropy = at::where(kept, upstream[1], at::zeros({}, upstream[1].options()));
    }
    chunks.each([&](const TokenChunk& chunk, const Tensor& x_chunk, const Tensor& logits) {
      const Tensor targets = rows_in(target, chunk), log_sums = rows_in(lse, chunk);
      const Tensor grad = rows_in(upstream[0], chunk);
      Tensor dlogits = logits;
      if (traced || call.entropy)
        dlogits = call.backward(grad, logits, targets, log_sums);
      else
        call.backward_(grad, logits, targets, log_sums);
      if (call.entropy)
        dlogits = add_entropy_grad(dlogits, logits, log_sums, rows_in(saved[5], chunk),
                                   rows_in(grad_entropy, chunk), call);
      grads.add(chunk, x_chunk, dlogits);
    });
    grads.finish();
    const auto dtype = x.scalar_type();
    variable_list result = gradients();
    result[0] = grads.dx;
    if (grads.dw.defined()) result[1] = cast(grads.dw, dtype);
    if (wants_w && call.main_grad.has_value())
      result[1] = placeholder_grad(*call.main_grad, cast(upstream[0], dtype), 1);
    if (grads.db.defined()) result[2] = cast(grads.db, dtype);
    return result;
  }
};

}  // namespace

std::pair<Tensor, Tensor> row_losses(const Tensor& x, const Tensor& weight,
                                     const OptionalTensor& bias, const Tensor& target,
                                     const LinearLoss& call, bool graph) {
  if (!graph) {
    const auto results = row_results(x, weight, bias, target, call);
    return {results.losses, results.entropies};
  }
  const auto results = RowLosses::apply(x, weight, bias, target, call);
  return {results[0], call.entropy ? results[1] : Tensor()};
}

}  // namespace tp_ext
