// bias_act on CPU: y = act(x + bias), x [.., n], bias [n] or none; backward recomputes x + bias.

#include <torch/library.h>
#include <ATen/ops/empty.h>

#include "activation_check.h"
#include "cpu/activation_loops.h"
#include "cpu/fetch.h"
#include "cpu/simd.h"
#include "kernels/short.h"
#include "ops.h"

namespace tp_ext {
namespace {

// One element
template <typename Act, bool kBias, typename Math, typename A>
TP_HD A forward_one(A x, A bias) {
  if constexpr (kBias) x += bias;
  return static_cast<A>(Act::value(Math(x)));
}
template <typename Act, bool kBias, typename Math, typename A>
TP_HD A backward_one(A grad, A x, A bias) {
  if constexpr (kBias) x += bias;
  return static_cast<A>(Act::backward(Math(grad), Math(x)));
}

// One piece of a row, in the type of the arithmetic, while memory of the type T is fetched. bias (and
// sums) is that piece of the bias, or null.
template <typename Act, bool kBias, typename A, typename T>
TP_SIMD void forward_loop(const A* __restrict x, const A* __restrict bias, A* __restrict y,
                          int64_t n, const T* next_x, T* next_y) {
  sweep<1>(
      n,
      [&](int64_t j) __attribute__((always_inline)) {
        y[j] = forward_one<Act, kBias, math_t<T>>(x[j], kBias ? bias[j] : A(0));
      },
      next_x, next_y);
}

template <typename Act, bool kBias, typename A, typename T>
TP_SIMD void backward_loop(const A* __restrict grad, const A* __restrict x,
                           const A* __restrict bias, A* __restrict dx, A* __restrict sums,
                           int64_t n, const T* next_grad, const T* next_x, T* next_dx) {
  sweep<2>(
      n,
      [&](int64_t j) __attribute__((always_inline)) {
        const A d = backward_one<Act, kBias, math_t<T>>(grad[j], x[j], kBias ? bias[j] : A(0));
        dx[j] = d;
        if constexpr (kBias) sums[j] += d;
      },
      next_grad, next_x, next_dx);
}

// The same of n pairs
template <typename Act, bool kBias>
TP_SIMD void forward_loop(const Bf16Pair* __restrict x, const float* __restrict even_bias,
                          const float* __restrict odd_bias, Bf16Pair* __restrict y, int64_t n,
                          int64_t ahead) {
  sweep<1>(
      n,
      [&](int64_t j) __attribute__((always_inline)) {
        using Math = math_t<Bf16>;
        const uint32_t word = word_of(x[j]);
        store_pair(y[j], forward_one<Act, kBias, Math>(even_of(word), kBias ? even_bias[j] : 0.f),
                   forward_one<Act, kBias, Math>(odd_of(word), kBias ? odd_bias[j] : 0.f));
      },
      x + ahead, y + ahead);
}

template <typename Act, bool kBias>
TP_SIMD void backward_loop(const Bf16Pair* __restrict grad, const Bf16Pair* __restrict x,
                           const float* __restrict even_bias, const float* __restrict odd_bias,
                           Bf16Pair* __restrict dx, float* __restrict even_sums,
                           float* __restrict odd_sums, int64_t n, int64_t ahead) {
  sweep<2>(
      n,
      [&](int64_t j) __attribute__((always_inline)) {
        using Math = math_t<Bf16>;
        const uint32_t upstream = word_of(grad[j]), word = word_of(x[j]);
        const float even = backward_one<Act, kBias, Math>(even_of(upstream), even_of(word),
                                                          kBias ? even_bias[j] : 0.f);
        const float odd = backward_one<Act, kBias, Math>(odd_of(upstream), odd_of(word),
                                                         kBias ? odd_bias[j] : 0.f);
        store_pair(dx[j], even, odd);
        if constexpr (kBias) even_sums[j] += even, odd_sums[j] += odd;
      },
      grad + ahead, x + ahead, dx + ahead);
}

// n elements, while those `ahead` of them are fetched
template <typename Act, bool kBias, typename T>
void forward_piece(const T* x, ConstColumns<T> bias, T* y, int64_t n, int64_t ahead) {
  if constexpr (kPaired<T>) {
    const auto loop = [&](const Bf16Pair* from, Bf16Pair* to, int64_t first, int64_t pairs) {
      forward_loop<Act, kBias>(from, kBias ? bias.data + first : nullptr,
                               kBias ? bias.odd() + first : nullptr, to, pairs, ahead / 2);
    };
    loop(pairs_at(x), pairs_at(y), 0, n / 2);
    if (n % 2 != 0) {
      const Bf16Pair last = padded(x[n - 1]);
      Bf16Pair result;
      loop(&last, &result, n / 2, 1);
      y[n - 1] = result.even;
    }
  } else {
    Stage<T> from, to;
    for_each_stage<T>(n, [&](int64_t i, int64_t m) {
      forward_loop<Act, kBias>(from.load(x + i, m), kBias ? bias.data + i : nullptr,
                               to.target(y + i), m, x + i + ahead, y + i + ahead);
      to.store(y + i, m);
    });
  }
}

template <typename Act, bool kBias, typename T>
void backward_piece(const T* grad, const T* x, ConstColumns<T> bias, T* dx, MutableColumns<T> sums,
                    int64_t n, int64_t ahead) {
  if constexpr (kPaired<T>) {
    const auto loop = [&](const Bf16Pair* upstream, const Bf16Pair* from, Bf16Pair* to,
                          int64_t first, int64_t pairs) {
      backward_loop<Act, kBias>(upstream, from, kBias ? bias.data + first : nullptr,
                                kBias ? bias.odd() + first : nullptr, to,
                                kBias ? sums.data + first : nullptr,
                                kBias ? sums.odd() + first : nullptr, pairs, ahead / 2);
    };
    loop(pairs_at(grad), pairs_at(x), pairs_at(dx), 0, n / 2);
    if (n % 2 != 0) {
      const Bf16Pair last_grad = padded(grad[n - 1]), last = padded(x[n - 1]);
      Bf16Pair result;
      loop(&last_grad, &last, &result, n / 2, 1);
      dx[n - 1] = result.even;
    }
  } else {
    Stage<T> upstream, from, to;
    for_each_stage<T>(n, [&](int64_t i, int64_t m) {
      backward_loop<Act, kBias>(upstream.load(grad + i, m), from.load(x + i, m),
                                kBias ? bias.data + i : nullptr, to.target(dx + i),
                                kBias ? sums.data + i : nullptr, m, grad + i + ahead, x + i + ahead,
                                dx + i + ahead);
      to.store(dx + i, m);
    });
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
    const T* const px = in<T>(x);
    const Tensor wide = bias.defined() ? columns_of<T>(bias, 1) : bias;
    const ConstColumns<T> columns{bias.defined() ? in<acc_t<T>>(wide) : nullptr, n};
    T* const py = out<T>(y);
    dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      for_each_piece(rows, n, [&](int64_t row, int64_t column, int64_t length) {
        const int64_t i = row * n + column;
        if (columns.data)
          forward_piece<Act, true, T>(px + i, columns.from(column), py + i, length, kAhead<T>);
        else
          forward_piece<Act, false, T>(px + i, columns, py + i, length, kAhead<T>);
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
          backward_piece<Act, false, T>(pg + i, px + i, {}, pd + i, {}, length, kAhead<T>);
        });
        return;
      }
      const int64_t n = bias.numel(), rows = n ? x.numel() / n : 0;
      const Tensor wide = columns_of<T>(bias, 1);
      const ConstColumns<T> columns{in<acc_t<T>>(wide), n};
      for_each_piece_with_sums<T>(
          rows, n, 1, out<T>(dbias),
          [&](int64_t row, int64_t column, int64_t length, MutableColumns<T> sums) {
            const int64_t i = row * n + column;
            backward_piece<Act, true, T>(pg + i, px + i, columns.from(column), pd + i, sums, length,
                                         row + 1 < rows ? n : 0);
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
