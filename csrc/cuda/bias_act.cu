// bias_act on CUDA: checks, allocation, launch. Kernels: kernels/bias_act.cuh.

#include <torch/library.h>
#include <ATen/ops/empty.h>

#include "args/activation.h"
#include "cuda/column_launch.h"
#include "cuda/launch.h"
#include "kernels/bias_act.cuh"
#include "ops.h"

namespace tp_ext {
namespace {

Tensor bias_act_fwd(const Tensor& x_any, const OptionalTensor& bias_any,
                    std::string_view activation) {
  check_bias_act(x_any, bias_any, activation);
  const c10::cuda::CUDAGuard guard(x_any.device());
  const Tensor x = x_any.contiguous();
  const Tensor bias = bias_any.has_value() ? bias_any->contiguous() : Tensor();
  const Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  const int64_t n = bias.defined() ? bias.numel() : x.numel(), rows = x.numel() / n;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  dispatch_floating(x.scalar_type(), "bias_act", [&](auto zero) {
    using T = decltype(zero);
    const T *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
    T* const py = out<T>(y);
    const bool vector = bias_act_forward_vectors<T>(rows, n, px, pb, py);
    dispatch_activation(activation, [&](auto act) {
      dispatch_shape<T>(pb != nullptr, vector, [&](auto has_bias, auto width) {
        using Act = decltype(act);
        constexpr bool kBias = decltype(has_bias)::value;
        constexpr int N = decltype(width)::value;
        const ColumnGrid grid = column_grid(rows, n, N);
        bias_act_forward_kernel<Act, kBias, N>
            <<<grid_of(grid), block_of(grid), 0, stream>>>(px, pb, py, rows, n);
      });
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_act_bwd(const Tensor& grad_any, const Tensor& x_any,
                                        const OptionalTensor& bias_any,
                                        std::string_view activation) {
  check_bias_act(x_any, bias_any, activation);
  check_activation_grad(grad_any, x_any, 1);
  const c10::cuda::CUDAGuard guard(x_any.device());
  const Tensor x = x_any.contiguous(), grad = grad_any.contiguous();
  const Tensor bias = bias_any.has_value() ? bias_any->contiguous() : Tensor();
  const Tensor dx = at::empty(x.sizes(), x.options());
  const Tensor dbias = at::empty({bias.defined() ? bias.numel() : 0}, x.options());
  const int64_t n = bias.defined() ? bias.numel() : x.numel(), rows = n ? x.numel() / n : 0;
  if (n == 0) return {dx, dbias};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  dispatch_floating(x.scalar_type(), "bias_act", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const T *pg = in<T>(grad), *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
    T* const pd = out<T>(dx);
    const bool vector = bias_act_backward_vectors<T>(n, pg, px, pb, pd);
    dispatch_activation(activation, [&](auto act) {
      dispatch_shape<T>(pb != nullptr, vector, [&](auto has_bias, auto width) {
        using Act = decltype(act);
        constexpr bool kBias = decltype(has_bias)::value;
        constexpr int N = decltype(width)::value;
        const ColumnGrid grid = column_grid(rows, n, N);
        const Tensor partial = at::empty({grid.row_blocks, kBias ? n : 0},
                                         x.options().dtype(c10::CppTypeToScalarType<A>::value));
        bias_act_backward_kernel<Act, kBias, N><<<grid_of(grid), block_of(grid), 0, stream>>>(
            pg, px, pb, pd, out<A>(partial), rows, n);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
        if constexpr (kBias) sum_partials<T>(partial, dbias, stream);
      });
    });
  });
  return {dx, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_bias_act_fwd", bias_act_fwd);
  m.impl("_bias_act_bwd", bias_act_bwd);
}

}  // namespace tp_ext
