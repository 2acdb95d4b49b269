// Rotary embedding on CPU: y[t, h] = x[t, h] turned by the angles of token t.
// x [tokens, heads, head_dim], cos and sin [tokens, rotary_dim / 2] in fp32 (fp64 for fp64).

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/simd.h"
#include "kernels/rope.h"
#include "ops.h"
#include "rope_checks.h"

namespace tp_ext {
namespace {

template <typename T>
inline void rotate_halves(const T* __restrict x, const acc_t<T>* __restrict cos,
                          const acc_t<T>* __restrict sin, acc_t<T> sign, int64_t half,
                          T* __restrict y) {
  for (int64_t i = 0; i < half; ++i) {
    const auto turned = rotate(to_acc(x[i]), to_acc(x[i + half]), cos[i], sign * sin[i]);
    y[i] = from_acc<T>(turned.first);
    y[i + half] = from_acc<T>(turned.second);
  }
}

template <typename T>
inline void rotate_neighbours(const T* __restrict x, const acc_t<T>* __restrict cos,
                              const acc_t<T>* __restrict sin, acc_t<T> sign, int64_t half,
                              T* __restrict y) {
  for (int64_t i = 0; i < half; ++i) {
    const auto turned = rotate(to_acc(x[2 * i]), to_acc(x[2 * i + 1]), cos[i], sign * sin[i]);
    y[2 * i] = from_acc<T>(turned.first);
    y[2 * i + 1] = from_acc<T>(turned.second);
  }
}

template <typename T, bool kInterleaved>
TP_SIMD void rope_tokens(const T* x, const acc_t<T>* cos, const acc_t<T>* sin, T* y, RopeShape s,
                         acc_t<T> sign, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t)
    for (int64_t h = 0; h < s.heads; ++h) {
      const T* from = x + t * s.token_stride + h * s.head_dim;
      T* to = y + (t * s.heads + h) * s.head_dim;
      if constexpr (kInterleaved)
        rotate_neighbours<T>(from, cos + t * s.half, sin + t * s.half, sign, s.half, to);
      else
        rotate_halves<T>(from, cos + t * s.half, sin + t * s.half, sign, s.half, to);
      std::copy(from + 2 * s.half, from + s.head_dim, to + 2 * s.half);
    }
}

Tensor rope(const Tensor& x_in, const Tensor& cos_in, const Tensor& sin_in, bool interleaved,
            bool inverse) {
  check_rope(x_in, cos_in, sin_in);
  const Tensor x = rope_input(x_in), cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  const RopeShape shape = rope_shape(x, cos);
  const int64_t per_token = std::max<int64_t>(1, shape.heads * shape.head_dim);
  dispatch_floating(x.scalar_type(), "_rope", [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const auto tokens = interleaved ? &rope_tokens<T, true> : &rope_tokens<T, false>;
    at::parallel_for(0, shape.tokens, std::max<int64_t>(1, kGrain / per_token),
                     [&](int64_t begin, int64_t end) {
                       tokens(in<T>(x), in<A>(cos), in<A>(sin), out<T>(y), shape,
                              inverse ? A(-1) : A(1), begin, end);
                     });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) { m.impl("_rope", rope); }

}  // namespace tp_ext
