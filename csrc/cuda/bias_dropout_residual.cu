// y = residual + dropout(x + bias) and its gradient dx = dropout(dy), on CUDA: x, residual [.., n],
// bias [n]. Only the seed is saved; backward draws the same words again.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "args/bias_dropout_residual.h"
#include "cuda/column_launch.h"
#include "cuda/launch.h"
#include "kernels/bias_dropout_residual.cuh"
#include "rows.h"

namespace tp_ext {
namespace {

template <typename T>
DropoutArgs<T> dropout_args(const Tensor& x, const Tensor& bias, const Tensor& residual,
                            const Tensor& y, const Tensor& seed, double p,
                            const GlobalIndex& index) {
  return {in<T>(x),
          bias.defined() ? in<T>(bias) : nullptr,
          residual.defined() ? in<T>(residual) : nullptr,
          out<T>(y),
          x.numel(),
          bias.defined() ? bias.numel() : 1,
          seed_and_rows(seed),
          Dropout<acc_t<T>>(p),
          index};
}

template <DropoutForm kForm, typename T>
void launch_dropout_rows(const DropoutArgs<T>& args, const DropoutRows& rows,
                         const ColumnGrid& grid, const LaunchChoice& tuned, acc_t<T>* partial) {
  const auto kernel = dropout_rows_at_once(kForm, tuned) == 2 ? dropout_vector_kernel<T, kForm, 2>
                                                              : dropout_vector_kernel<T, kForm, 1>;
  kernel<<<grid_of(grid), block_of(grid), 0, c10::cuda::getCurrentCUDAStream()>>>(args, rows,
                                                                                  partial);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// last: elements of the last dim
template <typename T>
void launch_dropout(const DropoutArgs<T>& args, int64_t last) {
  if (dropout_vectorisable(args)) {
    const DropoutRows rows = dropout_rows(args, last);
    const bool plain = args.bias == nullptr && args.residual == nullptr;
    const LaunchChoice tuned =
        choose_launch<T>(plain ? Family::kDropoutBackward : Family::kDropoutForward, rows.columns);
    const ColumnGrid grid = forward_grid(rows.rows, rows.columns, kDropoutVec<T>, tuned);
    plain ? launch_dropout_rows<DropoutForm::kPlain, T>(args, rows, grid, tuned, nullptr)
          : launch_dropout_rows<DropoutForm::kWhole, T>(args, rows, grid, tuned, nullptr);
  } else {
    const int64_t rows = args.n / args.index.local_inner;
    dropout_general_kernel<T><<<grid_for(rows * quads_per_row(args.index)), kThreads, 0,
                                c10::cuda::getCurrentCUDAStream()>>>(args);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

struct CudaDropout {
  static void forward(const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& y,
                      const Tensor& seed, double p, const GlobalIndex& index) {
    const c10::cuda::CUDAGuard guard(x.device());
    dispatch_floating(x.scalar_type(), "bias_dropout_residual", [&](auto tag) {
      using T = decltype(tag);
      launch_dropout(dropout_args<T>(x, bias, residual, y, seed, p, index),
                     x.dim() > 0 ? x.size(-1) : 1);
    });
  }
};

// Fills dx and its sums over the rows in one pass, if the rows that the kernel walks down are those
// of the last dim
bool dropout_with_sums(const Tensor& grad, const Tensor& seed, double p, const GlobalIndex& index,
                       const Tensor& dx, const Tensor& dbias) {
  const c10::cuda::CUDAGuard guard(grad.device());
  bool done = false;
  dispatch_floating(grad.scalar_type(), "bias_dropout_residual", [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const DropoutArgs<T> args = dropout_args<T>(grad, {}, {}, dx, seed, p, index);
    const DropoutRows rows = dropout_rows(args, grad.size(-1));
    done = rows.columns == grad.size(-1) && dropout_vectorisable(args);
    if (!done) return;
    const ColumnGrid grid = column_grid(rows.rows, rows.columns, kDropoutVec<T>);
    const Tensor partial = at::empty({grid.row_blocks, rows.columns},
                                     grad.options().dtype(c10::CppTypeToScalarType<A>::value));
    launch_dropout_rows<DropoutForm::kSummed, T>(
        args, rows, grid, choose_launch<T>(Family::kDropoutBackward, rows.columns),
        out<A>(partial));
    sum_partials<T>(partial, dbias, c10::cuda::getCurrentCUDAStream());
  });
  return done;
}

std::tuple<Tensor, Tensor> bias_dropout_bwd(const Tensor& grad_in, const Tensor& seed, double p,
                                            int64_t local_inner, int64_t full_inner,
                                            int64_t offset) {
  check_bias_rows(grad_in, "grad");
  if (grad_in.dim() > 1 && grad_in.numel() > 0) {
    const GlobalIndex index = check_global_index(grad_in, "x", local_inner, full_inner, offset);
    check_dropout(grad_in, "x", seed, p, index);
    const Tensor grad = grad_in.contiguous(), dx = at::empty_like(grad);
    const Tensor dbias = at::empty({grad.size(-1)}, grad.options());
    if (dropout_with_sums(grad, seed, p, index, dx, dbias)) return {dx, dbias};
  }
  using Primitives = DropoutPrimitives<CudaDropout>;
  const Tensor dx = Primitives::bwd(grad_in, seed, p, local_inner, full_inner, offset);
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
