// The accumulation of a weight's gradient on CUDA: cublasLt adds products of half types to fp32;
// other dtypes and layouts as on the CPU, with the same values up to rounding.

#include <torch/library.h>

#include "args/add_weight_grad.h"
#include "cuda/gemm.h"

namespace tp_ext {
namespace {

void add_weight_grad_(const Tensor& main_grad, const Tensor& dy_any, const Tensor& x_any) {
  composed::check_add_weight_grad(main_grad, dy_any, x_any);
  const c10::cuda::CUDAGuard guard(main_grad.device());
  if (gemm::is_half(dy_any) && main_grad.scalar_type() == at::kFloat && dy_any.numel() > 0 &&
      x_any.numel() > 0 && gemm::has_dense_rows(main_grad)) {
    const Tensor dy = gemm::dense_rows(dy_any), x = gemm::dense_rows(x_any);
    auto grad = gemm::matrix(main_grad);
    grad.data = main_grad.mutable_data_ptr();
    if (gemm::run_on(main_grad, gemm::weight_grad(gemm::matrix(dy), gemm::matrix(x), grad))) return;
  }
  composed::add_weight_grad_(main_grad, dy_any, x_any);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) { m.impl("_add_weight_grad_", add_weight_grad_); }

}  // namespace tp_ext
