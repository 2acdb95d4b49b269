// Backward in two halves, as pipeline schedules without bubbles run it (Qi et al., "Zero Bubble
// Pipeline Parallelism", arXiv:2401.10241): autograd first asks a node for the gradient of its
// input and keeps the graph; later, with the same dy, it asks for the gradients of its weights. A
// Function keeps what both halves need, so that no GEMM, collective or fused kernel runs twice:
//
//   first half    if (asked_later(ctx, weight)) keep_results(ctx, dy, {dy_full})
//   second half   take_results(ctx, dy)
//
// The results live as long as the node if the second half never comes.

#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include "autograd/function.h"

namespace tp_ext {

// Whether the gradient of input i, counted among the inputs that are tensors, is not asked for in
// this call but can be in another one
inline bool asked_later(AutogradContext* ctx, size_t i) {
  if (ctx->needs_input_grad(i) || !torch::autograd::get_current_graph_task_keep_graph())
    return false;
  const auto node = torch::autograd::get_current_node();
  return node && node->should_compute_output(i);
}

// [Note: a backward in two halves keeps results, not flags]
// Keeps results that were computed from dy for the other half
inline void keep_results(AutogradContext* ctx, const Tensor& dy, const variable_list& results) {
  if (dy.is_inference()) return;  // has no version
  auto& data = ctx->saved_data;
  data["kept_dy"] = dy;
  data["kept_version"] = static_cast<int64_t>(dy._version());
  data["kept_results"] = results;
}

// The results that the other half kept, once; none if it had another dy or there was none
inline variable_list take_results(AutogradContext* ctx, const Tensor& dy) {
  auto& data = ctx->saved_data;
  if (data.count("kept_dy") == 0) return {};
  const bool same = data["kept_dy"].toTensor().is_same(dy) && !dy.is_inference() &&
                    data["kept_version"].toInt() == static_cast<int64_t>(dy._version());
  auto results = same ? data["kept_results"].toTensorVector() : variable_list();
  for (const char* key : {"kept_dy", "kept_version", "kept_results"}) data.erase(key);
  return results;
}

}  // namespace tp_ext
