// CPU: RMSNorm and LayerNorm over the last dim, forward and backward (formulas in kernels/norm.h).
//
//   x, y, grad, dx [.., n] in one dtype; weight, bias, dweight, dbias [n], in x's dtype or, for
//   half types, fp32; mean, rstd [rows] in fp32 (fp64 for fp64). Gradients of a missing weight are
//   empty, [0].
//
// A row is widened once into a buffer that stays in the cache. Weight gradients: the rows are cut
// into chunks by their number alone, each chunk adds up its rows in order, and the chunks are added
// up in order, so the result depends neither on the run nor on the number of threads.

#include <torch/library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <vector>

#include "norm_args.h"
#include "cpu/simd.h"
#include "kernels/norm.h"

namespace tp_ext {
namespace {

// Sums run in this many interleaved lanes, then pairwise: vectorised, and more precise than one
// running sum
constexpr int kLanes = 32;

// Rows whose backward is done together
constexpr int kBlock = 4;
constexpr int kBlockLanes = 16;

template <int kCount, typename A>
inline __attribute__((always_inline)) A sum_lanes(A (&lanes)[kCount]) {
  for (int width = kCount / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

// x as accumulation type: itself, or converted into cache
template <typename T>
inline __attribute__((always_inline)) const acc_t<T>* widen(const T* __restrict x, int64_t n,
                                                            acc_t<T>* __restrict cache) {
  for (int64_t j = 0; j < n; ++j) cache[j] = to_acc(x[j]);
  return cache;
}
inline __attribute__((always_inline)) const float* widen(const float* x, int64_t, float*) {
  return x;
}
inline __attribute__((always_inline)) const double* widen(const double* x, int64_t, double*) {
  return x;
}

template <typename T, bool kCentred>
TP_SIMD void forward_rows(const T* x, const acc_t<T>* __restrict w, const acc_t<T>* __restrict b,
                          T* y, acc_t<T>* means, acc_t<T>* rstds, int64_t rows, int64_t n,
                          acc_t<T> eps, acc_t<T>* cache) {
  using A = acc_t<T>;
  for (int64_t i = 0; i < rows; ++i) {
    const A* __restrict r = widen(x + i * n, n, cache);
    A mean = 0;
    if constexpr (kCentred) {
      A lanes[kLanes] = {};
      int64_t j = 0;
      for (; j + kLanes <= n; j += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] += r[j + l];
      for (int l = 0; j + l < n; ++l) lanes[l] += r[j + l];
      mean = sum_lanes(lanes) / static_cast<A>(n);
      means[i] = mean;
    }
    A lanes[kLanes] = {};
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes)
      for (int l = 0; l < kLanes; ++l) lanes[l] += (r[j + l] - mean) * (r[j + l] - mean);
    for (int l = 0; j + l < n; ++l) lanes[l] += (r[j + l] - mean) * (r[j + l] - mean);
    const A rstd = norm_rstd(sum_lanes(lanes), static_cast<A>(n), eps);
    rstds[i] = rstd;
    T* __restrict out_row = y + i * n;
    if constexpr (kCentred) {
      for (int64_t k = 0; k < n; ++k)
        out_row[k] = from_acc<T>(norm_hat(r[k], mean, rstd) * w[k] + b[k]);
    } else {
      for (int64_t k = 0; k < n; ++k) out_row[k] = from_acc<T>(norm_hat(r[k], mean, rstd) * w[k]);
    }
  }
}

// The backward of kRows rows at once: dw and db (centred only), which stay in no cache next to long
// rows, are read and written once for all of them. They receive the sums over these rows on top of
// what they hold.
template <typename T, bool kCentred, int kRows>
inline __attribute__((always_inline)) void backward_block(
    const T* g, const T* x, const acc_t<T>* __restrict w, const acc_t<T>* means,
    const acc_t<T>* rstds, T* dx, acc_t<T>* __restrict dw, acc_t<T>* __restrict db, int64_t n,
    acc_t<T>* cache) {
  using A = acc_t<T>;
  const A *r[kRows], *u[kRows];
  A mean[kRows], rstd[kRows], sum_gw[kRows][kBlockLanes] = {}, sum_gw_hat[kRows][kBlockLanes] = {};
  for (int q = 0; q < kRows; ++q) {
    r[q] = widen(x + q * n, n, cache + 2 * q * n);
    u[q] = widen(g + q * n, n, cache + (2 * q + 1) * n);
    mean[q] = kCentred ? means[q] : A(0);
    rstd[q] = rstds[q];
  }
  const auto add = [&](int64_t k, int l) __attribute__((always_inline)) {
    A dwk = dw[k], dbk = kCentred ? db[k] : A(0);
    const A wk = w[k];
    const auto row = [&](int q) __attribute__((always_inline)) {
      const A hat = norm_hat(r[q][k], mean[q], rstd[q]), uk = u[q][k];
      sum_gw_hat[q][l] += uk * wk * hat;
      dwk += uk * hat;
      if constexpr (kCentred) {
        sum_gw[q][l] += uk * wk;
        dbk += uk;
      }
    };
    row(0);
    if constexpr (kRows > 1) row(1);
    if constexpr (kRows > 2) row(2), row(3);
    dw[k] = dwk;
    if constexpr (kCentred) db[k] = dbk;
  };
  int64_t j = 0;
  for (; j + kBlockLanes <= n; j += kBlockLanes)
    for (int l = 0; l < kBlockLanes; ++l) add(j + l, l);
  for (int l = 0; j + l < n; ++l) add(j + l, l);
  for (int q = 0; q < kRows; ++q) {
    const A mean_gw = kCentred ? sum_lanes(sum_gw[q]) / static_cast<A>(n) : A(0);
    const A mean_gw_hat = sum_lanes(sum_gw_hat[q]) / static_cast<A>(n);
    const A* __restrict rq = r[q], * __restrict uq = u[q];
    T* __restrict dx_row = dx + q * n;
    for (int64_t k = 0; k < n; ++k)
      dx_row[k] = from_acc<T>(
          norm_dx(uq[k] * w[k], norm_hat(rq[k], mean[q], rstd[q]), rstd[q], mean_gw, mean_gw_hat));
  }
}

template <typename T, bool kCentred>
TP_SIMD void backward_rows(const T* g, const T* x, const acc_t<T>* w, const acc_t<T>* means,
                           const acc_t<T>* rstds, T* dx, acc_t<T>* dw, acc_t<T>* db, int64_t rows,
                           int64_t n, acc_t<T>* cache) {
  int64_t i = 0;
  for (; i + kBlock <= rows; i += kBlock)
    backward_block<T, kCentred, kBlock>(g + i * n, x + i * n, w, means + i, rstds + i, dx + i * n,
                                        dw, db, n, cache);
  for (; i < rows; ++i)
    backward_block<T, kCentred, 1>(g + i * n, x + i * n, w, means + i, rstds + i, dx + i * n, dw,
                                   db, n, cache);
}

// total[k] = the sum of partial[c * stride + k] over the chunks c in order, for columns [begin,
// end)
template <typename A>
TP_SIMD void sum_chunks(const A* __restrict partial, A* __restrict total, int64_t chunks,
                        int64_t stride, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) total[k] = partial[k];
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t k = begin; k < end; ++k) total[k] += partial[c * stride + k];
}

// weight or bias as a contiguous row of the accumulation type; a missing one is a row of its
// neutral value, which costs less than a second copy of every loop
Tensor widened(const OptionalTensor& t, const at::TensorOptions& acc, int64_t n, double neutral) {
  return has(t) ? t->to(acc.dtype()).contiguous() : at::full({n}, neutral, acc);
}

at::TensorOptions acc_options(const Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

template <bool kCentred>
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const OptionalTensor& weight,
                                           const OptionalTensor& bias, double eps) {
  const auto [rows, n] = check_norm_input(input, weight);
  check_norm_param(bias, "bias", input);
  if (has(weight) && has(bias)) check_same_dtype(*bias, "bias", *weight, "weight");
  const Tensor x = input.contiguous();
  const auto acc = acc_options(x);
  const Tensor w = widened(weight, acc, n, 1), b = kCentred ? widened(bias, acc, n, 0) : w;
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor mean = at::empty({kCentred ? rows : 0}, acc), rstd = at::empty({rows}, acc);
  dispatch_floating(x.scalar_type(), "norm", [&, n = n, rows = rows](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    at::parallel_for(0, rows, kGrain / (n + 1) + 1, [&](int64_t begin, int64_t end) {
      std::vector<A> cache(std::is_same_v<T, A> ? 0 : n);
      forward_rows<T, kCentred>(in<T>(x) + begin * n, in<A>(w), in<A>(b), out<T>(y) + begin * n,
                                kCentred ? out<A>(mean) + begin : nullptr, out<A>(rstd) + begin,
                                end - begin, n, static_cast<A>(eps), cache.data());
    });
  });
  return {y, mean, rstd};
}

template <bool kCentred>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& input,
                                            const OptionalTensor& weight, const Tensor& mean,
                                            const Tensor& rstd) {
  const auto [rows, n] = check_norm_input(input, weight);
  check_norm_grad(grad, input);
  if (kCentred) check_norm_stat(mean, "mean", input, rows);
  check_norm_stat(rstd, "rstd", input, rows);
  const Tensor x = input.contiguous(), g = grad.contiguous();
  const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  const auto acc = acc_options(x);
  const Tensor w = widened(weight, acc, n, 1);
  // At least 32 rows a chunk, so that filling and adding the partial sums stays a small part of the
  // work
  const int64_t chunks = std::clamp<int64_t>(rows / 32, 1, 64),
                per_chunk = (rows + chunks - 1) / chunks;
  const int64_t sums = kCentred ? 2 : 1;  // dw | db of each chunk
  const Tensor partial = at::zeros({chunks, sums, n}, acc);
  const Tensor dw = at::empty({n}, acc), db = at::empty({kCentred ? n : 0}, acc);
  Tensor dx = at::empty(x.sizes(), x.options());
  dispatch_floating(x.scalar_type(), "norm backward", [&, n = n, rows = rows](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    at::parallel_for(0, chunks, kGrain / (n * per_chunk + 1) + 1, [&](int64_t begin, int64_t end) {
      std::vector<A> cache(std::is_same_v<T, A> ? 0 : 2 * kBlock * n);
      for (int64_t c = begin; c < end; ++c) {
        const int64_t first = c * per_chunk, last = std::min(rows, first + per_chunk);
        A* const sum = out<A>(partial) + c * sums * n;
        backward_rows<T, kCentred>(in<T>(g) + first * n, in<T>(x) + first * n, in<A>(w),
                                   in<A>(means) + first, in<A>(rstds) + first,
                                   out<T>(dx) + first * n, sum, kCentred ? sum + n : nullptr,
                                   last - first, n, cache.data());
      }
    });
    at::parallel_for(0, n, kGrain / chunks + 1, [&](int64_t begin, int64_t end) {
      sum_chunks(in<A>(partial), out<A>(dw), chunks, sums * n, begin, end);
      if (kCentred) sum_chunks(in<A>(partial) + n, out<A>(db), chunks, sums * n, begin, end);
    });
  });
  if (!has(weight)) return {dx, at::empty({0}, x.options()), at::empty({0}, x.options())};
  return {dx, dw.to(weight->scalar_type()), db.to(weight->scalar_type())};
}

std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& x, const OptionalTensor& weight, double eps) {
  const auto [y, none, rstd] = forward<false>(x, weight, std::nullopt, eps);
  return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad, const Tensor& x,
                                        const OptionalTensor& weight, const Tensor& rstd) {
  const auto [dx, dweight, none] = backward<false>(grad, x, weight, rstd, rstd);
  return {dx, dweight};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_rms_norm_fwd", rms_norm_fwd);
  m.impl("_rms_norm_bwd", rms_norm_bwd);
  m.impl("_layer_norm_fwd", forward<true>);
  m.impl("_layer_norm_bwd", backward<true>);
}

}  // namespace tp_ext
