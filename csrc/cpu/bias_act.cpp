// bias_act on CPU: y = act(x + bias), x [.., n], bias [n] or none; backward recomputes x + bias.

#include <torch/library.h>
#include <ATen/ops/empty.h>

#include "activation_check.h"
#include "cpu/activation_loops.h"
#include "cpu/simd.h"
#include "kernels/activation.h"
#include "ops.h"

namespace tp_ext {
namespace {

// One piece of a row. bias (and sums) is that piece of the bias, or null.
template <typename Act, bool kBias, typename T>
TP_SIMD void forward_piece(const T* __restrict x, const T* __restrict bias, T* __restrict y,
                           int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    acc_t<T> v = to_acc(x[j]);
    if constexpr (kBias) v += to_acc(bias[j]);
    y[j] = from_acc<T>(Act::value(v));
  }
}

template <typename Act, bool kBias, typename T>
TP_SIMD void backward_piece(const T* __restrict grad, const T* __restrict x,
                            const T* __restrict bias, T* __restrict dx, acc_t<T>* __restrict sums,
                            int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    acc_t<T> v = to_acc(x[j]);
    if constexpr (kBias) v += to_acc(bias[j]);
    const acc_t<T> d = Act::backward(to_acc(grad[j]), v);
    dx[j] = from_acc<T>(d);
    if constexpr (kBias) sums[j] += d;
  }
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
    const T *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
    T* const py = out<T>(y);
    dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      for_each_piece(rows, n, [&](int64_t row, int64_t column, int64_t length) {
        const int64_t i = row * n + column;
        if (pb)
          forward_piece<Act, true>(px + i, pb + column, py + i, length);
        else
          forward_piece<Act, false>(px + i, pb, py + i, length);
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
      const T* const pb = in<T>(bias);
      for_each_piece_with_sums<T>(rows, n, 1, out<T>(dbias),
                                  [&](int64_t row, int64_t column, int64_t length, acc_t<T>* sums) {
                                    const int64_t i = row * n + column;
                                    backward_piece<Act, true>(pg + i, px + i, pb + column, pd + i,
                                                              sums, length);
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
