// gated_act on CUDA: checks, allocation, launch. Kernels: kernels/gated_act.cuh.

#include <torch/library.h>
#include <ATen/ops/empty.h>

#include "args/activation.h"
#include "cuda/column_launch.h"
#include "cuda/launch.h"
#include "kernels/gated_act.cuh"
#include "ops.h"

namespace tp_ext {
namespace {

Tensor gated_act_fwd(const Tensor& x_any, const OptionalTensor& bias_any,
                     std::string_view activation) {
  check_gated_act(x_any, bias_any, activation);
  const c10::cuda::CUDAGuard guard(x_any.device());
  const Tensor x = x_any.contiguous();
  const Tensor bias = bias_any.has_value() ? bias_any->contiguous() : Tensor();
  std::vector<int64_t> shape = x.sizes().vec();
  const int64_t f = shape.back() /= 2;
  const Tensor y = at::empty(shape, x.options());
  if (y.numel() == 0) return y;
  const int64_t rows = y.numel() / f;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  dispatch_floating(x.scalar_type(), "gated_act", [&](auto zero) {
    using T = decltype(zero);
    const T *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
    T* const py = out<T>(y);
    dispatch_gated_activation(activation, [&](auto act) {
      dispatch_shape<T>(pb != nullptr, vectorisable<T>(f, px, pb, py),
                        [&](auto has_bias, auto width) {
                          using Act = decltype(act);
                          constexpr bool kBias = decltype(has_bias)::value;
                          constexpr int N = decltype(width)::value;
                          const ColumnGrid grid = column_grid(rows, f, N);
                          gated_act_forward_kernel<Act, kBias, N>
                              <<<grid_of(grid), block_of(grid), 0, stream>>>(px, pb, py, rows, f);
                        });
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return y;
}

std::tuple<Tensor, Tensor> gated_act_bwd(const Tensor& grad_any, const Tensor& x_any,
                                         const OptionalTensor& bias_any,
                                         std::string_view activation) {
  check_gated_act(x_any, bias_any, activation);
  check_activation_grad(grad_any, x_any, 2);
  const c10::cuda::CUDAGuard guard(x_any.device());
  const Tensor x = x_any.contiguous(), grad = grad_any.contiguous();
  const Tensor bias = bias_any.has_value() ? bias_any->contiguous() : Tensor();
  const Tensor dx = at::empty(x.sizes(), x.options());
  const Tensor dbias = at::empty({bias.defined() ? bias.numel() : 0}, x.options());
  const int64_t f = x.size(-1) / 2;
  if (f == 0) return {dx, dbias};
  const int64_t rows = grad.numel() / f;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  dispatch_floating(x.scalar_type(), "gated_act", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const T *pg = in<T>(grad), *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
    T* const pd = out<T>(dx);
    dispatch_gated_activation(activation, [&](auto act) {
      dispatch_shape<T>(
          pb != nullptr, vectorisable<T>(f, pg, px, pb, pd), [&](auto has_bias, auto width) {
            using Act = decltype(act);
            constexpr bool kBias = decltype(has_bias)::value;
            constexpr int N = decltype(width)::value;
            const ColumnGrid grid = column_grid(rows, f, N);
            const Tensor partial = at::empty({grid.row_blocks, kBias ? 2 * f : 0},
                                             x.options().dtype(c10::CppTypeToScalarType<A>::value));
            gated_act_backward_kernel<Act, kBias, N><<<grid_of(grid), block_of(grid), 0, stream>>>(
                pg, px, pb, pd, out<A>(partial), rows, f);
            C10_CUDA_KERNEL_LAUNCH_CHECK();
            if constexpr (kBias) sum_partials<T>(partial, dbias, stream);
          });
    });
  });
  return {dx, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_gated_act_fwd", gated_act_fwd);
  m.impl("_gated_act_bwd", gated_act_bwd);
}

}  // namespace tp_ext
