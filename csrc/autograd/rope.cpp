// Rotary embedding: forward rotates each pair of x by the angles of its token; backward rotates the
// gradient by the negative angles through the same Function, so it is differentiable any number of
// times; in forward mode the tangent of x is rotated like x. Saved: cos, sin and positions, which
// are constants without a gradient. x [tokens, heads, head_dim] or [batch, seq, heads, head_dim],
// cos and sin [positions, rotary_dim / 2], positions one per token; without them token t of a
// sequence uses row t.

#include "autograd/function.h"
#include "operators.h"

namespace tp_ext {
namespace {

struct Rope : Function<Rope> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin,
                        bool interleaved, bool inverse, const OptionalTensor& positions) {
    static const auto op = TP_OP(_rope);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({cos, sin, positions.value_or(Tensor())});
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["inverse"] = inverse;
    return op.call(x, cos, sin, interleaved, inverse, positions);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!ctx->needs_input_grad(0) || !grads[0].defined()) return gradients();
    const auto saved = ctx->get_saved_variables();
    return gradients({apply(grads[0], saved[0], saved[1], ctx->saved_data["interleaved"].toBool(),
                            !ctx->saved_data["inverse"].toBool(), optional(saved[2]))});
  }
};

}  // namespace

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
            const OptionalTensor& positions) {
  refuse_forward_mode("rope: the table of angles", cos, sin);
  if (has_tangent(x)) return on_dual(TP_OP(rope), x, cos, sin, interleaved, positions);
  return Rope::apply(x, cos.detach(), sin.detach(), interleaved, false, positions);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) { impl_composite<rope>(m, "rope"); }

}  // namespace tp_ext
