// moe_sort on CUDA: checks, allocation, the sort, launches.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "args/moe_permute.h"
#include "cuda/launch.h"
#include "kernels/moe_sort.cuh"

namespace tp_ext {
namespace {

struct ExpertInRange {
  __device__ void operator()(bool ok) const {
    CUDA_KERNEL_ASSERT(ok && "experts must be -1 or in [0, num_experts)");
  }
};

std::tuple<Tensor, Tensor> moe_sort(const Tensor& experts_any, int64_t num_experts) {
  check_moe_sort(experts_any, num_experts);
  const c10::cuda::CUDAGuard guard(experts_any.device());
  const Tensor experts = experts_any.contiguous();
  const Tensor rows = at::empty_like(experts);
  const int64_t slots = experts.numel();
  if (slots == 0) return {rows, at::zeros({num_experts}, experts.options())};
  const Tensor counts = at::empty({num_experts}, experts.options());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Tensor keys = at::empty({slots}, experts.options().dtype(at::kInt));
  moe_keys_kernel<<<grid_for(slots), kThreads, 0, stream>>>(
      in<int64_t>(experts), slots, num_experts, out<int32_t>(keys), ExpertInRange());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  const auto [sorted, order] = at::sort(keys, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  moe_rows_kernel<<<grid_for(std::max(slots, num_experts)), kThreads, 0, stream>>>(
      in<int32_t>(sorted), in<int64_t>(order), slots, num_experts, out<int64_t>(rows),
      out<int64_t>(counts));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {rows, counts};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) { m.impl("_moe_sort", moe_sort); }

}  // namespace tp_ext
