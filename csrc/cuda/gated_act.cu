// gated_act on CUDA: launch. Kernels: kernels/gated_act.cuh.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "args/activation.h"
#include "cuda/column_launch.h"
#include "cuda/launch.h"
#include "kernels/gated_act.cuh"
#include "types.h"

namespace tp_ext {
namespace {

struct CudaGatedAct {
  static void forward(const Tensor& x, const Tensor& bias, const Tensor& y,
                      std::string_view activation) {
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t f = y.size(-1), rows = y.numel() / f;
    const auto stream = c10::cuda::getCurrentCUDAStream();
    dispatch_floating(x.scalar_type(), "gated_act", [&](auto zero) {
      using T = decltype(zero);
      const T *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
      T* const py = out<T>(y);
      dispatch_gated_activation(activation, [&](auto act) {
        dispatch_shape<T>(
            pb != nullptr, vectorisable<T>(f, px, pb, py), [&](auto has_bias, auto width) {
              using Act = decltype(act);
              constexpr bool kBias = decltype(has_bias)::value;
              constexpr int N = decltype(width)::value;
              const ColumnGrid grid =
                  forward_grid(rows, f, N, choose_launch<T>(Family::kColumnsForward, f));
              gated_act_forward_kernel<Act, kBias, N>
                  <<<grid_of(grid), block_of(grid), 0, stream>>>(px, pb, py, rows, f);
            });
      });
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }

  static void backward(const Tensor& grad, const Tensor& x, const Tensor& bias, const Tensor& dx,
                       const Tensor& dbias, std::string_view activation) {
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t f = grad.size(-1), rows = grad.numel() / f;
    const auto stream = c10::cuda::getCurrentCUDAStream();
    dispatch_floating(x.scalar_type(), "gated_act", [&](auto zero) {
      using T = decltype(zero);
      using A = acc_t<T>;
      const T *pg = in<T>(grad), *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
      T* const pd = out<T>(dx);
      dispatch_gated_activation(activation, [&](auto act) {
        dispatch_shape<T>(pb != nullptr, vectorisable<T>(f, pg, px, pb, pd),
                          [&](auto has_bias, auto width) {
                            using Act = decltype(act);
                            constexpr bool kBias = decltype(has_bias)::value;
                            constexpr int N = decltype(width)::value;
                            const ColumnGrid grid = column_grid(rows, f, N);
                            const Tensor partial =
                                at::empty({grid.row_blocks, kBias ? 2 * f : 0},
                                          x.options().dtype(c10::CppTypeToScalarType<A>::value));
                            gated_act_backward_kernel<Act, kBias, N>
                                <<<grid_of(grid), block_of(grid), 0, stream>>>(
                                    pg, px, pb, pd, out<A>(partial), rows, f);
                            C10_CUDA_KERNEL_LAUNCH_CHECK();
                            if constexpr (kBias) sum_partials<T>(partial, dbias, stream);
                          });
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  using Primitives = ActivationPrimitives<CudaGatedAct, check_gated_act, 2>;
  m.impl("_gated_act_fwd", Primitives::fwd);
  m.impl("_gated_act_bwd", Primitives::bwd);
}

}  // namespace tp_ext
