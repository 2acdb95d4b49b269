// Rotary embedding on CUDA: y[t, h] = x[t, h] turned by the angles of token t.
// x [tokens, heads, head_dim], cos and sin [tokens, rotary_dim / 2] in fp32 (fp64 for fp64).

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "cuda/launch.h"
#include "kernels/rope.cuh"
#include "ops.h"
#include "rope_checks.h"

namespace tp_ext {
namespace {

template <typename T, int N>
void launch_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& y,
                 bool interleaved, bool inverse, const RopeShape& shape) {
  using A = acc_t<T>;
  const int64_t work = shape.heads * ((shape.head_dim - shape.half) / N);
  const auto width = static_cast<unsigned>(std::min<int64_t>(kThreads, (work + 31) / 32 * 32));
  const dim3 block(width, kThreads / width);
  const int grid = grid_for(shape.tokens, static_cast<int>(block.y));
  const auto kernel = interleaved ? &rope_kernel<T, N, true> : &rope_kernel<T, N, false>;
  kernel<<<grid, block, 0, c10::cuda::getCurrentCUDAStream()>>>(
      in<T>(x), in<A>(cos), in<A>(sin), out<T>(y), shape, inverse ? A(-1) : A(1));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor rope(const Tensor& x_in, const Tensor& cos_in, const Tensor& sin_in, bool interleaved,
            bool inverse) {
  check_rope(x_in, cos_in, sin_in);
  const c10::cuda::CUDAGuard guard(x_in.device());
  const Tensor x = rope_input(x_in), cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  if (x.numel() == 0) return y;
  const RopeShape shape = rope_shape(x, cos);
  dispatch_floating(x.scalar_type(), "_rope", [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    if (rope_vectorisable<T>(in<T>(x), in<A>(cos), in<A>(sin), out<T>(y), shape))
      launch_rope<T, kVec<T>>(x, cos, sin, y, interleaved, inverse, shape);
    else
      launch_rope<T, 1>(x, cos, sin, y, interleaved, inverse, shape);
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) { m.impl("_rope", rope); }

}  // namespace tp_ext
