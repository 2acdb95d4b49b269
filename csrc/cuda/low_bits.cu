// Frozen weights of 8 and 4 bits on CUDA, in torch's operators: rows in fp32.

#include "args/low_bits.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/stack.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace tp_ext {
namespace {

Tensor dequantize_low_bits(const Tensor& packed, const Tensor& scale,
                           std::optional<int64_t> block) {
  const bool four = check_low_bits(packed, scale, block);
  const c10::cuda::CUDAGuard guard(packed.device());
  const Tensor wide = scale.to(at::kFloat).unsqueeze(-1);
  if (!four) return packed.to(at::kFloat) * wide;
  const Tensor q = at::stack({at::bitwise_and(packed, 15), packed.__rshift__(4)}, -1).flatten(-2);
  return (q.to(at::kFloat).sub_(8).unflatten(-1, {-1, *block}) * wide).flatten(-2);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) { m.impl("_dequantize_low_bits", dequantize_low_bits); }

}  // namespace tp_ext
