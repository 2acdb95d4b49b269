// CPU: RMSNorm and LayerNorm over the last dim, forward and backward (formulas in kernels/norm.h,
// loops in norm_forward.h and norm_backward.h).
//
//   x, residual, sum, y, grad, grad_sum, dx [.., n] in one dtype; weight, bias, dweight, dbias [n],
//   in x's dtype or, for half types, fp32; mean, rstd [rows] in fp32 (fp64 for fp64). A gradient
//   without its output_mask bit, or of a missing weight or bias, is empty, [0].
//
// Weight gradients: the number of rows alone decides how they are split into chunks, each chunk
// sums its rows in order, and the chunks are summed in order: every run and every number of threads
// gives the same bits.

#include <torch/library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <type_traits>
#include <vector>

#include "args/norm.h"
#include "cpu/dispatch.h"
#include "cpu/norm_backward.h"
#include "cpu/norm_forward.h"
#include "row_end.h"

namespace tp_ext {
namespace {

// weight or bias as a contiguous row of the accumulation type; a missing one becomes a row of its
// neutral value, which costs less than a second copy of every loop
Tensor widened(const OptionalTensor& t, const at::TensorOptions& acc, int64_t n, double neutral) {
  return has(t) ? t->to(acc.dtype()).contiguous() : at::full({n}, neutral, acc);
}

at::TensorOptions acc_options(const Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// y, sum, mean, rstd; sum is undefined without a residual, mean empty without kCentred
template <bool kCentred>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& input, const Tensor& residual,
                                                   const OptionalTensor& weight,
                                                   const OptionalTensor& bias, double eps) {
  const auto [rows, n] = check_norm_input(input, weight);
  check_norm_param(bias, "bias", input);
  if (has(weight) && has(bias)) check_same_dtype(*bias, "bias", *weight, "weight");
  const bool adds = residual.defined();
  if (adds) check_norm_like_x(residual, "residual", input);
  const Tensor x = input.contiguous(), rest = adds ? residual.contiguous() : Tensor();
  const auto acc = acc_options(x);
  const Tensor w = widened(weight, acc, n, 1), b = kCentred ? widened(bias, acc, n, 0) : w;
  const Tensor y = at::empty(x.sizes(), x.options());
  const Tensor sum = adds ? at::empty(x.sizes(), x.options()) : Tensor();
  Tensor mean = at::empty({kCentred ? rows : 0}, acc), rstd = at::empty({rows}, acc);
  dispatch_floating(x.scalar_type(), "norm", [&, n = n, rows = rows](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    at::parallel_for(0, rows, kGrain / (n + 1) + 1, [&](int64_t begin, int64_t end) {
      std::vector<A> cache(kIsHalf<T> ? 3 * n : 0);
      const int64_t first = begin * n;
      norm_forward_rows<T, kCentred>({
          in<T>(x) + first,
          adds ? in<T>(rest) + first : nullptr,
          adds ? out<T>(sum) + first : nullptr,
          out<T>(y) + first,
          in<A>(w),
          in<A>(b),
          kCentred ? out<A>(mean) + begin : nullptr,
          out<A>(rstd) + begin,
          end - begin,
          n,
          static_cast<A>(eps),
          cache.data(),
      });
    });
  });
  return {y, sum, mean, rstd};
}

// Calls f(std::bool_constant<dx>{}, std::bool_constant<params>{}); at least one is true
template <typename F>
void dispatch_wanted(bool dx, bool params, F f) {
  if (!dx) return f(std::false_type{}, std::true_type{});
  if (!params) return f(std::true_type{}, std::false_type{});
  f(std::true_type{}, std::true_type{});
}

template <bool kCentred>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& input,
                                            const OptionalTensor& weight, const Tensor& mean,
                                            const Tensor& rstd, const OptionalTensor& grad_sum,
                                            const std::array<bool, 3>& output_mask) {
  const auto [rows, n] = check_norm_backward(grad, input, weight, rstd, grad_sum);
  if (kCentred) check_norm_stat(mean, "mean", input, rows);
  const bool dx_wanted = output_mask[0], dw_wanted = has(weight) && output_mask[1],
             db_wanted = has(weight) && kCentred && output_mask[2];
  const bool params = dw_wanted || db_wanted;
  const auto none = [&] { return at::empty({0}, (has(weight) ? *weight : input).options()); };
  if (!dx_wanted && !params) return {at::empty({0}, input.options()), none(), none()};
  const Tensor x = input.contiguous(), g = grad.contiguous();
  const Tensor g_sum = has(grad_sum) ? grad_sum->contiguous() : Tensor();
  const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  const auto acc = acc_options(x);
  const Tensor w = widened(weight, acc, n, 1);
  // At least 32 rows per chunk, so that filling and adding the partial sums stays a small part of
  // the work
  const int64_t chunks = std::clamp<int64_t>(rows / 32, 1, 64),
                per_chunk = (rows + chunks - 1) / chunks;
  const int64_t sums = kCentred ? 2 : 1;  // dw | db of each chunk
  // A single thread sums the chunks as it goes, in one buffer that stays in the cache
  const bool one = at::get_num_threads() == 1 || at::in_parallel_region();
  const int64_t places = one ? 1 : chunks;
  const Tensor partial = at::empty({params ? places : 0, sums, n}, acc);
  const Tensor dw = at::zeros({dw_wanted ? n : 0}, acc), db = at::zeros({db_wanted ? n : 0}, acc);
  // Allocated last, next to the free memory: freeing it then leaves one large free range
  const Tensor dx = at::empty(dx_wanted ? input.sizes() : at::IntArrayRef({0}), input.options());
  dispatch_floating(x.scalar_type(), "norm backward", [&, n = n, rows = rows](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const auto add_up = [&, n = n](int64_t chunks, int64_t begin, int64_t end) {
      const A* const first = in<A>(partial);
      if (dw_wanted) norm_sum_chunks(first, out<A>(dw), chunks, sums * n, begin, end);
      if (db_wanted) norm_sum_chunks(first + n, out<A>(db), chunks, sums * n, begin, end);
    };
    at::parallel_for(0, chunks, kGrain / (n * per_chunk + 1) + 1, [&](int64_t begin, int64_t end) {
      std::vector<A> cache(kIsHalf<T> ? 2 * kNormBlock * n : 0);
      for (int64_t c = begin; c < end; ++c) {
        const int64_t first = c * per_chunk, last = std::min(rows, first + per_chunk);
        const int64_t skipped = first * n;
        A* const sum = params ? out<A>(partial) + (one ? 0 : c * sums * n) : nullptr;
        if (params) std::fill_n(sum, sums * n, A(0));
        const NormBackward<T> rows_of_chunk = {
            in<T>(g) + skipped,
            in<T>(x) + skipped,
            g_sum.defined() ? in<T>(g_sum) + skipped : nullptr,
            in<A>(w),
            kCentred ? in<A>(means) + first : nullptr,
            in<A>(rstds) + first,
            dx_wanted ? out<T>(dx) + skipped : nullptr,
            sum,
            kCentred && params ? sum + n : nullptr,
            last - first,
            n,
            cache.data(),
        };
        dispatch_wanted(dx_wanted, params, [&](auto with_dx, auto with_params) {
          norm_backward_rows<T, kCentred, with_dx, with_params>(rows_of_chunk);
        });
        if (one) add_up(1, 0, n);
      }
    });
    if (one || !params) return;
    at::parallel_for(0, n, kGrain / chunks + 1,
                     [&](int64_t begin, int64_t end) { add_up(chunks, begin, end); });
  });
  return {dx, dw_wanted ? dw.to(weight->scalar_type()) : none(),
          db_wanted ? db.to(weight->scalar_type()) : none()};
}

}  // namespace

