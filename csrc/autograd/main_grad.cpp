#include "autograd/main_grad.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include "autograd/function.h"
#include "check.h"
#include "operators.h"

namespace tp_ext {

void check_main_grad(const std::optional<Tensor>& main_grad, const Tensor& weight) {
  if (!main_grad.has_value()) return;
  check_floating(*main_grad, "main_grad");
  check_same_device(*main_grad, "main_grad", weight, "weight");
  TORCH_CHECK_VALUE(main_grad->sym_sizes() == weight.sym_sizes(), "main_grad: shape ",
                    main_grad->sym_sizes(), " must be that of weight, ", weight.sym_sizes());
  TORCH_CHECK_VALUE(!main_grad->requires_grad(), "main_grad: must not require a gradient itself");
}

void add_weight_grad(const Tensor& main_grad, const Tensor& dy, const Tensor& x) {
  static const auto op = TP_OP(_add_weight_grad_);
  op.call(main_grad, dy, x);
}

Tensor placeholder_grad(const Tensor& main_grad, const Tensor& dy, size_t i) {
  // Of a subclass: torch.compile traces by autograd.grad and stores the result like backward()
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty() || dy.key_set().has(c10::DispatchKey::Python)) return {};
  const auto running = torch::autograd::get_current_node();
  // The weight itself, or what it was cast from
  const auto* node = running ? running->next_edge(i).function.get() : nullptr;
  while (node != nullptr) {
    const auto found = asked->find(const_cast<torch::autograd::Node*>(node));
    if (found != asked->end() && found->second.captures_)
      return at::zeros_symint(main_grad.sym_sizes(), dy.options());
    node = node->num_outputs() == 1 ? node->next_edge(0).function.get() : nullptr;
  }
  return {};
}

namespace {

// Forward: identity. Backward: main_grad += dy.
struct AccumulateGrad : Function<AccumulateGrad> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& main_grad) {
    ctx->saved_data["main_grad"] = main_grad;
    return x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("gradient accumulation into main_grad", grads);
    const Tensor main_grad = ctx->saved_data["main_grad"].toTensor();
    main_grad.add_(grads[0]);
    return gradients({placeholder_grad(main_grad, grads[0], 0)});
  }
};

}  // namespace

Tensor accumulate_grad_into(const Tensor& x, const Tensor& main_grad) {
  check_main_grad(main_grad, x);
  if (has_tangent(x)) {  // the gradient of a tangent must not be added
    const auto op = TP_OP(accumulate_grad_into);
    return make_dual(op.call(primal_of(x), main_grad), tangent_of(x));
  }
  return needs_graph(x) ? AccumulateGrad::apply(x, main_grad) : x;
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<accumulate_grad_into>(m, "accumulate_grad_into");
}

}  // namespace tp_ext
