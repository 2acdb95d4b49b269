// Rotary embedding on CUDA: y[t, h] = x[t, h] rotated by the angles of token t. x [(batch, seq |
// tokens), heads, head_dim], cos and sin [positions, rotary_dim / 2] in fp32 (fp64 for fp64),
// positions int64, one per token, or none.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "args/rope.h"
#include "cuda/launch.h"
#include "kernels/rope.cuh"
#include "types.h"

namespace tp_ext {
namespace {

struct PositionInRange {
  __device__ void operator()(bool ok) const {
    CUDA_KERNEL_ASSERT(ok && "positions must be in [0, rows of cos)");
  }
};

template <typename T, int N>
void launch_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, const int64_t* positions,
                 const Tensor& y, bool interleaved, bool inverse, const RopeShape& shape) {
  using A = acc_t<T>;
  const RopeLaunch by =
      rope_launch<N>(shape, choose_launch<T>(Family::kRope, shape.heads * shape.head_dim));
  const auto kernel = interleaved ? &rope_kernel<T, N, true, PositionInRange>
                                  : &rope_kernel<T, N, false, PositionInRange>;
  kernel<<<by.blocks, dim3(by.threads, by.tokens), 0, c10::cuda::getCurrentCUDAStream()>>>(
      in<T>(x), in<A>(cos), in<A>(sin), positions, out<T>(y), shape, inverse ? A(-1) : A(1),
      PositionInRange());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor rope(const Tensor& x_in, const Tensor& cos_in, const Tensor& sin_in, bool interleaved,
            bool inverse, const OptionalTensor& positions_in) {
  check_rope(x_in, cos_in, sin_in, positions_in);
  const c10::cuda::CUDAGuard guard(x_in.device());
  const Tensor x = rope_input(x_in), cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const OptionalTensor positions = positions_in ? positions_in->contiguous() : positions_in;
  const Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  if (x.numel() == 0) return y;
  const RopeShape shape = rope_shape(x, cos);
  dispatch_floating(x.scalar_type(), "_rope", [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    if (rope_vectorisable<T>(in<T>(x), in<A>(cos), in<A>(sin), out<T>(y), shape))
      launch_rope<T, kVec<T>>(x, cos, sin, in<int64_t>(positions), y, interleaved, inverse, shape);
    else
      launch_rope<T, 1>(x, cos, sin, in<int64_t>(positions), y, interleaved, inverse, shape);
  });
  return y;
}

std::tuple<Tensor, Tensor> rope_tables(const Tensor& positions_in, int64_t rotary_dim, double base,
                                       at::ScalarType dtype, GivenFrequencies given,
                                       double amplitude) {
  check_rope_tables(positions_in, rotary_dim, base, dtype, given);
  const c10::cuda::CUDAGuard guard(positions_in.device());
  const bool whole = positions_in.scalar_type() == at::kLong;
  const Tensor positions = (whole ? positions_in : positions_in.to(at::kDouble)).contiguous();
  const int64_t rows = positions.size(0), half = rotary_dim / 2;
  const Tensor cos = at::empty({rows, half}, positions.options().dtype(dtype));
  const Tensor sin = at::empty({rows, half}, cos.options());
  if (cos.numel() == 0) return {cos, sin};
  const auto fill = [&](auto position, auto entry, auto frequency) {
    using P = decltype(position);
    using A = decltype(entry);
    rope_tables_kernel<A, P>
        <<<grid_for(rows * half), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            in<P>(positions), rows, half, frequency, amplitude, out<A>(cos), out<A>(sin));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  const auto fill_of = [&](auto frequency) {
    const auto fill_from = [&](auto position) {
      dtype == at::kDouble ? fill(position, double{}, frequency)
                           : fill(position, float{}, frequency);
    };
    whole ? fill_from(int64_t{}) : fill_from(double{});
  };
  if (given) {
    RopeFrequencies frequencies{};
    std::copy(given->begin(), given->end(), frequencies.values);
    fill_of(frequencies);
  } else {
    fill_of(RopeSeries{base, half});
  }
  return {cos, sin};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_rope_tables", rope_tables);
  m.impl("_rope", rope);
}

}  // namespace tp_ext
