// y = residual + dropout(x + bias) and its gradient dx = dropout(dy), on CUDA: x, residual [.., n],
// bias [n]. Only the seed is saved; backward draws the same words again.

#include <torch/library.h>

#include "args/bias_dropout_residual.h"
#include "cuda/launch.h"
#include "kernels/bias_dropout_residual.cuh"
#include "rows.h"

namespace tp_ext {
namespace {

template <typename T>
void launch_dropout(const DropoutArgs<T>& args, cudaStream_t stream) {
  if (dropout_vectorisable(args)) {
    dropout_vector_kernel<T><<<grid_for(args.n / kDropoutVec<T>), kThreads, 0, stream>>>(args);
  } else {
    const int64_t rows = args.n / args.index.local_inner;
    dropout_general_kernel<T>
        <<<grid_for(rows * quads_per_row(args.index)), kThreads, 0, stream>>>(args);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

struct CudaDropout {
  static void forward(const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& y,
                      const Tensor& seed, double p, const GlobalIndex& index) {
    const c10::cuda::CUDAGuard guard(x.device());
    dispatch_floating(x.scalar_type(), "bias_dropout_residual", [&](auto tag) {
      using T = decltype(tag);
      launch_dropout<T>(
          {in<T>(x), bias.defined() ? in<T>(bias) : nullptr,
           residual.defined() ? in<T>(residual) : nullptr, out<T>(y), x.numel(),
           bias.defined() ? bias.numel() : 1, seed_and_rows(seed), Dropout<acc_t<T>>(p), index},
          c10::cuda::getCurrentCUDAStream());
    });
  }
};

std::tuple<Tensor, Tensor> bias_dropout_bwd(const Tensor& grad, const Tensor& seed, double p,
                                            int64_t local_inner, int64_t full_inner,
                                            int64_t offset) {
  check_bias_rows(grad, "grad");
  using Primitives = DropoutPrimitives<CudaDropout>;
  const Tensor dx = Primitives::bwd(grad, seed, p, local_inner, full_inner, offset);
  // A clone where there is nothing to add: results must not share memory
  return {dx, dx.dim() == 1 ? dx.clone() : sum_to_last_dim(dx)};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  using Primitives = DropoutPrimitives<CudaDropout>;
  m.impl("_bias_dropout_residual_fwd", Primitives::fwd);
  m.impl("_dropout_bwd", Primitives::bwd);
  m.impl("_bias_dropout_bwd", bias_dropout_bwd);
}

}  // namespace tp_ext
