// Tensors as operands of kernels/gemm.cuh.

#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>

#include "cuda/launch.h"
#include "kernels/gemm.cuh"

namespace tp_ext::gemm {

// As rows of stride 1: the layout that a matrix with a leading dimension can describe
inline bool has_dense_rows(const at::Tensor& t) {
  return t.dim() == 2 && t.stride(1) == 1 && t.stride(0) >= t.size(1);
}
inline at::Tensor dense_rows(const at::Tensor& t) { return has_dense_rows(t) ? t : t.contiguous(); }

inline bool is_half(const at::Tensor& t) {
  return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
}
inline cudaDataType_t type_of(const at::Tensor& t) {
  return t.scalar_type() == at::kBFloat16 ? CUDA_R_16BF
         : t.scalar_type() == at::kHalf   ? CUDA_R_16F
                                          : CUDA_R_32F;
}
inline Matrix matrix(const at::Tensor& t) {
  const int64_t ld =
      t.size(0) == 1 ? t.size(1) : t.stride(0);  // a single row's stride says nothing
  return {t.const_data_ptr(), t.size(0), t.size(1), ld, type_of(t)};
}

// Computes the problem on the device of a tensor; false if cublasLt cannot. The workspace is
// torch's: as large as for torch's own products, taken from and returned to the caching allocator,
// so that graphs can be captured.
inline bool run_on(const at::Tensor& like, const Problem& problem) {
  const size_t bytes = at::cuda::getChosenWorkspaceSize();
  const at::Tensor workspace =
      at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte));
  const auto status =
      run(problem, {at::cuda::getCurrentCUDABlasLtHandle(), like.get_device(),
                    workspace.mutable_data_ptr(), bytes, c10::cuda::getCurrentCUDAStream()});
  TORCH_CHECK(status.outcome != Outcome::kFailed, "tp_ext: ", status.message);
  return status.outcome == Outcome::kDone;
}

}  // namespace tp_ext::gemm
