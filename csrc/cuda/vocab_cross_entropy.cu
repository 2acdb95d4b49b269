// Vocab-parallel cross entropy on CUDA: checks, allocation, launches.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "cuda/launch.h"
#include "kernels/vocab_cross_entropy.cuh"
#include "args/vocab.h"

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

at::Tensor stats_cuda(const at::Tensor& logits, const at::Tensor& target_any, int64_t vocab_start,
                      int64_t vocab_local, int64_t vocab_size, int64_t ignore_index, bool shard_row,
                      bool /* vocab_size_given */) {
  check_ce_logits(logits, target_any, vocab_start, vocab_local, vocab_size);
  const c10::cuda::CUDAGuard guard(logits.device());
  const at::Tensor target = target_any.contiguous();
  const Rows rows = rows_of(logits);
  const at::Tensor stats =
      at::empty({rows.count + shard_row, 4}, logits.options().dtype(ce_stats_dtype(logits)));
  if (stats.numel() == 0) return stats;
  dispatch_floating(logits.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
    using T = decltype(type);
    const CeBlock block = ce_block<T>(vocab_local);
    ce_stats_kernel<<<ce_blocks(std::max<int64_t>(rows.count, 1), block),
                      dim3(block.threads, block.rows), 0, c10::cuda::getCurrentCUDAStream()>>>(
        in<T>(rows.tensor), rows.stride, rows.count, vocab_local, in<int64_t>(target), vocab_start,
        vocab_size, ignore_index, out<acc_t<T>>(stats), TargetInRange(),
        shard_row ? rows.width : -1);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return stats;
}

std::tuple<at::Tensor, at::Tensor> loss_cuda(const at::Tensor& stats_any,
                                             const at::Tensor& target_any, int64_t vocab_size,
                                             int64_t ignore_index, double label_smoothing,
                                             double z_loss) {
  check_ce_stats(stats_any, target_any);
  const c10::cuda::CUDAGuard guard(stats_any.device());
  const at::Tensor stats = stats_any.contiguous(), target = target_any.contiguous();
  const int64_t ranks = stats.size(0), count = target.numel();
  const at::Tensor loss = at::empty({count}, stats.options());
  const at::Tensor lse = at::empty({count, 2}, stats.options());
  const auto launch = [&](auto type) {
    using A = decltype(type);
    if (has_shard_row(stats, target)) {
      ce_check_kernel<<<grid_for(count), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          in<A>(stats), ranks, count, in<int64_t>(target), vocab_size, ignore_index, ShardsAgree(),
          TargetInRange());
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    if (count == 0) return;
    ce_loss_kernel<<<grid_for(count), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        in<A>(stats), ranks, count, in<int64_t>(target), ignore_index,
        CeOptions<A>{A(label_smoothing), A(z_loss), A(vocab_size)}, out<A>(loss), out<A>(lse),
        has_shard_row(stats, target));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  stats.scalar_type() == at::kDouble ? launch(double{}) : launch(float{});
  return {loss, lse};
}

void fill_grad(const at::Tensor& grad_any, const Rows& x, const Rows& dx,
               const at::Tensor& target_any, const at::Tensor& lse_any, int64_t vocab_start,
               int64_t vocab_local, int64_t vocab_size, int64_t ignore_index,
               double label_smoothing, double z_loss) {
  if (x.count == 0 || x.width == 0) return;
  const c10::cuda::CUDAGuard guard(x.tensor.device());
  const at::Tensor grad = grad_any.contiguous(), target = target_any.contiguous(),
                   lse = lse_any.contiguous();
  dispatch_floating(x.tensor.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    const CeBlock block = ce_block<T>(x.width);
    ce_bwd_kernel<<<ce_blocks(x.count, block), dim3(block.threads, block.rows), 0,
                    c10::cuda::getCurrentCUDAStream()>>>(
        in<A>(grad), in<T>(x.tensor), x.stride, out<T>(dx.tensor), dx.stride, x.count, x.width,
        vocab_local, in<int64_t>(target), in<A>(lse), vocab_start, ignore_index,
        CeOptions<A>{A(label_smoothing), A(z_loss), A(vocab_size)});
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

at::Tensor bwd_cuda(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                    const at::Tensor& lse, int64_t vocab_start, int64_t vocab_local,
                    int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                    double z_loss) {
  check_ce_logits(logits, target, vocab_start, vocab_local, vocab_size);
  check_ce_grad(grad, lse, logits, target);
  const at::Tensor dx = at::empty_like(logits, at::MemoryFormat::Contiguous);
  fill_grad(grad, rows_of(logits), rows_of(dx), target, lse, vocab_start, vocab_local, vocab_size,
            ignore_index, label_smoothing, z_loss);
  return dx;
}

void bwd_inplace_cuda(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                      const at::Tensor& lse, int64_t vocab_start, int64_t vocab_local,
                      int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                      double z_loss) {
  check_ce_writable(logits);
  Rows rows;
  if (!rows_of(logits, rows)) {  // no row structure in memory: copy
    logits.copy_(bwd_cuda(grad, logits, target, lse, vocab_start, vocab_local, vocab_size,
                          ignore_index, label_smoothing, z_loss));
    return;
  }
  check_ce_logits(logits, target, vocab_start, vocab_local, vocab_size);
  check_ce_grad(grad, lse, logits, target);
  fill_grad(grad, rows, rows, target, lse, vocab_start, vocab_local, vocab_size, ignore_index,
            label_smoothing, z_loss);
}

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_vocab_ce_stats", stats_cuda);
  m.impl("_vocab_ce_loss", loss_cuda);
  m.impl("_vocab_ce_bwd", bwd_cuda);
  m.impl("_vocab_ce_bwd_", bwd_inplace_cuda);
}

}  // namespace
}  // namespace tp_ext
