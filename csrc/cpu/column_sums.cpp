// CPU: the sums of the columns of a matrix, each in the order of its rows, in fp64, rounded once:
// the bits do not depend on the other columns, on strides or on threads.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "args/column_sums.h"
#include "cpu/dispatch.h"
#include "kernels/scalar.h"

namespace tp_ext {
namespace {

constexpr int64_t kWidth = 512;  // columns of a chunk: its sums stay in the cache

// sums[j] = the sum over the rows of x[r * stride + j]
template <typename T>
TP_MULTIVERSION void sum_chunk(const T* x, int64_t rows, int64_t columns, int64_t stride,
                               double* sums) {
  for (int64_t j = 0; j < columns; ++j) sums[j] = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < columns; ++j) sums[j] += static_cast<double>(to_acc(x[r * stride + j]));
}

at::Tensor column_sums(const at::Tensor& matrix, at::IntArrayRef lengths) {
  check_column_sums(matrix, lengths);
  const at::Tensor x = matrix.stride(1) == 1 || matrix.numel() == 0 ? matrix : matrix.contiguous();
  const int64_t columns = x.size(1), chunks = (columns + kWidth - 1) / kWidth;
  const at::Tensor result = at::empty({columns}, x.options().dtype(column_sums_dtype(x)));
  dispatch_floating(x.scalar_type(), "column_sums", [&](auto zero) {
    using T = decltype(zero);
    at::parallel_for(0, chunks, rows_per_thread(kWidth * x.size(0)),
                     [&](int64_t begin, int64_t end) {
                       std::vector<double> sums(kWidth);
                       for (int64_t i = begin; i < end; ++i) {
                         const int64_t first = i * kWidth, n = std::min(kWidth, columns - first);
                         sum_chunk(in<T>(x) + first, x.size(0), n, x.stride(0), sums.data());
                         auto* to = out<acc_t<T>>(result) + first;
                         for (int64_t j = 0; j < n; ++j) to[j] = static_cast<acc_t<T>>(sums[j]);
                       }
                     });
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) { m.impl("_column_sums", column_sums); }

}  // namespace tp_ext
