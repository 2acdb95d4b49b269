// Fills a tensor with random values that depend only on the seed and the global index, on CUDA: the
// same bits as on CPU.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "args/random_fill.h"
#include "cuda/launch.h"
#include "kernels/random_fill.cuh"
#include "types.h"

namespace tp_ext {
namespace {

struct Fill {
  template <typename Draw>
  void operator()(Tensor& self, const Tensor& seed, Draw draw, const char* op, int64_t local_inner,
                  int64_t full_inner, int64_t offset) const {
    check_seed(seed, self, "self");
    const GlobalIndex index = check_global_index(self, "self", local_inner, full_inner, offset);
    const int64_t n = self.numel();
    if (n == 0) return;
    const c10::cuda::CUDAGuard guard(self.device());
    const bool direct = self.is_contiguous();
    const Tensor to = direct ? self : at::empty_like(self, at::MemoryFormat::Contiguous);
    dispatch_floating(self.scalar_type(), op, [&](auto tag) {
      using T = decltype(tag);
      const int blocks = fill_blocks(n, choose_launch<T>(Family::kRandomFill, local_inner));
      random_fill_kernel<<<blocks, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          out<T>(to), n, in<int64_t>(seed), draw, index);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
    if (!direct) self.copy_(to);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  using Primitives = RandomFillPrimitives<Fill>;
  m.impl("_philox_uniform_", Primitives::philox_uniform_);
  m.impl("_philox_normal_", Primitives::philox_normal_);
  m.impl("_philox_truncated_normal_", Primitives::philox_truncated_normal_);
}

}  // namespace tp_ext
