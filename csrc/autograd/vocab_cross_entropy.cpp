// Cross entropy of logits whose columns (the vocabulary) are sharded: the loss of the full logits
// on every rank, the gradient of the local columns. Formulas: kernels/vocab_cross_entropy.h.
//
//   forward   four statistics of each row over the local columns, and a row with this rank's width
//             and vocabulary; one all-gather; the loss
//   backward  local: no communication, one read and one write of the logits
//
// Saved: logits, target and the log-sum-exp of each row; no softmax. With inplace_backward the
// gradient overwrites the logits, and a second backward is refused.

#include <ATen/ops/ne.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "autograd/differentiation.h"
#include "check.h"
#include "comm/collectives.h"
#include "operators.h"

namespace tp_ext {
namespace {

using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Arguments {
  std::string group;
  SymInt vocab_start, vocab_local, vocab_size;
  bool vocab_size_given;
  int64_t ignore_index;
  double label_smoothing, z_loss;
  std::string reduction;
  bool inplace_backward;
  at::ScalarType loss_dtype;

  void put(AutogradContext* ctx) const {
    ctx->saved_data["vocab_start"] = vocab_start;
    ctx->saved_data["vocab_local"] = vocab_local;
    ctx->saved_data["vocab_size"] = vocab_size;
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["z_loss"] = z_loss;
    ctx->saved_data["reduction"] = reduction;
    ctx->saved_data["inplace_backward"] = inplace_backward;
  }
};

// With several ranks an extra row holds each rank's width and vocabulary: no rank can check those
// alone, so _vocab_ce_loss does, once all rows are gathered
Tensor local_stats(const Tensor& logits, const Tensor& target, const Arguments& a) {
  static const auto op = TP_OP(_vocab_ce_stats);
  return op.call(logits, target, a.vocab_start, a.vocab_local, a.vocab_size, a.ignore_index,
                 comm::size(a.group) > 1, a.vocab_size_given);
}

std::tuple<Tensor, Tensor> row_losses(const Tensor& stats, const Tensor& target,
                                      const Arguments& a) {
  static const auto op = TP_OP(_vocab_ce_loss);
  return op.call(stats, target, a.vocab_size, a.ignore_index, a.label_smoothing, a.z_loss);
}

// Below the dispatcher's autograd layers `to` may return its argument, which operators must not
Tensor cast(const Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype ? x : x.to(dtype);
}

// The number of rows that the mean is over; 1 if there is none, so that the mean is the sum, 0
Tensor counted_rows(const Tensor& target, int64_t ignore_index) {
  return target.ne(ignore_index).sum().clamp_min(1);
}

// The loss, and the lse for backward
std::pair<Tensor, Tensor> loss_and_lse(const Tensor& logits, const Tensor& target,
                                       const Arguments& a) {
  const Tensor stats = comm::all_gather_stack(local_stats(logits, target, a), a.group);
  auto [loss, lse] = row_losses(stats, target, a);
  if (a.reduction == "none") {
    loss = loss.view_symint(target.sym_sizes());
  } else {
    loss = loss.sum();
    if (a.reduction == "mean") loss = loss.div(counted_rows(target, a.ignore_index));
  }
  return {cast(loss, a.loss_dtype), lse};
}

struct CrossEntropy : Function<CrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                        const Arguments& a) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, lse] = loss_and_lse(logits, target, a);
    ctx->save_for_backward({logits, target, lse});
    a.put(ctx);
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("vocab_parallel_cross_entropy", grads);
    auto& data = ctx->saved_data;
    TORCH_CHECK(data.count("overwritten") == 0,
                "vocab_parallel_cross_entropy: a second backward through a loss with "
                "inplace_backward=True: the first one has put the gradient in the place of the "
                "logits; use inplace_backward=False to go through it twice");
    const auto saved = ctx->get_saved_variables();
    const Tensor &logits = saved[0], &target = saved[1], &lse = saved[2];
    const int64_t ignore_index = data["ignore_index"].toInt();
    const auto reduction = data["reduction"].toStringRef();

    Tensor grad = cast(grads[0], lse.scalar_type());
    if (reduction == "mean") grad = grad.div(counted_rows(target, ignore_index));
    grad = reduction == "none" ? grad.reshape_symint({target.sym_numel()})
                               : grad.expand_symint({target.sym_numel()});

    const auto call = [&](const auto& op, auto& x) {
      return op.call(grad, x, target, lse, data["vocab_start"].toSymInt(),
                     data["vocab_local"].toSymInt(), data["vocab_size"].toSymInt(), ignore_index,
                     data["label_smoothing"].toDouble(), data["z_loss"].toDouble());
    };
    if (!data["inplace_backward"].toBool()) {
      static const auto op = TP_OP(_vocab_ce_bwd);
      return {call(op, logits), Tensor(), Tensor()};
    }
    static const auto op = TP_OP(_vocab_ce_bwd_);
    const Tensor dlogits = logits.detach();  // the same memory
    call(op, dlogits);
    // Anyone else who saved the logits for backward gets torch's error instead of a wrong gradient
    if (!dlogits.is_inference()) dlogits.unsafeGetTensorImpl()->bump_version();
    data["overwritten"] = true;
    return {dlogits, Tensor(), Tensor()};
  }
};

