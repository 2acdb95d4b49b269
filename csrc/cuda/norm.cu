// CUDA: RMSNorm and LayerNorm over the last dim; arguments and results as in cpu/norm.cpp, kernels
// in norm_fwd.cuh and norm_bwd.cuh.

#include <torch/library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <type_traits>

#include "args/norm.h"
#include "cuda/launch.h"
#include "kernels/norm_bwd.cuh"
#include "kernels/norm_fwd.cuh"

namespace tp_ext {
namespace {

at::TensorOptions acc_options(const Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Calls f(T{}, W{}), T the type of x and W the type of weight and bias: that of x or, next to a
// half x, float
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
bool aligned(int64_t n, std::initializer_list<const T*> rows, const W* w, const W* b) {
  constexpr auto kParamBytes = sizeof(W) * kVec<T>;
  return std::all_of(rows.begin(), rows.end(), [&](const T* p) { return vectorisable<T>(n, p); }) &&
         reinterpret_cast<uintptr_t>(w) % kParamBytes == 0 &&
         reinterpret_cast<uintptr_t>(b) % kParamBytes == 0;
}

// Dynamic shared memory that a block may request, on top of the kernels' static shared memory
int64_t shared_limit(const Tensor& x) {
  int bytes = 0;
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, x.device().index()));
  return bytes - 1024;
}

// More than 48 KiB needs this attribute; it is not work on the stream, so it is allowed in a
// capture
template <typename Kernel>
void allow_shared(Kernel kernel, int64_t bytes) {
  if (bytes > 48 * 1024) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)));
  }
}

