// y = residual + dropout(x + bias) and its gradient dx = dropout(dy), on CUDA: x, residual [.., n],
// bias [n]. Only the seed is saved; backward draws the same words again.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "cuda/launch.h"
#include "kernels/bias_dropout_residual.cuh"
#include "ops.h"
#include "args/random.h"
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

Tensor bias_dropout_residual_fwd(const Tensor& x_in, const OptionalTensor& bias_in,
                                 const OptionalTensor& residual_in, const Tensor& seed, double p,
                                 int64_t local_inner, int64_t full_inner, int64_t offset) {
  const GlobalIndex index = check_global_index(x_in, "x", local_inner, full_inner, offset);
  check_dropout(x_in, "x", seed, p, index);
  check_bias_and_residual(x_in, bias_in, residual_in);
  const c10::cuda::CUDAGuard guard(x_in.device());
  const Tensor x = x_in.contiguous();
  OptionalTensor bias, residual;
  if (bias_in && bias_in->defined()) bias = bias_in->contiguous();
  if (residual_in && residual_in->defined()) residual = residual_in->contiguous();
  const Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  if (x.numel() == 0) return y;
  dispatch_floating(x.scalar_type(), "bias_dropout_residual", [&](auto tag) {
    using T = decltype(tag);
    launch_dropout<T>({in<T>(x), in<T>(bias), in<T>(residual), out<T>(y), x.numel(),
                       bias ? bias->numel() : 1, seed_and_rows(seed), Dropout<acc_t<T>>(p), index},
                      c10::cuda::getCurrentCUDAStream());
  });
  return y;
}

Tensor dropout_bwd(const Tensor& grad, const Tensor& seed, double p, int64_t local_inner,
                   int64_t full_inner, int64_t offset) {
  return bias_dropout_residual_fwd(grad, std::nullopt, std::nullopt, seed, p, local_inner,
                                   full_inner, offset);
}

std::tuple<Tensor, Tensor> bias_dropout_bwd(const Tensor& grad, const Tensor& seed, double p,
                                            int64_t local_inner, int64_t full_inner,
                                            int64_t offset) {
  check_bias_rows(grad, "grad");
  const Tensor dx = dropout_bwd(grad, seed, p, local_inner, full_inner, offset);
  // A clone where there is nothing to add: results must not share memory
  return {dx, dx.dim() == 1 ? dx.clone() : sum_to_last_dim(dx)};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_bias_dropout_residual_fwd", bias_dropout_residual_fwd);
  m.impl("_dropout_bwd", dropout_bwd);
  m.impl("_bias_dropout_bwd", bias_dropout_bwd);
}

}  // namespace tp_ext
