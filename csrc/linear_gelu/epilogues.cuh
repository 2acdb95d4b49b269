// The products whose epilogue cublasLt fuses; torch-free:
//
//   linear_gelu    y = gelu_tanh(pre), pre = x w^T + b                 GELU_AUX_BIAS
//   linear_dgelu   dpre = (dy w) * gelu_tanh'(pre), db = its sums      DGELU_BGRAD
//
// cublasLt's GELU is the tanh form, in both directions; it has none of the exact form.

#pragma once

#include "kernels/gemm.cuh"

namespace tp_ext::gemm {

// y, pre and dpre are dense; x, dy and the weights may have a longer leading dimension. pre may be
// null: only y is computed.
inline Problem linear_gelu(const Matrix& x, const Matrix& weight, const void* bias, void* y,
                           void* pre) {
  Problem problem{x, weight, {y, x.rows, weight.rows, weight.rows, x.type}};
  problem.right.transposed = true;
  problem.epilogue = pre ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS;
  problem.bias = bias;
  problem.aux = pre;
  problem.aux_ld = pre ? weight.rows : 0;
  return problem;
}

inline Problem linear_dgelu(const Matrix& dy, const Matrix& weight, const void* pre, void* dpre,
                            void* dbias) {
  Problem problem{dy, weight, {dpre, dy.rows, weight.cols, weight.cols, dy.type}};
  problem.epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD;
  problem.bias = dbias;
  problem.aux = pre;
  problem.aux_ld = weight.cols;
  return problem;
}

// cublasLt's requirement on a GELU's aux matrix, and on every matrix that it reads 16 bytes at a
// time
inline bool fits_epilogue(const Problem& problem) {
  return problem.aux_ld % 8 == 0 && alignment_of(problem.bias) >= 16 &&
         alignment_of(problem.aux) >= 16 && alignment_of(problem.result.data) >= 16;
}

}  // namespace tp_ext::gemm
