// Fills a tensor with uniform or normal values that depend on the seed and the global index alone,
// on CUDA: the same bits as on CPU.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "cuda/launch.h"
#include "kernels/random_fill.cuh"
#include "ops.h"
#include "random_checks.h"

namespace tp_ext {
namespace {

template <bool kNormal>
void fill(Tensor& self, const Tensor& seed, Affine affine, int64_t local_inner, int64_t full_inner,
          int64_t offset) {
  check_floating(self, "self");
  check_seed(seed, self, "self");
  const GlobalIndex index = check_global_index(self, "self", local_inner, full_inner, offset);
  const int64_t n = self.numel();
  if (n == 0) return;
  const c10::cuda::CUDAGuard guard(self.device());
  const bool direct = self.is_contiguous();
  const Tensor to = direct ? self : at::empty_like(self, at::MemoryFormat::Contiguous);
  dispatch_floating(self.scalar_type(), kNormal ? "_philox_normal_" : "_philox_uniform_",
                    [&](auto tag) {
                      using T = decltype(tag);
                      random_fill_kernel<T, kNormal>
                          <<<grid_for(n / 4 + 1), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                              out<T>(to), n, in<int64_t>(seed), affine, index);
                      C10_CUDA_KERNEL_LAUNCH_CHECK();
                    });
  if (!direct) self.copy_(to);
}

void philox_uniform_(Tensor& self, const Tensor& seed, double low, double high, int64_t local_inner,
                     int64_t full_inner, int64_t offset) {
  fill<false>(self, seed, {low, high - low}, local_inner, full_inner, offset);
}

void philox_normal_(Tensor& self, const Tensor& seed, double mean, double std, int64_t local_inner,
                    int64_t full_inner, int64_t offset) {
  fill<true>(self, seed, {mean, std}, local_inner, full_inner, offset);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_philox_uniform_", philox_uniform_);
  m.impl("_philox_normal_", philox_normal_);
}

}  // namespace tp_ext
