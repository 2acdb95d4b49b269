// Questions that autograd asks about one call of a public operator:
//
//   has_tangent  forward mode: the input is dual. A linear operator acts on primal and tangent
//                alike (on_dual); an operator without a forward-mode derivative raises by name.
//   needs_graph  reverse mode: the call is recorded. Also true of a dual tensor: an operator that
//                forgets the first question is refused by Function::apply and drops no tangent.
//
// At a level of torch.func (grad, jvp) the inputs are wrappers, and the same questions apply to
// them. A call that the level does not differentiate goes on whole to the next level (composite),
// so that a collective stays one operation on every level, and the last one communicates plain
// tensors.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "types.h"

namespace tp_ext {

// Whether x is a dual tensor with a tangent. Without one it reads two fields only: fw_grad() takes
// a lock.
inline bool has_tangent(const Tensor& x) {
  const auto* meta =
      static_cast<const torch::autograd::AutogradMeta*>(x.unsafeGetTensorImpl()->autograd_meta());
  return meta != nullptr && (meta->fw_grad_ || meta->is_view_) && x._fw_grad(0).defined();
}
inline bool has_tangent(const OptionalTensor& x) { return x.has_value() && has_tangent(*x); }
template <typename... Tensors>
bool any_tangent(const Tensors&... xs) {
  return (has_tangent(xs) || ...);
}

inline bool needs_graph(const Tensor& x) {
  return has_tangent(x) || (at::GradMode::is_enabled() && x.requires_grad());
}

// Whether `holds` is true of any tensor argument
template <typename Predicate>
bool is_any(const Predicate& holds, const Tensor& x) {
  return holds(x);
}
template <typename Predicate>
bool is_any(const Predicate& holds, const OptionalTensor& x) {
  return x.has_value() && holds(*x);
}
template <typename Predicate>
bool is_any(const Predicate& holds, const at::TensorList& xs) {
  return std::any_of(xs.begin(), xs.end(), holds);
}
template <typename Predicate, typename Other>
bool is_any(const Predicate&, const Other&) {
  return false;
}

// A composite operator at the levels of torch.func: `kernel` where a tensor is differentiated or
// none is a wrapper, otherwise the operator at the next level
template <auto kernel>
struct Composite;
template <typename Result, typename... Args, Result (*kernel)(Args...)>
struct Composite<kernel> {
  static inline const char* name = nullptr;

  static Result call(Args... args) {
    const auto is_wrapper = [](const Tensor& x) {
      return x.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
    };
    if (C10_UNLIKELY((is_any(is_wrapper, args) || ...)) && !(is_any(needs_graph, args) || ...)) {
      const c10::impl::ExcludeDispatchKeyGuard next_level(
          c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
      return find_op<Result(Args...)>(("tp_ext::" + std::string(name)).c_str())
          .call(std::forward<Args>(args)...);
    }
    return kernel(std::forward<Args>(args)...);
  }
};

// Registers a public operator; m.impl registers a primitive
template <auto kernel>
void impl_composite(torch::Library& m, const char* name) {
  Composite<kernel>::name = name;
  m.impl(name,
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &Composite<kernel>::call));
}

inline Tensor primal_of(const Tensor& x) { return has_tangent(x) ? x._fw_primal(0) : x; }
inline OptionalTensor primal_of(const OptionalTensor& x) {
  return x.has_value() ? OptionalTensor(primal_of(*x)) : x;
}

// A tangent that can be communicated: zeros for a missing one and for torch's ZeroTensor, which has
// no memory
inline Tensor tangent_of(const Tensor& x) {
  const Tensor tangent = has_tangent(x) ? x._fw_grad(0) : Tensor();
  return tangent.defined() && !tangent._is_zerotensor() ? tangent : at::zeros_like(primal_of(x));
}

inline Tensor make_dual(const Tensor& primal, const Tensor& tangent) {
  return at::_make_dual(primal, tangent, 0);
}

// A linear operator on a dual x: applied to its primal and to its tangent, through the dispatcher,
// since either may belong to a level of torch.func further out.
template <typename Operator, typename... Args>
Tensor on_dual(const Operator& linear, const Tensor& x, const Args&... args) {
  const Tensor y = linear.call(primal_of(x), args...);  // first, on every rank: it may communicate
  return make_dual(y, linear.call(tangent_of(x), args...));
}

// To be called first, before any communication
template <typename... Tensors>
void refuse_forward_mode(const char* op, const Tensors&... xs) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !any_tangent(xs...), "tp_ext: ", op,
      " has no forward-mode derivative; use reverse mode (torch.autograd.grad, .backward())");
}

// [Note: fused kernels refuse a second derivative]
// A fused backward has no derivative of its own in either mode. To be called first in it.
inline void refuse_double_backward(const char* op, const std::vector<Tensor>& grads) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "tp_ext: ", op,
                              " has no second derivative: backward(create_graph=True) cannot go "
                              "through this fused kernel");
  for (const auto& grad : grads)
    TORCH_CHECK_NOT_IMPLEMENTED(!grad.defined() || !has_tangent(grad), "tp_ext: the backward of ",
                                op, " has no forward-mode derivative");
}

}  // namespace tp_ext
