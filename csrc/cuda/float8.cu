// 8-bit floating point on CUDA, in torch's operators.

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <tuple>

#include "args/float8.h"
#include "types.h"

namespace tp_ext {
namespace {

Tensor amax_on_gpu(const Tensor& x, std::optional<int64_t> dim) {
  check_float8_values(x);
  check_amax_dim(dim);
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t rows = dim == 1 ? x.size(0) : 1, columns = dim == 0 ? x.size(1) : 1;
  const auto options = x.options().dtype(at::kFloat);
  if (x.numel() == 0) return at::zeros({rows, columns}, options);
  const Tensor size = at::where(x.isfinite(), x.abs(), 0);
  std::vector<int64_t> dims;
  if (dim != 1) dims.push_back(0);
  if (dim != 0) dims.push_back(1);
  return at::amax(size, dims, /*keepdim=*/true).to(at::kFloat);
}

std::tuple<Tensor, Tensor> quantize_on_gpu(const Tensor& x, const Tensor& amax,
                                           at::ScalarType dtype) {
  check_float8_values(x);
  check_amax(amax, x);
  check_float8_format(dtype, "dtype");
  const c10::cuda::CUDAGuard guard(x.device());
  const double most = dtype == at::kFloat8_e4m3fn ? E4m3::kMax : E5m2::kMax;
  const Tensor scale =
      at::where(amax == 0, 1., most / amax.to(at::kDouble).clamp_min(1e-12)).to(at::kFloat);
  const Tensor wide = x.to(at::kFloat);
  const Tensor q = (wide * scale).clamp_(-most, most);
  return {at::where(wide.isfinite(), q, std::numeric_limits<double>::quiet_NaN()).to(dtype),
          scale.reciprocal()};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CUDA, m) {
  m.impl("_finite_amax", amax_on_gpu);
  m.impl("_float8_quantize", quantize_on_gpu);
}

}  // namespace tp_ext
