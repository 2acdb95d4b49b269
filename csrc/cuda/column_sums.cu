// CUDA: torch's sum of each slice of columns, whose order of additions depends on its shape alone.

#include <ATen/ops/cat.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <vector>

#include "args/column_sums.h"

namespace tp_ext {
namespace {

at::Tensor column_sums(const at::Tensor& x, at::IntArrayRef lengths) {
  check_column_sums(x, lengths);
  const c10::cuda::CUDAGuard guard(x.device());
  std::vector<at::Tensor> sums;
  for (const auto& slice : x.split_with_sizes(lengths, 1))
    sums.push_back(slice.contiguous().sum(at::IntArrayRef{0}, false, column_sums_dtype(x)));
  return at::cat(sums);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) { m.impl("_column_sums", column_sums); }

}  // namespace tp_ext
