// gated_act on CPU: x [.., 2f] = gate | up, bias [2f] or none; y [.., f] = act(gate + bias_gate) *
// (up + bias_up). Backward recomputes both factors.

#include <torch/library.h>
#include <ATen/ops/empty.h>

#include "activation_check.h"
#include "cpu/activation_loops.h"
#include "cpu/simd.h"
#include "kernels/short.h"
#include "ops.h"

namespace tp_ext {
namespace {

// One piece of a row, in the type of the arithmetic; bias and sums are null without a bias.
template <typename Act, bool kBias, typename Math, typename A>
TP_SIMD void forward_loop(const A* __restrict gate, const A* __restrict up,
                          const A* __restrict bias_gate, const A* __restrict bias_up,
                          A* __restrict y, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    A a = gate[j], b = up[j];
    if constexpr (kBias) a += bias_gate[j], b += bias_up[j];
    y[j] = static_cast<A>(Act::value(Math(a))) * b;
  }
}

template <typename Act, bool kBias, typename A>
TP_SIMD void backward_loop(const A* __restrict grad, const A* __restrict gate,
                           const A* __restrict up, const A* __restrict bias_gate,
                           const A* __restrict bias_up, A* __restrict dgate, A* __restrict dup,
                           A* __restrict sums_gate, A* __restrict sums_up, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    A a = gate[j], b = up[j];
    if constexpr (kBias) a += bias_gate[j], b += bias_up[j];
    const A g = grad[j];
    const ValueSlope<A> act = Act::value_slope(a);
    const A da = g * b * act.slope, db = g * act.value;
    dgate[j] = da;
    dup[j] = db;
    if constexpr (kBias) sums_gate[j] += da, sums_up[j] += db;
  }
}

// gate and up, and their halves of bias and sums, are f apart.
template <typename Act, bool kBias, typename T>
void forward_piece(const T* gate, const acc_t<T>* bias, T* y, int64_t f, int64_t n) {
  Stage<T> from_gate, from_up, to;
  for_each_stage<T>(n, [&](int64_t i, int64_t m) {
    const acc_t<T>* const bias_gate = kBias ? bias + i : nullptr;
    forward_loop<Act, kBias, math_t<T>>(from_gate.load(gate + i, m), from_up.load(gate + f + i, m),
                                        bias_gate, kBias ? bias_gate + f : nullptr,
                                        to.target(y + i), m);
    to.store(y + i, m);
  });
}

template <typename Act, bool kBias, typename T>
void backward_piece(const T* grad, const T* gate, const acc_t<T>* bias, T* dgate, acc_t<T>* sums,
                    int64_t f, int64_t n) {
  Stage<T> upstream, from_gate, from_up, to_gate, to_up;
  for_each_stage<T>(n, [&](int64_t i, int64_t m) {
    const acc_t<T>* const bias_gate = kBias ? bias + i : nullptr;
    acc_t<T>* const sums_gate = kBias ? sums + i : nullptr;
    backward_loop<Act, kBias>(
        upstream.load(grad + i, m), from_gate.load(gate + i, m), from_up.load(gate + f + i, m),
        bias_gate, kBias ? bias_gate + f : nullptr, to_gate.target(dgate + i),
        to_up.target(dgate + f + i), sums_gate, kBias ? sums_gate + f : nullptr, m);
    to_gate.store(dgate + i, m);
    to_up.store(dgate + f + i, m);
  });
}

Tensor gated_act_fwd(const Tensor& x_any, const OptionalTensor& bias_any,
                     std::string_view activation) {
  check_gated_act(x_any, bias_any, activation);
  const Tensor x = x_any.contiguous();
  const Tensor bias = bias_any.has_value() ? bias_any->contiguous() : Tensor();
  std::vector<int64_t> shape = x.sizes().vec();
  const int64_t f = shape.back() /= 2, rows = f ? x.numel() / (2 * f) : 0;
  const Tensor y = at::empty(shape, x.options());
  dispatch_floating(x.scalar_type(), "gated_act", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const T* const px = in<T>(x);
    const Tensor wide = bias.defined() ? widened<T>(bias) : bias;
    const A* const pb = bias.defined() ? in<A>(wide) : nullptr;
    T* const py = out<T>(y);
    dispatch_gated_activation(activation, [&](auto act) {
      using Act = decltype(act);
      for_each_piece(rows, f, [&](int64_t row, int64_t column, int64_t length) {
        const T* const gate = px + row * 2 * f + column;
        if (pb)
          forward_piece<Act, true, T>(gate, pb + column, py + row * f + column, f, length);
        else
          forward_piece<Act, false, T>(gate, nullptr, py + row * f + column, f, length);
      });
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> gated_act_bwd(const Tensor& grad_any, const Tensor& x_any,
                                         const OptionalTensor& bias_any,
                                         std::string_view activation) {
  check_gated_act(x_any, bias_any, activation);
  check_activation_grad(grad_any, x_any, 2);
  const Tensor x = x_any.contiguous(), grad = grad_any.contiguous();
  const Tensor bias = bias_any.has_value() ? bias_any->contiguous() : Tensor();
  const Tensor dx = at::empty(x.sizes(), x.options());
  const Tensor dbias = at::empty({bias.defined() ? bias.numel() : 0}, x.options());
  const int64_t f = x.size(-1) / 2, rows = f ? x.numel() / (2 * f) : 0;
  dispatch_floating(x.scalar_type(), "gated_act", [&](auto zero) {
    using T = decltype(zero);
    const T *pg = in<T>(grad), *px = in<T>(x);
    T* const pd = out<T>(dx);
    dispatch_gated_activation(activation, [&](auto act) {
      using Act = decltype(act);
      if (!bias.defined()) {
        for_each_piece(rows, f, [&](int64_t row, int64_t column, int64_t length) {
          const int64_t i = row * 2 * f + column;
          backward_piece<Act, false, T>(pg + row * f + column, px + i, nullptr, pd + i, nullptr, f,
                                        length);
        });
        return;
      }
      const Tensor wide = widened<T>(bias);
      const acc_t<T>* const pb = in<acc_t<T>>(wide);
      for_each_piece_with_sums<T>(rows, f, 2, out<T>(dbias),
                                  [&](int64_t row, int64_t column, int64_t length, acc_t<T>* sums) {
                                    const int64_t i = row * 2 * f + column;
                                    backward_piece<Act, true, T>(pg + row * f + column, px + i,
                                                                 pb + column, pd + i, sums, f,
                                                                 length);
                                  });
    });
  });
  return {dx, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_gated_act_fwd", gated_act_fwd);
  m.impl("_gated_act_bwd", gated_act_bwd);
}

}  // namespace tp_ext
