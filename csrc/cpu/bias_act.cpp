// bias_act on CPU: y = act(x + bias), x [.., n], bias [n] or none; backward recomputes x + bias.

#include <torch/library.h>
#include <ATen/ops/empty.h>

#include "activation_check.h"
#include "cpu/activation_loops.h"
#include "cpu/simd.h"
#include "kernels/short.h"
#include "ops.h"

namespace tp_ext {
namespace {

// One piece of a row, in the type of the arithmetic. bias (and sums) is that piece of the bias, or
// null.
template <typename Act, bool kBias, typename Math, typename A>
TP_SIMD void forward_loop(const A* __restrict x, const A* __restrict bias, A* __restrict y,
                          int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    A v = x[j];
    if constexpr (kBias) v += bias[j];
    y[j] = static_cast<A>(Act::value(Math(v)));
  }
}

template <typename Act, bool kBias, typename A>
TP_SIMD void backward_loop(const A* __restrict grad, const A* __restrict x,
                           const A* __restrict bias, A* __restrict dx, A* __restrict sums,
                           int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    A v = x[j];
    if constexpr (kBias) v += bias[j];
    const A d = Act::backward(grad[j], v);
    dx[j] = d;
    if constexpr (kBias) sums[j] += d;
  }
}

template <typename Act, bool kBias, typename T>
void forward_piece(const T* x, const acc_t<T>* bias, T* y, int64_t n) {
  Stage<T> from, to;
  for_each_stage<T>(n, [&](int64_t i, int64_t m) {
    forward_loop<Act, kBias, math_t<T>>(from.load(x + i, m), kBias ? bias + i : nullptr,
                                        to.target(y + i), m);
    to.store(y + i, m);
  });
}

template <typename Act, bool kBias, typename T>
void backward_piece(const T* grad, const T* x, const acc_t<T>* bias, T* dx, acc_t<T>* sums,
                    int64_t n) {
  Stage<T> upstream, from, to;
  for_each_stage<T>(n, [&](int64_t i, int64_t m) {
    backward_loop<Act, kBias>(upstream.load(grad + i, m), from.load(x + i, m),
                              kBias ? bias + i : nullptr, to.target(dx + i),
                              kBias ? sums + i : nullptr, m);
    to.store(dx + i, m);
  });
}

Tensor bias_act_fwd(const Tensor& x_any, const OptionalTensor& bias_any,
                    std::string_view activation) {
  check_bias_act(x_any, bias_any, activation);
  const Tensor x = x_any.contiguous();
  const Tensor bias = bias_any.has_value() ? bias_any->contiguous() : Tensor();
  const Tensor y = at::empty(x.sizes(), x.options());
  const int64_t n = bias.defined() ? bias.numel() : x.numel(), rows = n ? x.numel() / n : 0;
  dispatch_floating(x.scalar_type(), "bias_act", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const T* const px = in<T>(x);
    const Tensor wide = bias.defined() ? widened<T>(bias) : bias;
    const A* const pb = bias.defined() ? in<A>(wide) : nullptr;
    T* const py = out<T>(y);
    dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      for_each_piece(rows, n, [&](int64_t row, int64_t column, int64_t length) {
        const int64_t i = row * n + column;
        if (pb)
          forward_piece<Act, true, T>(px + i, pb + column, py + i, length);
        else
          forward_piece<Act, false, T>(px + i, nullptr, py + i, length);
      });
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> bias_act_bwd(const Tensor& grad_any, const Tensor& x_any,
                                        const OptionalTensor& bias_any,
                                        std::string_view activation) {
  check_bias_act(x_any, bias_any, activation);
  check_activation_grad(grad_any, x_any, 1);
  const Tensor x = x_any.contiguous(), grad = grad_any.contiguous();
  const Tensor bias = bias_any.has_value() ? bias_any->contiguous() : Tensor();
  const Tensor dx = at::empty(x.sizes(), x.options());
  const Tensor dbias = at::empty({bias.defined() ? bias.numel() : 0}, x.options());
  dispatch_floating(x.scalar_type(), "bias_act", [&](auto zero) {
    using T = decltype(zero);
    const T *pg = in<T>(grad), *px = in<T>(x);
    T* const pd = out<T>(dx);
    dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      if (!bias.defined()) {
        for_each_piece(1, x.numel(), [&](int64_t, int64_t i, int64_t length) {
          backward_piece<Act, false, T>(pg + i, px + i, nullptr, pd + i, nullptr, length);
        });
        return;
      }
      const int64_t n = bias.numel(), rows = n ? x.numel() / n : 0;
      const Tensor wide = widened<T>(bias);
      const acc_t<T>* const pb = in<acc_t<T>>(wide);
      for_each_piece_with_sums<T>(rows, n, 1, out<T>(dbias),
                                  [&](int64_t row, int64_t column, int64_t length, acc_t<T>* sums) {
                                    const int64_t i = row * n + column;
                                    backward_piece<Act, true, T>(pg + i, px + i, pb + column,
                                                                 pd + i, sums, length);
                                  });
    });
  });
  return {dx, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_bias_act_fwd", bias_act_fwd);
  m.impl("_bias_act_bwd", bias_act_bwd);
}

}  // namespace tp_ext
