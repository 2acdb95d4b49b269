// bias_act on CUDA: launch. Kernels: kernels/bias_act.cuh.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "args/activation.h"
#include "cuda/column_launch.h"
#include "cuda/launch.h"
#include "kernels/bias_act.cuh"
#include "types.h"

namespace tp_ext {
namespace {

struct CudaBiasAct {
  static void forward(const Tensor& x, const Tensor& bias, const Tensor& y,
                      std::string_view activation) {
    const c10::cuda::CUDAGuard guard(x.device());
    const auto stream = c10::cuda::getCurrentCUDAStream();
    dispatch_floating(x.scalar_type(), "bias_act", [&](auto zero) {
      using T = decltype(zero);
      const int64_t n = bias.defined() ? bias.numel() : flat_columns(x.numel(), kVec<T>);
      const int64_t rows = x.numel() / n;
      const T *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
      T* const py = out<T>(y);
      const bool vector = bias_act_forward_vectors<T>(rows, n, px, pb, py);
      dispatch_activation(activation, [&](auto act) {
        dispatch_shape<T>(pb != nullptr, vector, [&](auto has_bias, auto width) {
          using Act = decltype(act);
          constexpr bool kBias = decltype(has_bias)::value;
          constexpr int N = decltype(width)::value;
          const ColumnGrid grid =
              forward_grid(rows, n, N, choose_launch<T>(Family::kColumnsForward, n));
          bias_act_forward_kernel<Act, kBias, N>
              <<<grid_of(grid), block_of(grid), 0, stream>>>(px, pb, py, rows, n);
        });
      });
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }

  static void backward(const Tensor& grad, const Tensor& x, const Tensor& bias, const Tensor& dx,
                       const Tensor& dbias, std::string_view activation) {
    const c10::cuda::CUDAGuard guard(x.device());
    const auto stream = c10::cuda::getCurrentCUDAStream();
    dispatch_floating(x.scalar_type(), "bias_act", [&](auto zero) {
      using T = decltype(zero);
      const int64_t n = bias.defined() ? bias.numel() : flat_columns(x.numel(), kVec<T>);
      const int64_t rows = x.numel() / n;
      using A = acc_t<T>;
      const T *pg = in<T>(grad), *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
      T* const pd = out<T>(dx);
      const bool vector = bias_act_backward_vectors<T>(n, pg, px, pb, pd);
      dispatch_activation(activation, [&](auto act) {
        dispatch_shape<T>(pb != nullptr, vector, [&](auto has_bias, auto width) {
          using Act = decltype(act);
          constexpr bool kBias = decltype(has_bias)::value;
          constexpr int N = decltype(width)::value;
          const ColumnGrid grid =
              kBias ? column_grid(rows, n, N)
                    : forward_grid(rows, n, N, choose_launch<T>(Family::kColumnsBackward, n));
          const Tensor partial = at::empty({grid.row_blocks, kBias ? n : 0},
                                           x.options().dtype(c10::CppTypeToScalarType<A>::value));
          bias_act_backward_kernel<Act, kBias, N><<<grid_of(grid), block_of(grid), 0, stream>>>(
              pg, px, pb, pd, out<A>(partial), rows, n);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
          if constexpr (kBias) sum_partials<T>(partial, dbias, stream);
        });
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  using Primitives = ActivationPrimitives<CudaBiasAct, check_bias_act, 1>;
  m.impl("_bias_act_fwd", Primitives::fwd);
  m.impl("_bias_act_bwd", Primitives::bwd);
}

}  // namespace tp_ext
