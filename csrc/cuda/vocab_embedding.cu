// Vocab-parallel embedding on CUDA: checks, allocation, the sort, launches.

#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "args/vocab.h"
#include "cuda/launch.h"
#include "kernels/vocab_embedding.cuh"

namespace tp_ext {
namespace {

// A device-side assert, as torch has for its own embedding
struct IdInRange {
  __device__ void operator()(bool ok) const {
    CUDA_KERNEL_ASSERT(ok && "ids must be in [0, vocab_size)");
  }
};

// Calls f(index type) for int64 and int32 ids
template <typename F>
void dispatch_ids(const at::Tensor& ids, F f) {
  ids.scalar_type() == at::kLong ? f(int64_t{}) : f(int32_t{});
}

at::Tensor fwd_cuda(const at::Tensor& weight_any, const at::Tensor& ids_any, int64_t vocab_start,
                    int64_t vocab_local, int64_t vocab_size) {
  check_embedding(weight_any, ids_any, vocab_start, vocab_local, vocab_size);
  const c10::cuda::CUDAGuard guard(weight_any.device());
  const at::Tensor weight = weight_any.contiguous(), ids = ids_any.contiguous();
  const int64_t tokens = ids.numel(), hidden = weight.size(1);
  auto shape = ids.sizes().vec();
  shape.push_back(hidden);
  const at::Tensor result = at::empty(shape, weight.options());
  if (result.numel() == 0) return result;
  dispatch_floating(weight.scalar_type(), "vocab_parallel_embedding", [&](auto type) {
    using T = decltype(type);
    dispatch_ids(ids, [&](auto id_type) {
      using Id = decltype(id_type);
      const auto launch = [&](auto vector) {
        constexpr int N = decltype(vector)::value;
        embedding_fwd_kernel<N><<<grid_for(warp_row_threads<N>(tokens, hidden, kParts)), kThreads,
                                  0, c10::cuda::getCurrentCUDAStream()>>>(
            in<T>(weight), in<Id>(ids), tokens, hidden, vocab_start, vocab_local, vocab_size,
            out<T>(result), IdInRange());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      };
      vectorisable<T>(hidden, in<T>(weight), in<T>(result))
          ? launch(std::integral_constant<int, kVec<T>>())
          : launch(std::integral_constant<int, 1>());
    });
  });
  return result;
}

at::Tensor bwd_cuda(const at::Tensor& grad_any, const at::Tensor& ids_any, int64_t num_rows,
                    int64_t vocab_start, int64_t vocab_local) {
  const c10::cuda::CUDAGuard guard(grad_any.device());
  const at::Tensor grad =
      check_embedding_grad(grad_any, ids_any, num_rows, vocab_start, vocab_local);
  const at::Tensor ids = ids_any.contiguous();
  const int64_t tokens = ids.numel(), hidden = grad.size(-1);
  const at::Tensor dweight = at::empty({num_rows, hidden}, grad.options());
  if (dweight.numel() == 0) return dweight;
  if (tokens == 0) return dweight.zero_();

  const auto stream = c10::cuda::getCurrentCUDAStream();
  at::Tensor order;
  const at::Tensor segments = at::zeros({num_rows, 2}, ids.options().dtype(at::kLong));
  const auto of_row = [&](auto row) {
    using Row = decltype(row);
    const at::Tensor unsorted =
        at::empty({tokens}, ids.options().dtype(c10::CppTypeToScalarType<Row>::value));
    dispatch_ids(ids, [&](auto type) {
      embedding_rows_kernel<<<grid_for(tokens), kThreads, 0, stream>>>(
          in<decltype(type)>(ids), tokens, vocab_start, vocab_local, num_rows, out<Row>(unsorted));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
    const auto [sorted, positions] =
        at::sort(unsorted, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    embedding_segments_kernel<<<grid_for(tokens), kThreads, 0, stream>>>(
        in<Row>(sorted), tokens, num_rows, reinterpret_cast<Segment*>(out<int64_t>(segments)));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    order = positions;
  };
  // The sort goes over the bits of a key, eight at a time
  if (num_rows <= std::numeric_limits<int16_t>::max())
    of_row(int16_t{});
  else
    num_rows <= std::numeric_limits<int32_t>::max() ? of_row(int32_t{}) : of_row(int64_t{});

  const auto* const by_row = reinterpret_cast<const Segment*>(in<int64_t>(segments));
  dispatch_floating(grad.scalar_type(), "vocab_parallel_embedding", [&](auto type) {
    using T = decltype(type);
    const auto tuned = choose_launch<T>(Family::kEmbeddingBackward, hidden);
    const auto launch = [&](auto vector) {
      constexpr int N = decltype(vector)::value;
      const auto kernel = embedding_rows_at_once(tuned) == 4 ? embedding_bwd_kernel<N, 4, T>
                                                             : embedding_bwd_kernel<N, 8, T>;
      kernel<<<grid_for(warp_row_threads<N>(num_rows, hidden)), kThreads, 0, stream>>>(
          in<T>(grad), by_row, in<int64_t>(order), hidden, num_rows, out<T>(dweight));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    vectorisable<T>(hidden, in<T>(grad), in<T>(dweight))
        ? launch(std::integral_constant<int, kVec<T>>())
        : launch(std::integral_constant<int, 1>());
  });
  return dweight;
}

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_vocab_embedding_fwd", fwd_cuda);
  m.impl("_vocab_embedding_bwd", bwd_cuda);
}

}  // namespace
}  // namespace tp_ext
