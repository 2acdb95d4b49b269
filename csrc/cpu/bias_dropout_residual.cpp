// y = residual + dropout(x + bias) and its gradient dx = dropout(dy), on CPU: x, residual [.., n],
// bias [n]. Nothing but the seed is saved; backward draws the same words again.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "cpu/activation_loops.h"
#include "cpu/philox_words.h"
#include "cpu/simd.h"
#include "kernels/dropout.h"
#include "ops.h"
#include "random_checks.h"

namespace tp_ext {
namespace {

template <bool kBias, bool kResidual, typename A>
TP_SIMD void dropout_loop(const A* __restrict x, const A* __restrict bias,
                          const A* __restrict residual, A* __restrict y,
                          const uint32_t* __restrict words, int64_t n, Dropout<A> dropout) {
  for (int64_t i = 0; i < n; ++i) {
    A value = x[i];
    if constexpr (kBias) value += bias[i];
    value *= dropout.factor(words[i]);
    if constexpr (kResidual) value += residual[i];
    y[i] = value;
  }
}

// One run of elements; bias already points at the first one's
template <typename T, bool kBias, bool kResidual>
void dropout_run(const T* x, const acc_t<T>* bias, const T* residual, T* y, const uint32_t* words,
                 int64_t n, Dropout<acc_t<T>> dropout) {
  Stage<T> from, from_residual, to;
  for_each_stage<T>(n, [&](int64_t i, int64_t m) {
    dropout_loop<kBias, kResidual>(from.load(x + i, m), kBias ? bias + i : nullptr,
                                   kResidual ? from_residual.load(residual + i, m) : nullptr,
                                   to.target(y + i), words + i, m, dropout);
    to.store(y + i, m);
  });
}

// Elements [begin, end): runs that are neighbours in the full tensor, cut again at rows of the bias
template <typename T, bool kBias, bool kResidual>
void dropout_range(const T* x, const acc_t<T>* bias, const T* residual, T* y, int64_t bias_size,
                   const PhiloxKeys& keys, Dropout<acc_t<T>> dropout, const GlobalIndex& index,
                   int64_t begin, int64_t end) {
  WordBuffer buffer;
  if (dropout.keeps_all()) std::fill_n(buffer.words, kWordRun, 0);
  int64_t column = begin % bias_size;
  for_each_run(index, begin, end, [&](int64_t i, uint64_t first, int64_t n) {
    if (!dropout.keeps_all()) draw_words(keys, first, n, buffer);
    const uint32_t* words = buffer.words + first % 4;
    for (int64_t j = 0, m; j < n; j += m) {
      m = kBias ? std::min(n - j, bias_size - column) : n;
      dropout_run<T, kBias, kResidual>(x + i + j, kBias ? bias + column : nullptr,
                                       kResidual ? residual + i + j : nullptr, y + i + j, words + j,
                                       m, dropout);
      column = column + m == bias_size ? 0 : column + m;
    }
  });
}

Tensor bias_dropout_residual_fwd(const Tensor& x_in, const OptionalTensor& bias_in,
                                 const OptionalTensor& residual_in, const Tensor& seed, double p,
                                 int64_t local_inner, int64_t full_inner, int64_t offset) {
  check_dropout(x_in, "x", seed, p);
  check_bias_and_residual(x_in, bias_in, residual_in);
  const GlobalIndex index = check_global_index(x_in, "x", local_inner, full_inner, offset);
  const bool has_bias = bias_in && bias_in->defined();
  const bool has_residual = residual_in && residual_in->defined();
  const Tensor x = x_in.contiguous();
  const Tensor bias = has_bias ? bias_in->contiguous() : Tensor();
  const Tensor residual = has_residual ? residual_in->contiguous() : x;
  const Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous);
  const PhiloxKeys keys(static_cast<uint64_t>(*in<int64_t>(seed)));
  dispatch_floating(x.scalar_type(), "bias_dropout_residual", [&](auto tag) {
    using T = decltype(tag);
    const auto range =
        has_bias
            ? (has_residual ? &dropout_range<T, true, true> : &dropout_range<T, true, false>)
            : (has_residual ? &dropout_range<T, false, true> : &dropout_range<T, false, false>);
    const Dropout<acc_t<T>> dropout(p);
    const Tensor wide = has_bias ? widened<T>(bias) : bias;
    const auto* const bias_data = has_bias ? in<acc_t<T>>(wide) : nullptr;
    const int64_t bias_size = has_bias ? bias.numel() : 1;
    at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      range(in<T>(x), bias_data, in<T>(residual), out<T>(y), bias_size, keys, dropout, index, begin,
            end);
    });
  });
  return y;
}

Tensor dropout_bwd(const Tensor& grad, const Tensor& seed, double p, int64_t local_inner,
                   int64_t full_inner, int64_t offset) {
  return bias_dropout_residual_fwd(grad, std::nullopt, std::nullopt, seed, p, local_inner,
                                   full_inner, offset);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_bias_dropout_residual_fwd", bias_dropout_residual_fwd);
  m.impl("_dropout_bwd", dropout_bwd);
}

}  // namespace tp_ext
