// linear_gelu on CUDA: half types use cublasLt's epilogues where shapes and addresses allow it
// (epilogues.cuh); everything else is composed as on the CPU, with the same values up to rounding.

#include <torch/library.h>

#include "cuda/gemm.h"
#include "linear_gelu/epilogues.cuh"
#include "linear_gelu/linear_gelu.h"

namespace tp_ext {
namespace {

std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  auto shape = x.sizes().vec();
  shape.back() = last;
  return shape;
}

std::tuple<Tensor, Tensor> linear_gelu_fwd(const Tensor& x, const Tensor& weight_any,
                                           const Tensor& bias_any, bool keep_pre) {
  composed::check_linear_gelu(x, weight_any, bias_any);
  const c10::cuda::CUDAGuard guard(x.device());
  if (gemm::is_half(x) && x.numel() > 0 && weight_any.numel() > 0) {
    const Tensor rows = gemm::dense_rows(composed::rows_of(x)),
                 weight = gemm::dense_rows(weight_any);
    const Tensor bias = bias_any.contiguous();
    const auto shape = with_last(x, weight.size(0));
    const Tensor y = at::empty(shape, x.options());
    const Tensor pre = keep_pre ? at::empty(shape, x.options()) : at::empty({0}, x.options());
    const auto problem =
        gemm::linear_gelu(gemm::matrix(rows), gemm::matrix(weight), bias.const_data_ptr(),
                          y.mutable_data_ptr(), keep_pre ? pre.mutable_data_ptr() : nullptr);
    if (gemm::fits_epilogue(problem) && gemm::run_on(x, problem)) return {y, pre};
  }
  return composed::linear_gelu_fwd(x, weight_any, bias_any, keep_pre);
}

std::tuple<Tensor, Tensor> linear_dgelu_bwd(const Tensor& dy, const Tensor& weight_any,
                                            const Tensor& pre_any) {
  composed::check_linear_dgelu(dy, weight_any, pre_any);
  const c10::cuda::CUDAGuard guard(dy.device());
  if (gemm::is_half(dy) && dy.numel() > 0 && weight_any.numel() > 0) {
    const Tensor rows = gemm::dense_rows(composed::rows_of(dy)),
                 weight = gemm::dense_rows(weight_any);
    const Tensor pre = pre_any.contiguous();
    const Tensor dpre = at::empty(pre.sizes(), pre.options());
    const Tensor dbias = at::empty({pre.size(-1)}, pre.options());
    const auto problem =
        gemm::linear_dgelu(gemm::matrix(rows), gemm::matrix(weight), pre.const_data_ptr(),
                           dpre.mutable_data_ptr(), dbias.mutable_data_ptr());
    if (gemm::fits_epilogue(problem) && gemm::run_on(dy, problem)) return {dpre, dbias};
  }
  return composed::linear_dgelu_bwd(dy, weight_any, pre_any);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_linear_gelu_fwd", linear_gelu_fwd);
  m.impl("_linear_dgelu_bwd", linear_dgelu_bwd);
}

}  // namespace tp_ext
