// Rotary embedding on CPU: y[t, h] = x[t, h] rotated by the angles of token t. x [(batch, seq |
// tokens), heads, head_dim], cos and sin [positions, rotary_dim / 2] in fp32 (fp64 for fp64),
// positions int64, one per token, or none.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "args/rope.h"
#include "cpu/dispatch.h"
#include "kernels/rope.h"
#include "types.h"

namespace tp_ext {
namespace {

template <typename T>
inline void rotate_halves(const T* __restrict x, const acc_t<T>* __restrict cos,
                          const acc_t<T>* __restrict sin, acc_t<T> sign, int64_t half,
                          T* __restrict y) {
  for (int64_t i = 0; i < half; ++i) {
    const auto rotated = rotate(to_acc(x[i]), to_acc(x[i + half]), cos[i], sign * sin[i]);
    y[i] = from_acc<T>(rotated.first);
    y[i + half] = from_acc<T>(rotated.second);
  }
}

template <typename T>
inline void rotate_neighbours(const T* __restrict x, const acc_t<T>* __restrict cos,
                              const acc_t<T>* __restrict sin, acc_t<T> sign, int64_t half,
                              T* __restrict y) {
  for (int64_t i = 0; i < half; ++i) {
    const auto rotated = rotate(to_acc(x[2 * i]), to_acc(x[2 * i + 1]), cos[i], sign * sin[i]);
    y[2 * i] = from_acc<T>(rotated.first);
    y[2 * i + 1] = from_acc<T>(rotated.second);
  }
}

// The angles of the rows of a table, times a sign
template <typename A>
struct Angles {
  const A *cos, *sin;
  A sign;
};

template <typename T, bool kInterleaved>
TP_MULTIVERSION void rope_tokens(const T* x, Angles<acc_t<T>> angles, const int64_t* positions,
                                 T* y, RopeShape s, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const RopeToken token = rope_token(s, positions, t);
    const acc_t<T>* c = angles.cos + token.row * s.half;
    const acc_t<T>* n = angles.sin + token.row * s.half;
    for (int64_t h = 0; h < s.heads; ++h) {
      const T* from = x + token.start + h * s.head_stride;
      T* to = y + (t * s.heads + h) * s.head_dim;
      if constexpr (kInterleaved)
        rotate_neighbours<T>(from, c, n, angles.sign, s.half, to);
      else
        rotate_halves<T>(from, c, n, angles.sign, s.half, to);
      std::copy(from + 2 * s.half, from + s.head_dim, to + 2 * s.half);
    }
  }
}

void check_in_table(const Tensor& positions, int64_t rows) {
  const int64_t* values = in<int64_t>(positions);
  for (int64_t i = 0; i < positions.numel(); ++i)
    TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < rows, "positions: ", values[i],
                      " must be in [0, ", rows, "), the rows of cos and sin");
}

Tensor rope(const Tensor& x_in, const Tensor& cos_in, const Tensor& sin_in, bool interleaved,
            bool inverse, const OptionalTensor& positions_in) {
  check_rope(x_in, cos_in, sin_in, positions_in);
  const Tensor x = rope_input(x_in), cos = cos_in.contiguous(), sin = sin_in.contiguous();
  const OptionalTensor positions = positions_in ? positions_in->contiguous() : positions_in;
  if (positions) check_in_table(*positions, cos.size(0));
  const Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  const RopeShape shape = rope_shape(x, cos);
  const int64_t per_token = std::max<int64_t>(1, shape.heads * shape.head_dim);
  dispatch_floating(x.scalar_type(), "_rope", [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const auto tokens = interleaved ? &rope_tokens<T, true> : &rope_tokens<T, false>;
    at::parallel_for(0, shape.tokens, std::max<int64_t>(1, kGrain / per_token),
                     [&](int64_t begin, int64_t end) {
                       tokens(in<T>(x), {in<A>(cos), in<A>(sin), inverse ? A(-1) : A(1)},
                              in<int64_t>(positions), out<T>(y), shape, begin, end);
                     });
  });
  return y;
}

template <typename A>
TP_MULTIVERSION void fill_row(double position, const double* __restrict frequencies,
                              double amplitude, int64_t half, A* __restrict cos,
                              A* __restrict sin) {
  for (int64_t i = 0; i < half; ++i) {
    const CosSin unit = cos_sin_of(position * frequencies[i]);
    cos[i] = static_cast<A>(amplitude * unit.cos);
    sin[i] = static_cast<A>(amplitude * unit.sin);
  }
}

std::tuple<Tensor, Tensor> rope_tables(const Tensor& positions_in, int64_t rotary_dim, double base,
                                       at::ScalarType dtype, GivenFrequencies given,
                                       double amplitude) {
  check_rope_tables(positions_in, rotary_dim, base, dtype, given);
  const Tensor positions = positions_in.to(at::kDouble).contiguous();
  const int64_t rows = positions.size(0), half = rotary_dim / 2;
  const Tensor cos = at::empty({rows, half}, positions.options().dtype(dtype));
  const Tensor sin = at::empty({rows, half}, cos.options());
  std::vector<double> frequencies(half);
  for (int64_t i = 0; i < half; ++i)
    frequencies[i] = given ? (*given)[i] : rope_frequency(base, i, half);
  const auto fill = [&](auto tag) {
    using A = decltype(tag);
    at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / 8 / std::max<int64_t>(half, 1)),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t t = begin; t < end; ++t)
                         fill_row<A>(in<double>(positions)[t], frequencies.data(), amplitude, half,
                                     out<A>(cos) + t * half, out<A>(sin) + t * half);
                     });
  };
  dtype == at::kDouble ? fill(double{}) : fill(float{});
  return {cos, sin};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_rope_tables", rope_tables);
  m.impl("_rope", rope);
}

}  // namespace tp_ext
