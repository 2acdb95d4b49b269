// bias_act and gated_act: autograd over the fused kernels. Saved: x and bias; backward recomputes
// the rest. Its one kernel makes the gradients of x and bias; in a backward in two halves
// (split_backward.h) the first keeps the bias's. Under autocast the dtype follows x, the output of
// a linear layer; only the bias, an fp32 parameter, is cast to it.

#include "autograd/autocast.h"
#include "autograd/function.h"
#include "autograd/split_backward.h"
#include "check.h"
#include "operators.h"

namespace tp_ext {
namespace {

struct BiasAct {
  static constexpr const char* kName = "bias_act";
  static const auto& forward() {
    static const auto op = TP_OP(_bias_act_fwd);
    return op;
  }
  static const auto& backward() {
    static const auto op = TP_OP(_bias_act_bwd);
    return op;
  }
  static const auto& composite() {
    static const auto op = TP_OP(bias_act);
    return op;
  }
};

struct GatedAct {
  static constexpr const char* kName = "gated_act";
  static const auto& forward() {
    static const auto op = TP_OP(_gated_act_fwd);
    return op;
  }
  static const auto& backward() {
    static const auto op = TP_OP(_gated_act_bwd);
    return op;
  }
  static const auto& composite() {
    static const auto op = TP_OP(gated_act);
    return op;
  }
};

template <typename Op>
struct Activation : Function<Activation<Op>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& bias,
                        const std::string& activation) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, bias.value_or(Tensor())});
    ctx->saved_data["activation"] = activation;
    return Op::forward().call(x, bias, activation);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(Op::kName, grads);
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& bias = saved[1];
    // needs_input_grad counts defined tensors only: x is 0, bias is 1
    const bool give_dx = ctx->needs_input_grad(0);
    const bool give_dbias = bias.defined() && ctx->needs_input_grad(1);
    if (!give_dx)
      if (const auto kept = take_results(ctx, grads[0]); !kept.empty())
        return gradients({Tensor(), kept[0]});
    auto [dx, dbias] = Op::backward().call(grads[0], saved[0], optional(bias),
                                           ctx->saved_data["activation"].toStringRef());
    if (give_dx && bias.defined() && asked_later(ctx, 1)) keep_results(ctx, grads[0], {dbias});
    return gradients({give_dx ? dx : Tensor(), give_dbias ? dbias : Tensor()});
  }
};

template <typename Op>
Tensor composite(const Tensor& x, const OptionalTensor& bias, std::string_view activation) {
  refuse_forward_mode(Op::kName, x, bias);
  return Activation<Op>::apply(x, bias, std::string(activation));
}

template <typename Op, at::DeviceType device>
Tensor autocast(const Tensor& x, const OptionalTensor& bias, std::string_view activation) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey<device>);
  return Op::composite().call(x, at::autocast::cached_cast(x.scalar_type(), bias, device),
                              activation);
}

}  // namespace

Tensor bias_act(const Tensor& x, const OptionalTensor& bias, std::string_view activation) {
  return composite<BiasAct>(x, bias, activation);
}

Tensor gated_act(const Tensor& x, const OptionalTensor& bias, std::string_view activation) {
  return composite<GatedAct>(x, bias, activation);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<bias_act>(m, "bias_act");
  impl_composite<gated_act>(m, "gated_act");
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  impl_autocast<c10::kCPU, autocast<BiasAct, c10::kCPU>>(m, "bias_act");
  impl_autocast<c10::kCUDA, autocast<BiasAct, c10::kCUDA>>(m, "bias_act");
  impl_autocast<c10::kCPU, autocast<GatedAct, c10::kCPU>>(m, "gated_act");
  impl_autocast<c10::kCUDA, autocast<GatedAct, c10::kCUDA>>(m, "gated_act");
}

}  // namespace tp_ext
