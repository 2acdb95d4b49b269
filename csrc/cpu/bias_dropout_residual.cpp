// y = residual + dropout(x + bias) and its gradients dx = dropout(dy), dbias = sum of dx over rows,
// on CPU: x, residual [.., n], bias [n]. Only the seed is saved; backward draws the same words
// again.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "cpu/activation_loops.h"
#include "cpu/dropout_pass.h"
#include "ops.h"
#include "args/random.h"

namespace tp_ext {
namespace {

// Elements [begin, end): chunks contiguous in the full tensor, split again at rows of the bias
template <typename T>
void dropout_range(const T* x, const acc_t<T>* bias, const T* residual, T* y, int64_t bias_size,
                   const PhiloxKeys& keys, Dropout<acc_t<T>> dropout, const GlobalIndex& index,
                   int64_t begin, int64_t end) {
  int64_t column = bias ? begin % bias_size : 0;
  for_each_chunk(index, begin, end, kPassChunk, [&](int64_t i, uint64_t first, int64_t n) {
    for (int64_t j = 0, m; j < n; j += m) {
      m = bias ? std::min(n - j, bias_size - column) : n;
      dropout_pass<T>({keys, dropout, x + i + j, bias ? bias + column : nullptr,
                       residual ? residual + i + j : nullptr, y + i + j, nullptr, m, first + j});
      column = column + m == bias_size ? 0 : column + m;
    }
  });
}

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

Tensor bias_dropout_residual_fwd(const Tensor& x_in, const OptionalTensor& bias_in,
                                 const OptionalTensor& residual_in, const Tensor& seed, double p,
                                 int64_t local_inner, int64_t full_inner, int64_t offset) {
  const GlobalIndex given = check_global_index(x_in, "x", local_inner, full_inner, offset);
  check_dropout(x_in, "x", seed, p, given);
  check_bias_and_residual(x_in, bias_in, residual_in);
  const GlobalIndex index = with_rows(given, seed, x_in.numel());
  const bool has_bias = bias_in && bias_in->defined();
  const bool has_residual = residual_in && residual_in->defined();
  const Tensor x = x_in.contiguous();
  const Tensor bias = has_bias ? bias_in->contiguous() : Tensor();
  const Tensor residual = has_residual ? residual_in->contiguous() : Tensor();
  const Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  const PhiloxKeys keys = keys_of(seed);
  dispatch_floating(x.scalar_type(), "bias_dropout_residual", [&](auto tag) {
    using T = decltype(tag);
    const Dropout<acc_t<T>> dropout(p);
    const Tensor wide = has_bias ? widened<T>(bias) : bias;
    const auto* const bias_data = has_bias ? in<acc_t<T>>(wide) : nullptr;
    const T* const residual_data = has_residual ? in<T>(residual) : nullptr;
    const int64_t bias_size = has_bias ? bias.numel() : 1;
    at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      dropout_range<T>(in<T>(x), bias_data, residual_data, out<T>(y), bias_size, keys, dropout,
                       index, begin, end);
    });
  });
  return y;
}

Tensor dropout_bwd(const Tensor& grad, const Tensor& seed, double p, int64_t local_inner,
                   int64_t full_inner, int64_t offset) {
  return bias_dropout_residual_fwd(grad, std::nullopt, std::nullopt, seed, p, local_inner,
                                   full_inner, offset);
}

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
  m.impl("_bias_dropout_residual_fwd", bias_dropout_residual_fwd);
  m.impl("_dropout_bwd", dropout_bwd);
  m.impl("_bias_dropout_bwd", bias_dropout_bwd);
}

}  // namespace tp_ext
