// linear_gelu and the accumulation of a weight's gradient on CUDA: half types use cublasLt's
// epilogues where shapes and addresses allow it (kernels/linear_gelu.cuh); everything else is
// composed as on the CPU, with the same values up to rounding.

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cuda/launch.h"
#include "kernels/linear_gelu.cuh"
#include "args/linear_gelu.h"

namespace tp_ext {
namespace {

// As rows of stride 1: the layout that a matrix with a leading dimension can describe
bool has_dense_rows(const Tensor& t) {
  return t.dim() == 2 && t.stride(1) == 1 && t.stride(0) >= t.size(1);
}
Tensor dense_rows(const Tensor& t) { return has_dense_rows(t) ? t : t.contiguous(); }

bool is_half(const Tensor& t) {
  return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
}
cudaDataType_t type_of(const Tensor& t) {
  return t.scalar_type() == at::kBFloat16 ? CUDA_R_16BF
         : t.scalar_type() == at::kHalf   ? CUDA_R_16F
                                          : CUDA_R_32F;
}
gemm::Matrix matrix(const Tensor& t) {
  const int64_t ld =
      t.size(0) == 1 ? t.size(1) : t.stride(0);  // a single row's stride says nothing
  return {t.const_data_ptr(), t.size(0), t.size(1), ld, type_of(t)};
}

// Whether cublasLt has computed it. The workspace is torch's: as large as for torch's own products,
// taken from and returned to the caching allocator, so that graphs can be captured.
bool run(const gemm::Problem& problem, const Tensor& like) {
  const size_t bytes = at::cuda::getChosenWorkspaceSize();
  const Tensor workspace =
      at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte));
  const auto status =
      gemm::run(problem, {at::cuda::getCurrentCUDABlasLtHandle(), like.get_device(),
                          workspace.mutable_data_ptr(), bytes, c10::cuda::getCurrentCUDAStream()});
  TORCH_CHECK(status.outcome != gemm::Outcome::kFailed, "tp_ext: ", status.message);
  return status.outcome == gemm::Outcome::kDone;
}

std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  auto shape = x.sizes().vec();
  shape.back() = last;
  return shape;
}

std::tuple<Tensor, Tensor> linear_gelu_fwd(const Tensor& x, const Tensor& weight_any,
                                           const Tensor& bias_any, bool keep_pre) {
  composed::check_linear_gelu(x, weight_any, bias_any);
  const c10::cuda::CUDAGuard guard(x.device());
  if (is_half(x) && x.numel() > 0 && weight_any.numel() > 0) {
    const Tensor rows = dense_rows(composed::rows_of(x)), weight = dense_rows(weight_any);
    const Tensor bias = bias_any.contiguous();
    const auto shape = with_last(x, weight.size(0));
    const Tensor y = at::empty(shape, x.options());
    const Tensor pre = keep_pre ? at::empty(shape, x.options()) : at::empty({0}, x.options());
    const auto problem =
        gemm::linear_gelu(matrix(rows), matrix(weight), bias.const_data_ptr(), y.mutable_data_ptr(),
                          keep_pre ? pre.mutable_data_ptr() : nullptr);
    if (gemm::fits_epilogue(problem) && run(problem, x)) return {y, pre};
  }
  return composed::linear_gelu_fwd(x, weight_any, bias_any, keep_pre);
}

std::tuple<Tensor, Tensor> linear_dgelu_bwd(const Tensor& dy, const Tensor& weight_any,
                                            const Tensor& pre_any) {
  composed::check_linear_dgelu(dy, weight_any, pre_any);
  const c10::cuda::CUDAGuard guard(dy.device());
  if (is_half(dy) && dy.numel() > 0 && weight_any.numel() > 0) {
    const Tensor rows = dense_rows(composed::rows_of(dy)), weight = dense_rows(weight_any);
    const Tensor pre = pre_any.contiguous();
    const Tensor dpre = at::empty(pre.sizes(), pre.options());
    const Tensor dbias = at::empty({pre.size(-1)}, pre.options());
    const auto problem = gemm::linear_dgelu(matrix(rows), matrix(weight), pre.const_data_ptr(),
                                            dpre.mutable_data_ptr(), dbias.mutable_data_ptr());
    if (gemm::fits_epilogue(problem) && run(problem, dy)) return {dpre, dbias};
  }
  return composed::linear_dgelu_bwd(dy, weight_any, pre_any);
}

void add_weight_grad_(const Tensor& main_grad, const Tensor& dy_any, const Tensor& x_any) {
  composed::check_add_weight_grad(main_grad, dy_any, x_any);
  const c10::cuda::CUDAGuard guard(main_grad.device());
  if (is_half(dy_any) && main_grad.scalar_type() == at::kFloat && dy_any.numel() > 0 &&
      x_any.numel() > 0 && has_dense_rows(main_grad)) {
    const Tensor dy = dense_rows(dy_any), x = dense_rows(x_any);
    auto grad = matrix(main_grad);
    grad.data = main_grad.mutable_data_ptr();
    if (run(gemm::weight_grad(matrix(dy), matrix(x), grad), main_grad)) return;
  }
  composed::add_weight_grad_(main_grad, dy_any, x_any);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_linear_gelu_fwd", linear_gelu_fwd);
  m.impl("_linear_dgelu_bwd", linear_dgelu_bwd);
  m.impl("_add_weight_grad_", add_weight_grad_);
}

}  // namespace tp_ext
