// bias_act on CPU: y = act(x + bias), x [.., n], bias [n] or none; backward recomputes x + bias.

#include <torch/library.h>

#include "args/activation.h"
#include "cpu/bias_act_loops.h"
#include "types.h"

namespace tp_ext {
namespace {

struct CpuBiasAct {
  static void forward(const Tensor& x, const Tensor& bias, const Tensor& y,
                      std::string_view activation) {
    const int64_t n = bias.defined() ? bias.numel() : x.numel(), rows = x.numel() / n;
    dispatch_floating(x.scalar_type(), "bias_act", [&](auto zero) {
      using T = decltype(zero);
      const T* const px = in<T>(x);
      const Tensor wide = bias.defined() ? columns_of<T>(bias, 1) : bias;
      const ConstColumns<T> columns{bias.defined() ? in<acc_t<T>>(wide) : nullptr, n};
      T* const py = out<T>(y);
      dispatch_activation(activation, [&](auto act) {
        using Act = decltype(act);
        for_each_row_chunk(rows, n, [&](int64_t row, int64_t column, int64_t length) {
          const int64_t i = row * n + column;
          if (columns.data)
            forward_chunk<Act, true, T>(px + i, columns.from(column), py + i, length, kAhead<T>);
          else
            forward_chunk<Act, false, T>(px + i, columns, py + i, length, kAhead<T>);
        });
      });
    });
  }

  static void backward(const Tensor& grad, const Tensor& x, const Tensor& bias, const Tensor& dx,
                       const Tensor& dbias, std::string_view activation) {
    dispatch_floating(x.scalar_type(), "bias_act", [&](auto zero) {
      using T = decltype(zero);
      const T *pg = in<T>(grad), *px = in<T>(x);
      T* const pd = out<T>(dx);
      dispatch_activation(activation, [&](auto act) {
        using Act = decltype(act);
        if (!bias.defined()) {
          for_each_row_chunk(1, x.numel(), [&](int64_t, int64_t i, int64_t length) {
            backward_chunk<Act, false, T>(pg + i, px + i, {}, pd + i, {}, length, kAhead<T>);
          });
          return;
        }
        const int64_t n = bias.numel(), rows = n ? x.numel() / n : 0;
        const Tensor wide = columns_of<T>(bias, 1);
        const ConstColumns<T> columns{in<acc_t<T>>(wide), n};
        for_each_row_chunk_with_sums<T>(
            rows, n, 1, out<T>(dbias),
            [&](int64_t row, int64_t column, int64_t length, MutableColumns<T> sums) {
              const int64_t i = row * n + column;
              backward_chunk<Act, true, T>(pg + i, px + i, columns.from(column), pd + i, sums,
                                           length, row + 1 < rows ? n : 0);
            });
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  using Primitives = ActivationPrimitives<CpuBiasAct, check_bias_act, 1>;
  m.impl("_bias_act_fwd", Primitives::fwd);
  m.impl("_bias_act_bwd", Primitives::bwd);
}

}  // namespace tp_ext
