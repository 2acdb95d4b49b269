// Many tensors on CPU: the sum of all squares, and in-place scaling; in parallel over chunks
// (kernels/multi_tensor.h).

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "args/multi_tensor.h"
#include "cpu/dispatch.h"
#include "types.h"

namespace tp_ext {
namespace {

constexpr int kSums = 32;  // partial sums per chunk: many vectors wide on any machine

template <typename T>
TP_MULTIVERSION double squared_norm_of(const T* x, int64_t n) {
  double sum[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (int k = 0; k < kSums; ++k) sum[k] += squared(x[i + k]);
  for (int k = 0; i + k < n; ++k) sum[k] += squared(x[i + k]);
  for (int half = kSums / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) sum[k] += sum[k + half];
  return sum[0];
}

template <typename T>
TP_MULTIVERSION void scale_all(T* x, int64_t n, acc_t<T> scale) {
  for (int64_t i = 0; i < n; ++i) x[i] = scaled(x[i], scale);
}

// Calls f(tensor, start, length, chunk) for the chunks of all tensors, in parallel
template <typename F>
void for_each_chunk(const std::vector<Tensor>& xs, F f) {
  std::vector<int64_t> first{0};  // first chunk of each tensor; last entry: number of all
  int64_t elements = 0;
  for (const auto& x : xs) {
    first.push_back(first.back() + chunks_of_tensor(x.numel()));
    elements += x.numel();
  }
  if (elements == 0) return;
  const int64_t grain = std::max<int64_t>(1, 2 * kGrain * first.back() / elements);
  at::parallel_for(0, first.back(), grain, [&](int64_t begin, int64_t end) {
    size_t t = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (first[t + 1] <= chunk) ++t;
      const int64_t start = (chunk - first[t]) * kTensorChunk;
      f(xs[t], start, std::min(kTensorChunk, xs[t].numel() - start), chunk);
    }
  });
}

int64_t chunks_of_all(const std::vector<Tensor>& xs) {
  int64_t chunks = 0;
  for (const auto& x : xs) chunks += chunks_of_tensor(x.numel());
  return chunks;
}

Tensor squared_norm(at::TensorList xs) {
  const Tensor total = at::empty({}, at::kDouble);
  check_tensor_list(xs, xs[0], "xs[0]");
  const auto dense = as_dense(xs);
  std::vector<double> partial(chunks_of_all(dense));
  for_each_chunk(dense, [&](const Tensor& x, int64_t start, int64_t length, int64_t chunk) {
    dispatch_floating(x.scalar_type(), "_multi_tensor_squared_norm", [&](auto tag) {
      using T = decltype(tag);
      partial[chunk] = squared_norm_of(in<T>(x) + start, length);
    });
  });
  double sum = 0;
  for (const double one : partial) sum += one;
  *out<double>(total) = sum;
  return total;
}

void scale_(at::TensorList xs, const Tensor& scale) {
  check_scale(xs, scale);
  const double factor = scale.item<double>();
  if (factor == 1) return;
  const auto dense = as_dense(xs);
  for_each_chunk(dense, [&](const Tensor& x, int64_t start, int64_t length, int64_t) {
    dispatch_floating(x.scalar_type(), "_multi_tensor_scale_", [&](auto tag) {
      using T = decltype(tag);
      scale_all(out<T>(x) + start, length, static_cast<acc_t<T>>(factor));
    });
  });
  finish_writing(xs, dense);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_multi_tensor_squared_norm", squared_norm);
  m.impl("_multi_tensor_scale_", scale_);
}

}  // namespace tp_ext
