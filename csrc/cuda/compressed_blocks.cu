// Compressed gradients on CUDA.

#include "kernels/compressed_blocks.cuh"

#include <torch/library.h>

#include "args/compressed_blocks.h"
#include "cuda/launch.h"
#include "kernels/vec.cuh"
#include "types.h"

namespace tp_ext {
namespace {

// At most: the last block of each rank may be shorter
int64_t blocks_of_ranks(const Tensor& x, const Tensor& places, int64_t block) {
  return blocks_in(x.numel(), block) + places.size(0);
}

int grid_of(int64_t blocks) { return grid_for(blocks, kBlockWarps); }

void compress(const Tensor& x, const OptionalTensor& residual, const Tensor& wire,
              const Tensor& places, int64_t block, bool float8) {
  check_values(x, "x");
  check_residual(residual, x.numel(), wire);
  check_wire(wire, "wire", x);
  check_places(places, x, block);
  const c10::cuda::CUDAGuard guard(x.device());
  if (x.numel() == 0) return;
  const int64_t blocks = blocks_of_ranks(x, places, block);
  dispatch_floating(x.scalar_type(), "_compress_blocks_", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>)
      with_code(float8, [&](auto code) {
        compress_blocks_kernel<decltype(code), T>
            <<<grid_of(blocks), kBlockThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                in<T>(x), residual.has_value() ? out<float>(*residual) : nullptr,
                out<uint8_t>(wire), in<int64_t>(places), static_cast<int>(places.size(0)), block,
                blocks);
      });
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void sum_compressed(const Tensor& received, const OptionalTensor& residual, const Tensor& wire,
                    int64_t byte, int64_t count, int64_t block, bool float8) {
  check_wire(received, "received", wire);
  check_wire(wire, "wire", wire);
  check_residual(residual, count, wire);
  check_sums(received, wire, byte, count, block);
  const c10::cuda::CUDAGuard guard(wire.device());
  const int64_t blocks = blocks_in(count, block);
  if (blocks == 0) return;
  with_code(float8, [&](auto code) {
    sum_compressed_kernel<decltype(code)>
        <<<grid_of(blocks), kBlockThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            in<uint8_t>(received) + byte, static_cast<int>(received.size(0)), received.size(1),
            residual.has_value() ? out<float>(*residual) : nullptr, out<uint8_t>(wire) + byte,
            count, block, blocks);
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void decompress(const Tensor& wire, const Tensor& values, const Tensor& places, int64_t block,
                bool float8) {
  check_values(values, "out");
  check_wire(wire, "wire", values);
  check_places(places, values, block);
  const c10::cuda::CUDAGuard guard(values.device());
  if (values.numel() == 0) return;
  const int64_t blocks = blocks_of_ranks(values, places, block);
  dispatch_floating(values.scalar_type(), "_decompress_blocks_", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>)
      with_code(float8, [&](auto code) {
        decompress_blocks_kernel<decltype(code), T>
            <<<grid_of(blocks), kBlockThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
                in<uint8_t>(wire), out<T>(values), in<int64_t>(places),
                static_cast<int>(places.size(0)), block, blocks);
      });
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_compress_blocks_", compress);
  m.impl("_sum_compressed_blocks_", sum_compressed);
  m.impl("_decompress_blocks_", decompress);
}

}  // namespace tp_ext
