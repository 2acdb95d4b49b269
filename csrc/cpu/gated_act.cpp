// gated_act on CPU: x [.., 2f] = gate | up, bias [2f] or none; y [.., f] = act(gate + bias_gate) *
// (up + bias_up). Backward recomputes both factors.

#include <torch/library.h>
#include <ATen/ops/empty.h>

#include "activation_check.h"
#include "cpu/activation_loops.h"
#include "cpu/simd.h"
#include "kernels/activation.h"
#include "ops.h"

namespace tp_ext {
namespace {

// One piece of a row: gate and up, and their halves of bias and sums (or null), are f apart.
template <typename Act, bool kBias, typename T>
TP_SIMD void forward_piece(const T* __restrict gate, const T* __restrict bias, T* __restrict y,
                           int64_t f, int64_t n) {
  const T *up = gate + f, *bias_up = bias + f;
  for (int64_t j = 0; j < n; ++j) {
    acc_t<T> a = to_acc(gate[j]), b = to_acc(up[j]);
    if constexpr (kBias) a += to_acc(bias[j]), b += to_acc(bias_up[j]);
    y[j] = from_acc<T>(Act::value(a) * b);
  }
}

template <typename Act, bool kBias, typename T>
TP_SIMD void backward_piece(const T* __restrict grad, const T* __restrict gate,
                            const T* __restrict up, const T* __restrict bias_gate,
                            const T* __restrict bias_up, T* __restrict dgate, T* __restrict dup,
                            acc_t<T>* __restrict sums_gate, acc_t<T>* __restrict sums_up,
                            int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    acc_t<T> a = to_acc(gate[j]), b = to_acc(up[j]);
    if constexpr (kBias) a += to_acc(bias_gate[j]), b += to_acc(bias_up[j]);
    const acc_t<T> g = to_acc(grad[j]);
    const ValueSlope<acc_t<T>> act = Act::value_slope(a);
    const acc_t<T> da = g * b * act.slope, db = g * act.value;
    dgate[j] = from_acc<T>(da);
    dup[j] = from_acc<T>(db);
    if constexpr (kBias) sums_gate[j] += da, sums_up[j] += db;
  }
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
    const T *px = in<T>(x), *pb = bias.defined() ? in<T>(bias) : nullptr;
    T* const py = out<T>(y);
    dispatch_gated_activation(activation, [&](auto act) {
      using Act = decltype(act);
      for_each_piece(rows, f, [&](int64_t row, int64_t column, int64_t length) {
        const T* const gate = px + row * 2 * f + column;
        if (pb)
          forward_piece<Act, true>(gate, pb + column, py + row * f + column, f, length);
        else
          forward_piece<Act, false>(gate, gate, py + row * f + column, f, length);
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
          backward_piece<Act, false, T>(pg + row * f + column, px + i, px + i + f, nullptr, nullptr,
                                        pd + i, pd + i + f, nullptr, nullptr, length);
        });
        return;
      }
      const T* const pb = in<T>(bias);
      for_each_piece_with_sums<T>(
          rows, f, 2, out<T>(dbias),
          [&](int64_t row, int64_t column, int64_t length, acc_t<T>* sums) {
            const int64_t i = row * 2 * f + column;
            backward_piece<Act, true>(pg + row * f + column, px + i, px + i + f, pb + column,
                                      pb + column + f, pd + i, pd + i + f, sums, sums + f, length);
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
