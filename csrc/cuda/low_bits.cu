// Frozen weights of 8 and 4 bits on CUDA.

#include "kernels/low_bits.cuh"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "args/low_bits.h"
#include "cuda/launch.h"

namespace tp_ext {
namespace {

// f(four) as a constant
template <typename F>
void with_bits(bool four, F f) {
  if (four)
    f(std::true_type());
  else
    f(std::false_type());
}

Tensor dequantize_low_bits(const Tensor& given, const Tensor& scale, std::optional<int64_t> block,
                           std::optional<at::ScalarType> dtype) {
  const LowBitsRows rows = check_low_bits(given, scale, block);
  const c10::cuda::CUDAGuard guard(given.device());
  const Tensor packed = given.contiguous(), scales = scale.to(at::kFloat).contiguous();
  const Tensor weight = at::empty({rows.count, rows.inputs()}, scales.options());
  if (weight.numel() == 0) return weight.to(dtype.value_or(at::kFloat));
  with_bits(rows.four(), [&](auto four) {
    const auto launch = [&](auto kernel, int bytes) {
      kernel<<<grid_for(rows.count * rows.bytes / bytes), kThreads, 0,
               c10::cuda::getCurrentCUDAStream()>>>(in<uint8_t>(packed), in<float>(scales),
                                                    out<float>(weight), rows);
    };
    constexpr int N = kRowBytes<four()>;
    if (low_bits_in_vectors<N>(rows, packed.const_data_ptr(), weight.const_data_ptr()))
      launch(low_bits_rows_kernel<four(), N>, N);
    else
      launch(low_bits_rows_kernel<four(), 1>, 1);
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return weight.to(dtype.value_or(at::kFloat));
}

Tensor low_bits_product(const Tensor& given, const Tensor& packed, const Tensor& scale,
                        std::optional<int64_t> block) {
  const LowBitsRows rows = check_low_bits_product(given, packed, scale, block);
  const c10::cuda::CUDAGuard guard(given.device());
  const Tensor x = given.contiguous(), weight = packed.contiguous(),
               scales = scale.to(at::kFloat).contiguous();
  const Tensor y = at::empty({x.size(0), rows.count}, x.options());
  if (y.numel() == 0) return y;
  dispatch_floating(x.scalar_type(), "low_bits_product", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>)
      with_bits(rows.four(), [&](auto four) {
        const auto launch = [&](auto kernel) {
          kernel<<<grid_for(rows.count * kWarp), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
              in<T>(x), in<uint8_t>(weight), in<float>(scales), out<T>(y), x.size(0), rows);
        };
        if (low_bits_in_vectors<kProductBytes>(rows, weight.const_data_ptr(), x.const_data_ptr()))
          launch(low_bits_product_kernel<four(), kProductBytes, T>);
        else
          launch(low_bits_product_kernel<four(), 1, T>);
      });
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_dequantize_low_bits", dequantize_low_bits);
  m.impl("_low_bits_product", low_bits_product);
}

}  // namespace tp_ext