void check_arguments(const Tensor& logits, const Tensor& target, const Arguments& a) {
  check_floating(logits, "logits");
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, "target: dtype ", target.scalar_type(),
                   " must be int64");
  TORCH_CHECK_VALUE(
      logits.dim() >= 1 && target.sym_sizes() == logits.sym_sizes().slice(0, logits.dim() - 1),
      "target: shape ", target.sym_sizes(), " must be that of logits, ", logits.sym_sizes(),
      ", without the last dim");
  TORCH_CHECK_VALUE(a.reduction == "none" || a.reduction == "mean" || a.reduction == "sum",
                    "reduction: '", a.reduction, "' must be 'none', 'mean' or 'sum'");
  TORCH_CHECK_VALUE(a.label_smoothing >= 0 && a.label_smoothing <= 1,
                    "label_smoothing: ", a.label_smoothing, " must be in [0, 1]");
  TORCH_CHECK_VALUE(a.z_loss >= 0, "z_loss: ", a.z_loss, " must be at least 0");
}

Tensor cross_entropy(const Tensor& logits, const Tensor& target, const Arguments& a) {
  refuse_forward_mode("vocab_parallel_cross_entropy", logits);
  check_arguments(logits, target, a);
  return needs_graph(logits) ? CrossEntropy::apply(logits, target, a)
                             : loss_and_lse(logits, target, a).first;
}

Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& target,
                                    const std::string& group, SymInt vocab_start,
                                    SymInt vocab_local, SymInt vocab_size, int64_t ignore_index,
                                    double label_smoothing, double z_loss,
                                    const std::string& reduction, bool inplace_backward,
                                    bool vocab_size_given) {
  return cross_entropy(
      logits, target,
      {group, vocab_start, vocab_local, vocab_size, vocab_size_given, ignore_index, label_smoothing,
       z_loss, reduction, inplace_backward, logits.scalar_type()});
}

// The loss is fp32 like that of torch's cross_entropy. The logits need no cast: the arithmetic is
// fp32 anyway.
Tensor vocab_parallel_cross_entropy_autocast(const Tensor& logits, const Tensor& target,
                                             const std::string& group, SymInt vocab_start,
                                             SymInt vocab_local, SymInt vocab_size,
                                             int64_t ignore_index, double label_smoothing,
                                             double z_loss, const std::string& reduction,
                                             bool inplace_backward, bool vocab_size_given) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto loss_dtype = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return cross_entropy(logits, target,
                       {group, vocab_start, vocab_local, vocab_size, vocab_size_given, ignore_index,
                        label_smoothing, z_loss, reduction, inplace_backward, loss_dtype});
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<vocab_parallel_cross_entropy>(m, "vocab_parallel_cross_entropy");
}
TORCH_LIBRARY_IMPL(tp_ext, AutocastCPU, m) {
  impl_composite<vocab_parallel_cross_entropy_autocast>(m, "vocab_parallel_cross_entropy");
}
TORCH_LIBRARY_IMPL(tp_ext, AutocastCUDA, m) {
  impl_composite<vocab_parallel_cross_entropy_autocast>(m, "vocab_parallel_cross_entropy");
}

}  // namespace
}  // namespace tp_ext
