// moe_permute, moe_unpermute and moe_dot on CUDA: checks, allocation, launches. Kernels:
// kernels/moe_permute.cuh.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <tuple>
#include <type_traits>

#include "args/moe_permute.h"
#include "cuda/launch.h"
#include "kernels/moe_permute.cuh"

namespace tp_ext {
namespace {

struct RowInRange {
  __device__ void operator()(bool ok) const {
    CUDA_KERNEL_ASSERT(ok && "rows must be -1 or in [0, num_rows)");
  }
};
struct RowIsUnique {
  __device__ void operator()(bool ok) const {
    CUDA_KERNEL_ASSERT(ok && "rows: a row must not belong to two slots");
  }
};

// The slot of each row, -1 for none
Tensor slots_of_rows(const Tensor& rows, int64_t num_rows) {
  const Tensor slot_of = at::full({num_rows}, -1, rows.options());
  const int64_t slots = rows.numel();
  if (slots == 0) return slot_of;
  moe_slots_kernel<<<grid_for(slots), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      in<int64_t>(rows), slots, num_rows, out<int64_t>(slot_of), RowInRange());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return slot_of;
}

// Calls f(T{}, number of elements of an access) for rows of `hidden` elements
template <typename F, typename... Tensors>
void dispatch_vectors(const char* op, int64_t hidden, F f, const Tensor& x,
                      const Tensors&... more) {
  dispatch_floating(x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    if (vectorisable<T>(hidden, in<T>(x), in<T>(more)...))
      f(zero, std::integral_constant<int, kVec<T>>());
    else
      f(zero, std::integral_constant<int, 1>());
  });
}

OptionalTensor contiguous(const OptionalTensor& t) { return t ? t->contiguous() : t; }

Tensor moe_permute(const Tensor& x_any, const Tensor& rows_any, int64_t num_rows,
                   const OptionalTensor& weights_any) {
  const MoeShape shape = check_moe_permute(x_any, rows_any, num_rows, weights_any);
  const c10::cuda::CUDAGuard guard(x_any.device());
  const Tensor x = x_any.contiguous(), rows = rows_any.contiguous();
  const OptionalTensor weights = contiguous(weights_any);
  const Tensor y = at::empty({num_rows, shape.hidden}, x.options());
  const Tensor slot_of = slots_of_rows(rows, num_rows);
  if (y.numel() == 0) return y;
  const auto launch = [&](auto zero, auto vector) {
    using T = decltype(zero);
    constexpr int N = decltype(vector)::value;
    const int64_t threads = moe_permute_threads<N>(shape);
    moe_permute_kernel<N><<<grid_for(threads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        in<T>(x), in<int64_t>(rows), in<acc_t<T>>(weights), in<int64_t>(slot_of), shape, out<T>(y),
        RowIsUnique());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  dispatch_vectors("moe_permute", shape.hidden, launch, x, y);
  return y;
}

Tensor moe_unpermute(const Tensor& y_any, const Tensor& rows_any,
                     const OptionalTensor& weights_any) {
  const MoeShape shape = check_moe_unpermute(y_any, rows_any, weights_any);
  const c10::cuda::CUDAGuard guard(y_any.device());
  const Tensor y = y_any.contiguous(), rows = rows_any.contiguous();
  const OptionalTensor weights = contiguous(weights_any);
  const Tensor x = at::empty({shape.tokens, shape.hidden}, y.options());
  if (x.numel() == 0) return x;
  const auto launch = [&](auto zero, auto vector) {
    using T = decltype(zero);
    constexpr int N = decltype(vector)::value;
    const int64_t threads = warp_row_threads<N>(shape.tokens, shape.hidden, kParts);
    moe_unpermute_kernel<N><<<grid_for(threads), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        in<T>(y), in<int64_t>(rows), in<acc_t<T>>(weights), shape, out<T>(x), RowInRange());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  dispatch_vectors("moe_unpermute", shape.hidden, launch, y, x);
  return x;
}

Tensor moe_dot(const Tensor& x_any, const Tensor& y_any, const Tensor& rows_any) {
  const MoeShape shape = check_moe_dot(x_any, "x", y_any, rows_any);
  const c10::cuda::CUDAGuard guard(x_any.device());
  const Tensor x = x_any.contiguous(), y = y_any.contiguous(), rows = rows_any.contiguous();
  const Tensor result = at::empty(rows.sizes(), x.options().dtype(moe_weights_dtype(x)));
  if (result.numel() == 0) return result;
  const auto launch = [&](auto zero, auto vector) {
    using T = decltype(zero);
    constexpr int N = decltype(vector)::value;
    moe_dot_kernel<N, false, T>
        <<<grid_for(rows.numel() * kWarp), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            in<T>(x), in<T>(y), in<int64_t>(rows), nullptr, nullptr, shape, nullptr,
            out<acc_t<T>>(result), RowInRange());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  dispatch_vectors("moe_dot", shape.hidden, launch, x, y);
  return result;
}

std::tuple<Tensor, Tensor> moe_unpermute_bwd(const Tensor& grad_any, const Tensor& y_any,
                                             const Tensor& rows_any, const Tensor& weights_any) {
  const MoeShape shape = check_moe_dot(grad_any, "grad", y_any, rows_any);
  check_moe_weights(weights_any, grad_any, rows_any);
  const c10::cuda::CUDAGuard guard(grad_any.device());
  const Tensor grad = grad_any.contiguous(), y = y_any.contiguous();
  const Tensor rows = rows_any.contiguous(), weights = weights_any.contiguous();
  const Tensor dy = at::empty(y.sizes(), y.options());
  const Tensor dweights = at::empty(rows.sizes(), weights.options());
  const Tensor slot_of = slots_of_rows(rows, shape.rows);
  const int64_t items = rows.numel() + shape.rows;
  if (items == 0) return {dy, dweights};
  const auto launch = [&](auto zero, auto vector) {
    using T = decltype(zero);
    constexpr int N = decltype(vector)::value;
    moe_dot_kernel<N, true, T>
        <<<grid_for(items * kWarp), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            in<T>(grad), in<T>(y), in<int64_t>(rows), in<acc_t<T>>(weights), in<int64_t>(slot_of),
            shape, out<T>(dy), out<acc_t<T>>(dweights), RowIsUnique());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  dispatch_vectors("moe_unpermute", shape.hidden, launch, grad, y, dy);
  return {dy, dweights};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_moe_permute", moe_permute);
  m.impl("_moe_unpermute", moe_unpermute);
  m.impl("_moe_unpermute_bwd", moe_unpermute_bwd);
  m.impl("_moe_dot", moe_dot);
}

}  // namespace tp_ext