// Calls f(the number of vectors that a thread keeps, as an integral constant)
template <typename T, typename F>
void with_kept(int kept, F f) {
  if constexpr (sizeof(T) == 2) {
    if (kept == 1) return f(std::integral_constant<int, 1>());
    if (kept == 2) return f(std::integral_constant<int, 2>());
  }
  f(std::integral_constant<int, kNormCached>());
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
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = input.contiguous(), rest = adds ? residual.contiguous() : Tensor();
  const OptionalTensor w = contiguous(weight), b = contiguous(bias);
  const Tensor y = at::empty(x.sizes(), x.options());
  const Tensor sum = adds ? at::empty(x.sizes(), x.options()) : Tensor();
  const auto acc = acc_options(x);
  Tensor mean = at::empty({kCentred ? rows : 0}, acc), rstd = at::empty({rows}, acc);
  if (rows == 0) return {y, sum, mean, rstd};
  const auto stream = c10::cuda::getCurrentCUDAStream();
  dispatch_norm(x, param_dtype(x, w, b), "norm", [&, rows = rows, n = n](auto t, auto p) {
    using T = decltype(t);
    using W = decltype(p);
    using A = acc_t<T>;
    const T* const r = adds ? in<T>(rest) : nullptr;
    T* const s = adds ? out<T>(sum) : nullptr;
    const bool vectors = aligned<T, W>(n, {in<T>(x), r, s, in<T>(y)}, in<W>(w), in<W>(b));
    const NormLaunch launch = norm_fwd_launch<T>(
        n, vectors,
        choose_launch<T>(kCentred ? Family::kLayerNormForward : Family::kRmsNormForward, n));
    NormShared shared = {};
    if (!launch.cached) shared = norm_shared<T>(n, launch.groups, 1, 0, shared_limit(x));
    auto* kernel = vectors ? norm_fwd_kernel<T, W, kCentred, kVec<T>, 0, true>
                           : norm_fwd_kernel<T, W, kCentred, 1, 0, true>;
    if (launch.cached) {
      with_kept<T>(launch.vectors, [&](auto kept) {
        constexpr int k = decltype(kept)::value;
        kernel = adds ? norm_fwd_kernel<T, W, kCentred, kVec<T>, k, true>
                      : norm_fwd_kernel<T, W, kCentred, kVec<T>, k, false>;
      });
    }
    allow_shared(kernel, shared.bytes);
    const dim3 block(launch.width, launch.groups);
    kernel<<<grid_for(rows, launch.groups), block, shared.bytes, stream>>>(
        in<T>(x), r, in<W>(w), in<W>(b), s, out<T>(y), kCentred ? out<A>(mean) : nullptr,
        out<A>(rstd), rows, n, static_cast<A>(eps), shared.row);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {y, sum, mean, rstd};
}

// What the kernels of the backward have in common
template <typename T, typename W>
struct NormBackward {
  using A = acc_t<T>;
  const T *grad, *x, *grad_sum;
  const W* weight;
  const A *means, *rstds;
  T* dx;
  A* partial;
  int64_t rows, n;
};

template <bool kCentred, typename T, typename W>
void launch_backward(const NormBackward<T, W>& a, const NormLaunch& launch, bool vectors,
                     const NormShared& shared, int64_t blocks, bool params) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto run = [&](auto kernel, int64_t bytes, auto... more) {
    allow_shared(kernel, bytes);
    kernel<<<static_cast<unsigned>(blocks), dim3(launch.width, launch.groups), bytes, stream>>>(
        a.grad, a.x, a.grad_sum, a.weight, a.means, a.rstds, a.dx, a.partial, a.rows, a.n, more...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  constexpr int N = kVec<T>;
  if (launch.stages == 2) {
    if constexpr (sizeof(T) == 2) {
      with_kept<T>(launch.vectors, [&](auto kept) {
        constexpr int k = decltype(kept)::value;
        if constexpr (norm_staged_kept(k, kCentred))
          run(params ? norm_bwd_staged_kernel<T, W, kCentred, N, k, true>
                     : norm_bwd_staged_kernel<T, W, kCentred, N, k, false>,
              norm_staged_bytes(launch, a.grad_sum != nullptr));
      });
    }
  } else if (launch.cached) {
    with_kept<T>(launch.vectors, [&](auto kept) {
      constexpr int k = decltype(kept)::value;
      run(params ? norm_bwd_kernel<T, W, kCentred, N, k, true>
                 : norm_bwd_kernel<T, W, kCentred, N, k, false>,
          0, int64_t{0}, false);
    });
  } else {
    run(vectors ? norm_bwd_kernel<T, W, kCentred, N, 0, true>
                : norm_bwd_kernel<T, W, kCentred, 1, 0, true>,
        shared.bytes, shared.row, shared.sums);
  }
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
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor dx = at::empty(dx_wanted ? input.sizes() : at::IntArrayRef({0}), input.options());
  const auto param = param_dtype(input, weight, std::nullopt);
  // Without rows no kernel runs, and the sums are zeros
  const auto sums_like = [&, n = n](bool wanted) {
    return at::zeros({wanted ? n : 0}, input.options().dtype(param));
  };
  const Tensor dw = sums_like(dw_wanted), db = sums_like(db_wanted);
  if ((!dx_wanted && !params) || rows == 0 || n == 0) return {dx, dw, db};
  const Tensor x = input.contiguous(), g = grad.contiguous();
  const OptionalTensor g_sum = contiguous(grad_sum), w = contiguous(weight);
  const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  const int64_t sums = kCentred ? 2 : 1;  // dw | db of each block
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const int processors = multiprocessors();
  dispatch_norm(x, param, "norm backward", [&, rows = rows, n = n](auto t, auto p) {
    using T = decltype(t);
    using W = decltype(p);
    using A = acc_t<T>;
    T* const to = dx_wanted ? out<T>(dx) : nullptr;
    const bool vectors =
        aligned<T, W>(n, {in<T>(x), in<T>(g), in<T>(g_sum), to}, in<W>(w), nullptr);
    const LaunchChoice tuned =
        choose_launch<T>(kCentred ? Family::kLayerNormBackward : Family::kRmsNormBackward, n);
    const bool adds = has(g_sum);
    const int64_t limit = shared_limit(x);
    NormLaunch launch = norm_bwd_launch<T>(n, vectors, kCentred, tuned, adds, limit);
    if (!launch.cached && launch.groups > 1) launch.width = 32, launch.groups = 1;
    NormShared shared = {};
    if (!launch.cached) shared = norm_shared<T>(n, launch.groups, 2, params ? sums : 0, limit);
    const int64_t blocks = norm_bwd_grid(launch, rows, kCentred, processors, tuned, adds, limit);
    Tensor partial;
    if (params) {
      const auto acc = acc_options(x);
      partial = launch.cached || shared.sums ? at::empty({blocks, sums, n}, acc)
                                             : at::zeros({blocks, sums, n}, acc);
    }
    launch_backward<kCentred>(NormBackward<T, W>{in<T>(g), in<T>(x), in<T>(g_sum), in<W>(w),
                                                 kCentred ? in<A>(means) : nullptr, in<A>(rstds),
                                                 to, params ? out<A>(partial) : nullptr, rows, n},
                              launch, vectors, shared, blocks, params);
    if (!params) return;
    const dim3 grid(grid_for(n, 32), static_cast<unsigned>(sums));
    norm_sum_kernel<A, W><<<grid, dim3(32, kNormSumRows), 0, stream>>>(
        in<A>(partial), dw_wanted ? out<W>(dw) : nullptr, db_wanted ? out<W>(db) : nullptr, blocks,
        n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {dx, dw, db};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  using Primitives = NormPrimitives<forward<false>, forward<true>, backward<false>, backward<true>>;
  m.impl("_rms_norm_fwd", Primitives::rms_norm_fwd);
  m.impl("_rms_norm_residual_fwd", Primitives::rms_norm_residual_fwd);
  m.impl("_rms_norm_bwd", Primitives::rms_norm_bwd);
  m.impl("_layer_norm_fwd", Primitives::layer_norm_fwd);
  m.impl("_layer_norm_residual_fwd", forward<true>);
  m.impl("_layer_norm_bwd", Primitives::layer_norm_bwd);
}

}  // namespace tp_ext