RowEnd rms_norm_row_end(const Tensor& residual, const OptionalTensor& weight, double eps,
                        const Tensor& y, const Tensor& total) {
  const int64_t n = residual.size(-1);
  const Tensor w = widened(weight, acc_options(residual), n, 1);
  RowEnd end;
  dispatch_floating(residual.scalar_type(), "norm", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    std::vector<A> cache(kIsHalf<T> ? 3 * n : 0);
    end = [=](int64_t row, const void* sums) mutable {
      const int64_t first = row * n;
      A rstd;
      norm_forward_rows<T, false>({static_cast<const T*>(sums), in<T>(residual) + first,
                                   out<T>(total) + first, out<T>(y) + first, in<A>(w), in<A>(w),
                                   nullptr, &rstd, 1, n, static_cast<A>(eps), cache.data()});
    };
  });
  return end;
}

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  using Primitives = NormPrimitives<forward<false>, forward<true>, backward<false>, backward<true>>;
  m.impl("_rms_norm_fwd", Primitives::rms_norm_fwd);
  m.impl("_rms_norm_residual_fwd", Primitives::rms_norm_residual_fwd);
  m.impl("_rms_norm_bwd", Primitives::rms_norm_bwd);
  m.impl("_layer_norm_fwd", Primitives::layer_norm_fwd);
  m.impl("_layer_norm_residual_fwd", forward<true>);
  m.impl("_layer_norm_bwd", Primitives::layer_norm_bwd);
}

}  // namespace tp_ext
