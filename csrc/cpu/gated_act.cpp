// gated_act on CPU: x [.., 2f] = gate | up, bias [2f] or none; y [.., f] = act(gate + bias_gate) *
// (up + bias_up). Backward recomputes both factors.

#include <torch/library.h>

#include "args/activation.h"
#include "cpu/gated_act_loops.h"
#include "types.h"

namespace tp_ext {
namespace {

struct CpuGatedAct {
  static void forward(const Tensor& x, const Tensor& bias, const Tensor& y,
                      std::string_view activation) {
    const int64_t f = y.size(-1), rows = y.numel() / f;
    dispatch_floating(x.scalar_type(), "gated_act", [&](auto zero) {
      using T = decltype(zero);
      const T* const px = in<T>(x);
      const Tensor wide = bias.defined() ? columns_of<T>(bias, 2) : bias;
      const ConstColumns<T> columns{bias.defined() ? in<acc_t<T>>(wide) : nullptr, f};
      T* const py = out<T>(y);
      dispatch_gated_activation(activation, [&](auto act) {
        using Act = decltype(act);
        for_each_row_chunk(rows, f, [&](int64_t row, int64_t column, int64_t length) {
          const T* const gate = px + row * 2 * f + column;
          T* const to = py + row * f + column;
          const int64_t ahead = row + 1 < rows;
          if (columns.data)
            forward_chunk<Act, true, T>(gate, columns.from(column), to, f, length, ahead);
          else
            forward_chunk<Act, false, T>(gate, columns, to, f, length, ahead);
        });
      });
    });
  }

  static void backward(const Tensor& grad, const Tensor& x, const Tensor& bias, const Tensor& dx,
                       const Tensor& dbias, std::string_view activation) {
    const int64_t f = grad.size(-1), rows = grad.numel() / f;
    dispatch_floating(x.scalar_type(), "gated_act", [&](auto zero) {
      using T = decltype(zero);
      const T *pg = in<T>(grad), *px = in<T>(x);
      T* const pd = out<T>(dx);
      dispatch_gated_activation(activation, [&](auto act) {
        using Act = decltype(act);
        if (!bias.defined()) {
          for_each_row_chunk(rows, f, [&](int64_t row, int64_t column, int64_t length) {
            const int64_t i = row * 2 * f + column;
            backward_chunk<Act, false, T>(pg + row * f + column, px + i, {}, pd + i, {}, f, length,
                                          row + 1 < rows);
          });
          return;
        }
        const Tensor wide = columns_of<T>(bias, 2);
        const ConstColumns<T> columns{in<acc_t<T>>(wide), f};
        for_each_row_chunk_with_sums<T>(
            rows, f, 2, out<T>(dbias),
            [&](int64_t row, int64_t column, int64_t length, MutableColumns<T> sums) {
              const int64_t i = row * 2 * f + column;
              backward_chunk<Act, true, T>(pg + row * f + column, px + i, columns.from(column),
                                           pd + i, sums, f, length, row + 1 < rows);
            });
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  using Primitives = ActivationPrimitives<CpuGatedAct, check_gated_act, 2>;
  m.impl("_gated_act_fwd", Primitives::fwd);
  m.impl("_gated_act_bwd", Primitives::bwd);
}

}  // namespace tp_ext
