// Where a row linear meets the residual stream and the norm of the next sublayer, as one operator:
//
//   total = residual + sum over ranks of x    y = rms_norm(total) * weight
//
// Composed of reduce_from_region and rms_norm_residual, whose bits it has. Where nothing is recorded,
// as in decoding, it calls the collective and the kernel itself, since for a few rows two calls cost
// as much as their work; and over tp_shm the step that adds the ranks' rows makes y and total of
// each sum, which is written nowhere.

#include <ATen/ops/empty.h>

#include <tuple>

#include "args/norm.h"
#include "autograd/autocast.h"
#include "autograd/function.h"
#include "comm/collectives.h"
#include "operators.h"
#include "row_end.h"

namespace tp_ext {
namespace {

std::tuple<Tensor, Tensor> by_operators(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, double eps,
                                        const std::string& group) {
  const Tensor sum = TP_OP(reduce_from_region).call(x, group);
  return TP_OP(rms_norm_residual).call(sum, residual, weight, eps);
}

}  // namespace

std::tuple<Tensor, Tensor> all_reduce_rms_norm(const Tensor& x, const Tensor& residual,
                                               const OptionalTensor& weight, double eps,
                                               const std::string& group) {
  check_norm_args(x, weight);  // before the collective
  check_norm_like_x(residual, "residual", x);
  if (comm::traced(x) || needs_graph(x) || needs_graph(residual) || is_any(needs_graph, weight))
    return by_operators(x, residual, weight, eps, group);
  const at::AutoDispatchBelowADInplaceOrView below;
  if (x.is_cpu() && x.numel() > 0 && comm::size(group) > 1) {
    const Tensor y = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
    const RowEnd end = rms_norm_row_end(residual.contiguous(), weight, eps, y, total);
    if (comm::all_reduce_rows(x, group, end)) return {y, total};
  }
  static const auto norm = TP_OP(_rms_norm_residual_fwd);
  const Tensor sum = comm::size(group) == 1 ? x : comm::all_reduce(x, group);
  const auto [y, total, rstd] = norm.call(sum, residual, weight, eps);
  return {y, total};
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<all_reduce_rms_norm>(m, "all_reduce_rms_norm");
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  impl_autocast<c10::kCPU, by_operators>(m, "all_reduce_rms_norm");  // each with its own dtypes
  impl_autocast<c10::kCUDA, by_operators>(m, "all_reduce_rms_norm");
}

}  // namespace tp_ext
