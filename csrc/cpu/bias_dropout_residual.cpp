// y = residual + dropout(x + bias) and its gradients dx = dropout(dy), dbias = sum of dx over rows,
// on CPU: x, residual [.., n], bias [n]. Only the seed is saved; backward draws the same words
// again.

#include <torch/library.h>

#include "args/bias_dropout_residual.h"
#include "cpu/activation_loops.h"
#include "cpu/dropout_pass.h"

namespace tp_ext {
namespace {

PhiloxKeys keys_of(const Tensor& seed) { return PhiloxKeys(seed_and_rows(seed).seed()); }

// The index of elements whose first row, or each row, is given with the seed. Rows that follow one
// another in both tensors become one, which is faster.
GlobalIndex with_rows(GlobalIndex index, const Tensor& seed, int64_t elements) {
  const SeedAndRows given = seed_and_rows(seed);
  if (given.size == 1) return index;
  if (given.size > 2) {
    index.rows = given.data + 1;
    return index;
  }
  index.offset += given.row(0) * index.full_inner;
  if (index.local_inner == index.full_inner && elements > 0)
    index.local_inner = index.full_inner = elements;
  return index;
}

struct CpuDropout {
  static void forward(const Tensor& x, const Tensor& bias, const Tensor& residual, const Tensor& y,
                      const Tensor& seed, double p, const GlobalIndex& given) {
    const GlobalIndex index = with_rows(given, seed, x.numel());
    const PhiloxKeys keys = keys_of(seed);
    dispatch_floating(x.scalar_type(), "bias_dropout_residual", [&](auto tag) {
      using T = decltype(tag);
      const Dropout<acc_t<T>> dropout(p);
      const Tensor wide = bias.defined() ? widened<T>(bias) : bias;
      const auto* const b = bias.defined() ? in<acc_t<T>>(wide) : nullptr;
      const T* const r = residual.defined() ? in<T>(residual) : nullptr;
      const int64_t bias_size = bias.defined() ? bias.numel() : 1;
      // Chunks contiguous in the full tensor, split again at rows of the bias
      at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
        int64_t column = b ? begin % bias_size : 0;
        for_each_chunk(index, begin, end, kPassChunk, [&](int64_t i, uint64_t first, int64_t n) {
          for (int64_t j = 0, m; j < n; j += m) {
            m = b ? std::min(n - j, bias_size - column) : n;
            dropout_pass<T>({keys, dropout, in<T>(x) + i + j, b ? b + column : nullptr,
                             r ? r + i + j : nullptr, out<T>(y) + i + j, nullptr, m, first + j});
            column = column + m == bias_size ? 0 : column + m;
          }
        });
      });
    });
  }
};

std::tuple<Tensor, Tensor> bias_dropout_bwd(const Tensor& grad_in, const Tensor& seed, double p,
                                            int64_t local_inner, int64_t full_inner,
                                            int64_t offset) {
  const GlobalIndex given = check_global_index(grad_in, "grad", local_inner, full_inner, offset);
  check_dropout(grad_in, "grad", seed, p, given);
  check_bias_rows(grad_in, "grad");
  const GlobalIndex index = with_rows(given, seed, grad_in.numel());
  const Tensor grad = grad_in.contiguous();
  const int64_t n = grad.size(-1), rows = n ? grad.numel() / n : 0;
  const Tensor dx = at::empty_like(grad, at::MemoryFormat::Contiguous);
  const Tensor dbias = at::empty({n}, grad.options());
  const PhiloxKeys keys = keys_of(seed);
  dispatch_floating(grad.scalar_type(), "bias_dropout", [&](auto tag) {
    using T = decltype(tag);
    using A = acc_t<T>;
    const Dropout<A> dropout(p);
    for_each_row_chunk_with_sums<T, A>(
        rows, n, 1, out<T>(dbias),
        [&](int64_t row, int64_t column, int64_t length, MutableColumns<A> sums) {
          const int64_t begin = row * n + column;
          for_each_chunk(index, begin, begin + length, kPassChunk,
                         [&](int64_t i, uint64_t first, int64_t m) {
                           dropout_pass<T>({keys, dropout, in<T>(grad) + i, nullptr, nullptr,
                                            out<T>(dx) + i, sums.data + (i - begin), m, first});
                         });
        });
  });
  return {dx, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  using Primitives = DropoutPrimitives<CpuDropout>;
  m.impl("_bias_dropout_residual_fwd", Primitives::fwd);
  m.impl("_dropout_bwd", Primitives::bwd);
  m.impl("_bias_dropout_bwd", bias_dropout_bwd);
}

}  // namespace tp_ext
