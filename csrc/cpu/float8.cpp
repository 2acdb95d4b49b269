// 8-bit floating point on the CPU: the largest finite magnitude of a matrix, of its rows or
// columns, and its values with the scale that this gives.

#include "args/float8.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "cpu/dispatch.h"
#include "types.h"

namespace tp_ext {
namespace {

// |x|, 0 where it is not finite
TP_INLINE float finite_size(float x) {
  const float size = same_bits<float>(same_bits<uint32_t>(x) & 0x7fffffffu);
  return size <= std::numeric_limits<float>::max() ? size : 0.f;
}

template <typename T>
TP_MULTIVERSION float largest_of_row(const T* x, int64_t n) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    const float size = finite_size(to_acc(x[i]));
    largest = size > largest ? size : largest;
  }
  return largest;
}

template <typename T>
TP_MULTIVERSION void largest_of_columns(const T* x, int64_t rows, int64_t step, float* largest,
                                        int64_t n) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * step;
    for (int64_t i = 0; i < n; ++i) {
      const float size = finite_size(to_acc(row[i]));
      largest[i] = size > largest[i] ? size : largest[i];
    }
  }
}

Tensor amax(const Tensor& given, std::optional<int64_t> dim) {
  check_float8_values(given);
  check_amax_dim(dim);
  const Tensor x = given.contiguous();
  const int64_t m = x.size(0), n = x.size(1);
  const auto options = x.options().dtype(at::kFloat);
  if (dim == 0) {
    const Tensor result = at::zeros({1, n}, options);
    dispatch_floating(x.scalar_type(), "_finite_amax", [&](auto zero) {
      using T = decltype(zero);
      if constexpr (!std::is_same_v<T, double>)
        at::parallel_for(
            0, n, std::max<int64_t>(64, rows_per_thread(m)), [&](int64_t from, int64_t to) {
              largest_of_columns(in<T>(x) + from, m, n, out<float>(result) + from, to - from);
            });
    });
    return result;
  }
  const Tensor result = at::empty({m, 1}, options);
  dispatch_floating(x.scalar_type(), "_finite_amax", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>)
      at::parallel_for(0, m, rows_per_thread(n), [&](int64_t from, int64_t to) {
        for (int64_t r = from; r < to; ++r)
          out<float>(result)[r] = largest_of_row(in<T>(x) + r * n, n);
      });
  });
  if (dim == 1) return result;
  const Tensor all = at::empty({1, 1}, options);
  out<float>(all)[0] = largest_of_row(in<float>(result), m);
  return all;
}

template <typename Format, bool PerColumn, typename T>
TP_MULTIVERSION void quantize_row(const T* __restrict x, uint8_t* __restrict codes,
                                  const float* __restrict scales, int64_t n) {
  const float scale = PerColumn ? 0.f : scales[0];
  for (int64_t i = 0; i < n; ++i)
    codes[i] = float8_of<Format>(to_acc(x[i]), PerColumn ? scales[i] : scale);
}

template <typename Format>
std::tuple<Tensor, Tensor> quantize_to(const Tensor& x, const Tensor& amax, at::ScalarType dtype) {
  const int64_t m = x.size(0), n = x.size(1);
  const Tensor codes = at::empty({m, n}, x.options().dtype(dtype));
  const Tensor scales = at::empty_like(amax), inverse = at::empty_like(amax);
  for (int64_t i = 0; i < amax.numel(); ++i) {
    const float scale = float8_scale(Format::kMax, in<float>(amax)[i]);
    out<float>(scales)[i] = scale;
    out<float>(inverse)[i] = 1.f / scale;
  }
  if (codes.numel() == 0) return {codes, inverse};
  const bool per_row = amax.size(0) > 1, per_column = amax.size(1) > 1;
  dispatch_floating(x.scalar_type(), "_float8_quantize", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>)
      at::parallel_for(0, m, rows_per_thread(n), [&](int64_t from, int64_t to) {
        for (int64_t r = from; r < to; ++r) {
          const float* scale = in<float>(scales) + (per_row ? r : 0);
          auto* const row = static_cast<uint8_t*>(codes.mutable_data_ptr()) + r * n;
          per_column ? quantize_row<Format, true>(in<T>(x) + r * n, row, scale, n)
                     : quantize_row<Format, false>(in<T>(x) + r * n, row, scale, n);
        }
      });
  });
  return {codes, inverse};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& given, const Tensor& amax, at::ScalarType dtype) {
  check_float8_values(given);
  check_amax(amax, given);
  check_float8_format(dtype, "dtype");
  const Tensor x = given.contiguous(), largest = amax.contiguous();
  return dtype == at::kFloat8_e4m3fn ? quantize_to<E4m3>(x, largest, dtype)
                                     : quantize_to<E5m2>(x, largest, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_finite_amax", amax);
  m.impl("_float8_quantize", quantize);
}

}  // namespace tp_ext
