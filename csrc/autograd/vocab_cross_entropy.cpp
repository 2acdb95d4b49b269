// Cross entropy of logits whose columns (the vocabulary) are sharded: the loss of the full logits
// on every rank, the gradient of the local columns. Formulas: kernels/vocab_cross_entropy.h.
//
//   forward   four statistics of each row over the local columns, and a row with this rank's width
//             and vocabulary; one all-gather; the loss
//   backward  local: no communication, one read and one write of the logits
//
// Saved: logits, target and the log-sum-exp of each row; no softmax. With inplace_backward the
// gradient overwrites the logits, and a second backward is refused.
//
// [Note: ranks compare width and vocabulary in the exchange of the loss]

#include "autograd/autocast.h"
#include "autograd/blocks.h"
#include "autograd/function.h"
#include "autograd/vocab_loss.h"
#include "check.h"

namespace tp_ext {
namespace {

struct Arguments : VocabLoss {
  std::string reduction;
  bool inplace_backward;
  at::ScalarType loss_dtype = at::kFloat;

  auto fields() {
    return std::tuple_cat(VocabLoss::fields(), std::tie(reduction, inplace_backward));
  }
};

// The loss, and the lse for backward
std::pair<Tensor, Tensor> loss_and_lse(const Tensor& logits, const Tensor& target,
                                       const Arguments& a) {
  auto [loss, lse] = a.rows(a.stats(logits, target), target);
  if (a.reduction == "none") {
    loss = loss.view_symint(target.sym_sizes());
  } else {
    // torch's sum of many rows depends on the number of threads
    loss = !a.blocks.empty() ? column_sums(loss.unsqueeze(1), {{0, 0, 1}}).squeeze(0) : loss.sum();
    if (a.reduction == "mean") loss = loss.div(a.counted_rows(target));
  }
  return {cast(loss, a.loss_dtype), lse};
}

struct CrossEntropy : Function<CrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& target,
                        const Arguments& a) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, lse] = loss_and_lse(logits, target, a);
    ctx->save_for_backward({logits, target, lse});
    put_call(ctx, a);
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
    const auto loss = get_call<Arguments>(ctx);

    Tensor grad = cast(grads[0], lse.scalar_type());
    if (loss.reduction == "mean") grad = grad.div(loss.counted_rows(target));
    grad = loss.reduction == "none" ? grad.reshape_symint({target.sym_numel()})
                                    : grad.expand_symint({target.sym_numel()});

    if (!loss.inplace_backward) return gradients({loss.backward(grad, logits, target, lse)});
    const Tensor dlogits = logits.detach();  // the same memory
    loss.backward_(grad, dlogits, target, lse);
    // Anyone else who saved the logits for backward gets torch's error instead of a wrong gradient
    if (!dlogits.is_inference()) dlogits.unsafeGetTensorImpl()->bump_version();
    data["overwritten"] = true;
    return gradients({dlogits});
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
  a.check(a.reduction);
}

Tensor cross_entropy(const Tensor& logits, const Tensor& target, const Arguments& a) {
  refuse_forward_mode("vocab_parallel_cross_entropy", logits);
  check_arguments(logits, target, a);
  return needs_graph(logits) ? CrossEntropy::apply(logits, target, a)
                             : loss_and_lse(logits, target, a).first;
}

// Under autocast the loss is fp32 like that of torch's cross_entropy. The logits need no cast: the
// arithmetic is fp32 anyway.
template <bool kAutocast>
Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& target,
                                    const std::string& group, SymInt vocab_start,
                                    SymInt vocab_local, SymInt vocab_size, int64_t ignore_index,
                                    double label_smoothing, double z_loss,
                                    const std::string& reduction, bool inplace_backward,
                                    bool vocab_size_given, at::IntArrayRef blocks, Sizes sizes) {
  Arguments args{
      {group, vocab_start, vocab_local, vocab_size, vocab_size_given, ignore_index, label_smoothing,
       z_loss, blocks.vec(), columns_of_ranks(sizes, vocab_size, group)},
      reduction,
      inplace_backward,
      logits.scalar_type()};
  if constexpr (!kAutocast) return cross_entropy(logits, target, args);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (args.loss_dtype != at::kDouble) args.loss_dtype = at::kFloat;
  return cross_entropy(logits, target, args);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  impl_composite<vocab_parallel_cross_entropy<false>>(m, "vocab_parallel_cross_entropy");
  constexpr auto under_autocast = vocab_parallel_cross_entropy<true>;
  impl_autocast<c10::kCPU, under_autocast>(m, "vocab_parallel_cross_entropy");
  impl_autocast<c10::kCUDA, under_autocast>(m, "vocab_parallel_cross_entropy");
}

}  // namespace
}  // namespace tp_ext
