// Vocab-parallel cross entropy on CUDA: launches.

#include <torch/library.h>

#include <algorithm>

#include "args/vocab_cross_entropy.h"
#include "cuda/launch.h"
#include "kernels/vocab_cross_entropy.cuh"

namespace tp_ext {
namespace {

// A device-side assert, as torch has for its own cross entropy
struct TargetInRange {
  __device__ void operator()(bool ok) const {
    CUDA_KERNEL_ASSERT(ok && "target must be in [0, vocab_size) or ignore_index");
  }
};

struct ShardsAgree {
  __device__ void operator()(bool ok) const {
    CUDA_KERNEL_ASSERT(ok &&
                       "the ranks' logits_local must make up one vocabulary: pass vocab_size");
  }
};

struct CudaLoss {
  static void stats(const Rows& rows, const Tensor& target, const CrossEntropyArgs& args,
                    bool shard_row, bool /* vocab_size_given */, const Tensor& stats) {
    if (stats.numel() == 0) return;
    const c10::cuda::CUDAGuard guard(stats.device());
    dispatch_floating(rows.tensor.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
      using T = decltype(type);
      const LaunchChoice tuned = choose_launch<T>(Family::kCeStats, args.vocab.local);
      const CeBlock block = ce_block<T>(args.vocab.local, tuned);
      int blocks = ce_blocks(std::max<int64_t>(rows.count, 1), block);
      auto* kernel = ce_stats_kernel<T, TargetInRange>;
      if constexpr (sizeof(T) <= 4) {
        if (ce_ahead<T>(args.vocab.local, {in<T>(rows.tensor)}, {rows.stride}, tuned)) {
          kernel = ce_stats_ahead_kernel<T, TargetInRange>;
          blocks = ce_ahead_blocks(rows.count, block, multiprocessors(), tuned);
        }
      }
      kernel<<<blocks, dim3(block.threads, block.rows), 0, c10::cuda::getCurrentCUDAStream()>>>(
          in<T>(rows.tensor), rows.stride, rows.count, args.vocab.local, in<int64_t>(target),
          args.vocab.start, args.vocab.size, args.ignore_index, out<acc_t<T>>(stats),
          TargetInRange(), shard_row ? rows.width : -1);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }

  static void loss(const Tensor& stats, const Tensor& target, const CrossEntropyArgs& args,
                   const Tensor& loss, const Tensor& lse) {
    const c10::cuda::CUDAGuard guard(stats.device());
    const int64_t ranks = stats.size(0), count = target.numel();
    const auto launch = [&](auto type) {
      using A = decltype(type);
      if (has_shard_row(stats, target)) {
        ce_check_kernel<<<grid_for(count), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            in<A>(stats), ranks, count, in<int64_t>(target), args.vocab.size, args.ignore_index,
            ShardsAgree(), TargetInRange());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      }
      if (count == 0) return;
      ce_loss_kernel<<<grid_for(count), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          in<A>(stats), ranks, count, in<int64_t>(target), args.ignore_index, args.options<A>(),
          out<A>(loss), out<A>(lse), has_shard_row(stats, target));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    stats.scalar_type() == at::kDouble ? launch(double{}) : launch(float{});
  }

  static void gradient(const CrossEntropyGrad& given, const Rows& x, const Rows& dx,
                       const CrossEntropyArgs& args) {
    if (x.count == 0 || x.width == 0) return;
    const c10::cuda::CUDAGuard guard(x.tensor.device());
    dispatch_floating(x.tensor.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
      using T = decltype(type);
      using A = acc_t<T>;
      const LaunchChoice tuned = choose_launch<T>(Family::kCeBackward, x.width);
      const CeBlock block = ce_block<T>(x.width, tuned);
      int blocks = ce_blocks(x.count, block);
      auto* kernel = ce_bwd_kernel<T>;
      if constexpr (sizeof(T) <= 4) {
        if (ce_ahead<T>(x.width, {in<T>(x.tensor), out<T>(dx.tensor)}, {x.stride, dx.stride},
                        tuned)) {
          kernel = ce_bwd_ahead_kernel<T>;
          blocks = ce_ahead_blocks(x.count, block, multiprocessors(), tuned);
        }
      }
      kernel<<<blocks, dim3(block.threads, block.rows), 0, c10::cuda::getCurrentCUDAStream()>>>(
          in<A>(given.grad), in<T>(x.tensor), x.stride, out<T>(dx.tensor), dx.stride, x.count,
          x.width, args.vocab.local, in<int64_t>(given.target), in<A>(given.lse), args.vocab.start,
          args.ignore_index, args.options<A>());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  using Primitives = CrossEntropyPrimitives<CudaLoss>;
  m.impl("_vocab_ce_stats", Primitives::stats);
  m.impl("_vocab_ce_loss", Primitives::loss);
  m.impl("_vocab_ce_bwd", Primitives::bwd);
  m.impl("_vocab_ce_bwd_", Primitives::bwd_inplace);
}

}  // namespace tp_ext
