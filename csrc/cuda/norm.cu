// CUDA: RMSNorm and LayerNorm over the last dim; arguments and results as in cpu/norm.cpp, kernels
// in norm.cuh.

#include <torch/library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

#include "norm_args.h"
#include "cuda/launch.h"
#include "kernels/norm.cuh"

namespace tp_ext {
namespace {

at::TensorOptions acc_options(const Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Calls f(T{}, W{}) with the types of x and of weight and bias: that of x or, next to a half x,
// float
template <typename F>
void dispatch_norm(const Tensor& x, at::ScalarType param, const char* op, F f) {
  dispatch_floating(x.scalar_type(), op, [&](auto t) {
    using T = decltype(t);
    if constexpr (!std::is_same_v<T, double> && !std::is_same_v<T, float>) {
      if (param == at::kFloat) return f(t, float{});
    }
    f(t, t);
  });
}

at::ScalarType param_dtype(const Tensor& x, const OptionalTensor& weight,
                           const OptionalTensor& bias) {
  return has(weight) ? weight->scalar_type() : has(bias) ? bias->scalar_type() : x.scalar_type();
}

OptionalTensor contiguous(const OptionalTensor& t) {
  return has(t) ? OptionalTensor(t->contiguous()) : std::nullopt;
}

// Whether kVec<T> elements of the row and of the weights can be accessed at once
template <typename T, typename W>
bool aligned(int64_t n, const void* x, const void* y, const void* z, const W* w, const W* b) {
  constexpr auto kParamBytes = sizeof(W) * kVec<T>;
  return vectorisable<T>(n, static_cast<const char*>(x), static_cast<const char*>(y),
                         static_cast<const char*>(z)) &&
         reinterpret_cast<uintptr_t>(w) % kParamBytes == 0 &&
         reinterpret_cast<uintptr_t>(b) % kParamBytes == 0;
}

template <bool kCentred>
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const OptionalTensor& weight,
                                           const OptionalTensor& bias, double eps) {
  const auto [rows, n] = check_norm_input(input, weight);
  check_norm_param(bias, "bias", input);
  if (has(weight) && has(bias)) check_same_dtype(*bias, "bias", *weight, "weight");
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = input.contiguous();
  const OptionalTensor w = contiguous(weight), b = contiguous(bias);
  Tensor y = at::empty(x.sizes(), x.options());
  const auto acc = acc_options(x);
  Tensor mean = at::empty({kCentred ? rows : 0}, acc), rstd = at::empty({rows}, acc);
  if (rows == 0) return {y, mean, rstd};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  dispatch_norm(x, param_dtype(x, w, b), "norm", [&, rows = rows, n = n](auto t, auto p) {
    using T = decltype(t);
    using W = decltype(p);
    using A = acc_t<T>;
    const bool vectors = aligned<T, W>(n, in<T>(x), in<T>(y), nullptr, in<W>(w), in<W>(b));
    const NormLaunch launch = norm_launch<T>(n, vectors);
    const auto kernel = launch.cached ? norm_fwd_kernel<T, W, kCentred, kVec<T>, kNormCached>
                                      : norm_fwd_kernel<T, W, kCentred, 1, 0>;
    kernel<<<grid_for(rows, launch.groups), dim3(launch.width, launch.groups), 0, stream>>>(
        in<T>(x), in<W>(w), in<W>(b), out<T>(y), kCentred ? out<A>(mean) : nullptr, out<A>(rstd),
        rows, n, static_cast<A>(eps));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
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
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = input.contiguous(), g = grad.contiguous();
  const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  const OptionalTensor w = contiguous(weight);
  Tensor dx = at::empty(x.sizes(), x.options());
  const int64_t sums = kCentred ? 2 : 1;  // dw | db of each block
  const auto param = param_dtype(x, weight, std::nullopt);
  const auto params = x.options().dtype(param);
  const Tensor dw = at::zeros({has(w) ? n : 0}, params);
  const Tensor db = at::zeros({has(w) && kCentred ? n : 0}, params);
  if (rows == 0 || n == 0) return {dx, dw, db};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  int processors = 0;
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, x.device().index()));
  dispatch_norm(x, param, "norm backward", [&, rows = rows, n = n](auto t, auto p) {
    using T = decltype(t);
    using W = decltype(p);
    using A = acc_t<T>;
    const bool vectors = aligned<T, W>(n, in<T>(x), in<T>(g), in<T>(dx), in<W>(w), nullptr);
    NormLaunch launch = norm_launch<T>(n, vectors);
    if (!launch.cached && launch.groups > 1) launch.width = 32, launch.groups = 1;
    // Enough blocks for 512 threads per processor: each costs a row of partial sums
    const int64_t threads = launch.width * launch.groups;
    const int64_t wanted = processors * std::max<int64_t>(1, kNormMaxThreads / threads);
    const int64_t blocks = std::min((rows + launch.groups - 1) / launch.groups, wanted);
    Tensor partial;
    if (has(w)) {
      const auto acc = acc_options(x);
      partial =
          launch.cached ? at::empty({blocks, sums, n}, acc) : at::zeros({blocks, sums, n}, acc);
    }
    const auto kernel = launch.cached ? norm_bwd_kernel<T, W, kCentred, kVec<T>, kNormCached>
                                      : norm_bwd_kernel<T, W, kCentred, 1, 0>;
    kernel<<<static_cast<unsigned>(blocks), dim3(launch.width, launch.groups), 0, stream>>>(
        in<T>(g), in<T>(x), in<W>(w), in<A>(means), in<A>(rstds), out<T>(dx),
        has(w) ? out<A>(partial) : nullptr, rows, n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (!has(w)) return;
    const dim3 grid(grid_for(n, 32), static_cast<unsigned>(sums));
    norm_sum_kernel<A, W><<<grid, dim3(32, kNormSumRows), 0, stream>>>(
        in<A>(partial), out<W>(dw), kCentred ? out<W>(db) : nullptr, blocks, n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {dx, dw, db};
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

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_rms_norm_fwd", rms_norm_fwd);
  m.impl("_rms_norm_bwd", rms_norm_bwd);
  m.impl("_layer_norm_fwd", forward<true>);
  m.impl("_layer_norm_bwd", backward<true>);
}

}  // namespace tp_ext
