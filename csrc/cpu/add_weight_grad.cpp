// The accumulation of a weight's gradient on the CPU: ATen's product.

#include <torch/library.h>

#include "args/add_weight_grad.h"

namespace tp_ext {
namespace {

void add_weight_grad_(const Tensor& main_grad, const Tensor& dy, const Tensor& x) {
  composed::check_add_weight_grad(main_grad, dy, x);
  composed::add_weight_grad_(main_grad, dy, x);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) { m.impl("_add_weight_grad_", add_weight_grad_); }

}  // namespace tp_ext
