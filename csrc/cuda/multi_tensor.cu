// Many tensors on CUDA: the sum of all squares, and in-place scaling; copies by torch's kernels.
// Tensors go to the kernels in lists of one dtype, in order; the scale stays on the device.

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "args/multi_tensor.h"
#include "cuda/launch.h"
#include "kernels/multi_tensor.cuh"
#include "types.h"

namespace tp_ext {
namespace {

constexpr at::ScalarType kListDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

// Calls launch(list, dtype) for all tensors, up to kListTensors of one dtype at a time
template <typename Launch>
void for_each_list(const std::vector<Tensor>& xs, Launch launch) {
  for (const auto dtype : kListDtypes) {
    TensorList list{};
    const auto flush = [&] {
      if (list.count > 0) launch(list, dtype);
      list.count = 0;
    };
    for (const auto& x : xs) {
      if (x.scalar_type() != dtype || x.numel() == 0) continue;
      const int64_t chunks = chunks_of_tensor(x.numel());
      if (list.count == kListTensors ||
          (list.count > 0 && list.first_chunk[list.count] + chunks > INT32_MAX))
        flush();
      list.data[list.count] = const_cast<void*>(x.const_data_ptr());
      list.numel[list.count] = x.numel();
      list.first_chunk[list.count + 1] =
          static_cast<int32_t>(list.first_chunk[list.count] + chunks);
      ++list.count;
    }
    flush();
  }
}

Tensor squared_norm(at::TensorList xs) {
  check_tensor_list(xs, xs[0], "xs[0]");
  const c10::cuda::CUDAGuard guard(xs[0].device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto dense = as_dense(xs);
  int64_t chunks = 0, written = 0;
  for (const auto& x : dense) chunks += chunks_of_tensor(x.numel());
  const Tensor partial = at::empty({chunks}, xs[0].options().dtype(at::kDouble));
  const Tensor total = at::empty({}, partial.options());
  for_each_list(dense, [&](const TensorList& list, at::ScalarType dtype) {
    const int32_t blocks = list.first_chunk[list.count];
    dispatch_floating(dtype, "_multi_tensor_squared_norm", [&](auto tag) {
      squared_norm_kernel<decltype(tag)>
          <<<static_cast<unsigned>(blocks), kListThreads, 0, stream>>>(
              list, out<double>(partial) + written);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
    written += blocks;
  });
  sum_of_partials_kernel<<<1, kSumThreads, 0, stream>>>(in<double>(partial), chunks,
                                                        out<double>(total));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return total;
}

void scale_(at::TensorList xs, const Tensor& scale) {
  check_scale(xs, scale);
  const c10::cuda::CUDAGuard guard(scale.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Tensor factor = scale.to(at::kDouble);
  const auto dense = as_dense(xs);
  for_each_list(dense, [&](const TensorList& list, at::ScalarType dtype) {
    const auto blocks = static_cast<unsigned>(list.first_chunk[list.count]);
    dispatch_floating(dtype, "_multi_tensor_scale_", [&](auto tag) {
      multi_tensor_scale_kernel<decltype(tag)>
          <<<blocks, kListThreads, 0, stream>>>(list, in<double>(factor));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
  finish_writing(xs, dense);
}

void copy_(at::TensorList outs, at::TensorList values) {
  const c10::cuda::CUDAGuard guard(outs[0].device());
  at::_foreach_copy_(outs, values);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_multi_tensor_squared_norm", squared_norm);
  m.impl("_multi_tensor_scale_", scale_);
  m.impl("_multi_tensor_copy_", copy_);
}

}  // namespace tp_ext
