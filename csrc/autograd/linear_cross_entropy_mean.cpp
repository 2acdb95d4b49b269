// linear_cross_entropy with a mean or a sum: the upstream gradient is one number, so forward
// computes the gradients for an upstream gradient of 1 while it has the logits, three GEMMs in all;
// backward scales them. Saved: dx, dw, db. Backward does not write to what it saved, so it can run
// again.

#include <ATen/ops/addcmul.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/graph_task.h>

#include "autograd/function.h"
#include "autograd/linear_cross_entropy.h"
#include "autograd/linear_cross_entropy_grads.h"
#include "autograd/main_grad.h"

namespace tp_ext {
namespace {

// Gradients of fp16 logits are computed times this: probabilities of 1e-6 are subnormal numbers
constexpr double kFp16Scale = 256;

// Of a 0-d tensor on the CPU, of fp32 or fp64
bool is_one(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? *t.const_data_ptr<double>() == 1
                                        : *t.const_data_ptr<float>() == 1;
}

struct MeanLoss : Function<MeanLoss> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const Tensor& target, const LinearLoss& call) {
    const bool wants_x = x.requires_grad(), wants_w = weight.requires_grad();
    const bool wants_b = bias.has_value() && bias->requires_grad(), traced = comm::traced(x);
    const Unrecorded guard(traced);
    LogitsChunks chunks(x, weight, bias, call);
    LinearLossGrads grads(x, weight, call, traced, wants_x, wants_w, wants_b, std::nullopt);
    Collected losses(chunks.rows(), traced);
    const auto dtype = sum_dtype(x);
    const bool fp16 = x.scalar_type() == at::kHalf;
    const Tensor one = at::full({}, 1, x.options().dtype(dtype));
    Tensor unit = call.reduction == "mean" ? one.div(call.counted_rows(target)) : one, factor;
    if (fp16) std::tie(unit, factor) = std::pair(one.mul(kFp16Scale), unit.div(kFp16Scale));
    chunks.each([&](const TokenChunk& chunk, const Tensor& x_chunk, const Tensor& logits) {
      const Tensor targets = rows_in(target, chunk);
      const auto [loss, lse] = call.rows(call.stats(logits, targets), targets);
      losses.put(loss, chunk);
      const Tensor grad = unit.expand_symint({targets.sym_size(0)});
      Tensor dlogits = logits;
      if (traced)
        dlogits = call.backward(grad, logits, targets, lse);
      else
        call.backward_(grad, logits, targets, lse);
      grads.add(chunk, x_chunk, dlogits);
    });
    grads.finish();
    ctx->save_for_backward({grads.dx, grads.dw, grads.db, factor});
    auto& data = ctx->saved_data;
    data["dtype"] = static_cast<int64_t>(x.scalar_type());
    if (call.main_grad.has_value()) data["main_grad"] = *call.main_grad;
    const Tensor sum = losses.all().sum();
    return cast(call.reduction == "mean" ? sum.div(call.counted_rows(target)) : sum,
                call.loss_dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    refuse_double_backward("linear_cross_entropy", upstream);
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const auto dtype = static_cast<at::ScalarType>(data["dtype"].toInt());
    const bool traced = comm::traced(upstream[0]);
    const Unrecorded guard(traced);
    Tensor scale = cast(upstream[0], dtype == at::kDouble ? at::kDouble : at::kFloat);
    if (saved[3].defined()) scale = scale.mul(saved[3]);
    // What is returned may be written to, and what is saved must not be if backward can come again
    const bool as_saved = !traced && scale.device().is_cpu() &&
                          !torch::autograd::get_current_graph_task_keep_graph() && is_one(scale);
    const auto scaled = [&](const Tensor& saved_grad) {
      const auto from = cast(saved_grad, scale.scalar_type());
      return cast(as_saved ? from : from.mul(scale), dtype);
    };
    variable_list grads = gradients();
    if (saved[0].defined() && ctx->needs_input_grad(0)) grads[0] = scaled(saved[0]);
    if (saved[1].defined() && ctx->needs_input_grad(1)) {
      if (data.count("main_grad") > 0) {
        const Tensor main_grad = data["main_grad"].toTensor();
        const auto to = main_grad.scalar_type();
        main_grad.addcmul_(cast(saved[1], to), cast(scale, to));
        grads[1] = placeholder_grad(main_grad, cast(upstream[0], dtype), 1);
      } else {
        grads[1] = scaled(saved[1]);
      }
    }
    if (saved[2].defined() && ctx->needs_input_grad(2)) grads[2] = scaled(saved[2]);
    return grads;
  }
};

}  // namespace

Tensor mean_loss(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const Tensor& target, const LinearLoss& call) {
  return MeanLoss::apply(x, weight, bias, target, call);
}

}  // namespace tp_ext
