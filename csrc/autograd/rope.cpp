// Rotary embedding: forward turns each pair of x by the angles of its token; backward turns the
// gradient by the negative angles, through the same Function, so it is differentiable any number of
// times. Saved: cos and sin, which are constants and get no gradient.
// x [tokens, heads, head_dim], cos and sin [tokens, rotary_dim / 2].

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops.h"

namespace tp_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Rope : Function<Rope> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin,
                        bool interleaved, bool inverse) {
    static const auto op =
        find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, bool, bool)>("tp_ext::_rope");
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["inverse"] = inverse;
    return op.call(x, cos, sin, interleaved, inverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!ctx->needs_input_grad(0) || !grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    return {apply(grads[0], saved[0], saved[1], ctx->saved_data["interleaved"].toBool(),
                  !ctx->saved_data["inverse"].toBool()),
            Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  return Rope::apply(x, cos.detach(), sin.detach(), interleaved, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) { m.impl("rope", rope); }

}  // namespace tp_ext
