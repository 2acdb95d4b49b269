// Rows of a weight in blocks of a few, each of which is multiplied with all rows of x while it is in
// the first cache. The weight is one stream of memory, whose next lines are prefetched.

#include "skinny_linear.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "cpu/dispatch.h"
#include "cpu/vectors.h"

namespace tp_ext {
namespace {

// Bytes between a prefetch, into the second cache, and its use. Twice as many are slower, and so is
// a prefetch into the first cache.
constexpr int64_t kBytesAhead = 65536;
constexpr int64_t kLeastElements = int64_t{1} << 16;  // of a weight: smaller ones stay in a cache

template <typename T>
struct Skinny {
  const float* x;  // [rows, in]
  const T* w;      // [out, in]
  const float* bias;
  T* y;  // [rows, out]
  int64_t rows, in, out;
};

// Products of kW rows of w with kX of x, whose first ones are n and m
template <typename T, int kW, int kX>
TP_INLINE void products_of_rows(const Skinny<T>& p, int64_t n, int64_t m, bool fetches) {
  constexpr int kSums = kW * kX, kPadded = (kSums + 3) / 4 * 4;
  Vector<float> sums[kPadded] = {};
  const T* const w = p.w + n * p.in;
  const float* const x = p.x + m * p.in;
  for (int64_t k = 0; k < p.in; k += kLanes<float>) {
    Vector<float> of_w[kW];
    for (int i = 0; i < kW; ++i) {
      of_w[i] = load(w + i * p.in + k);
      if (fetches) __builtin_prefetch(w + i * p.in + k + kBytesAhead / sizeof(T), 0, 2);
    }
    for (int j = 0; j < kX; ++j) {
      const Vector<float> of_x = load(x + j * p.in + k);
      for (int i = 0; i < kW; ++i) sums[i * kX + j] += of_w[i] * of_x;
    }
  }
  for (int s = 0; s < kSums; s += 4) {
    const HalfVector<float> four = sums_of_lanes<float>(sums + s);
    for (int t = s; t < std::min(s + 4, kSums); ++t) {
      const int64_t row = n + t / kX;
      const float bias = p.bias == nullptr ? 0.f : p.bias[row];
      p.y[(m + t % kX) * p.out + row] = from_acc<T>(four[t - s] + bias);
    }
  }
}

// All rows of x, kX at a time
template <typename T, int kW, int kX>
TP_INLINE void block(const Skinny<T>& p, int64_t n, int64_t m) {
  for (; m + kX <= p.rows; m += kX) products_of_rows<T, kW, kX>(p, n, m, m == 0);
  if constexpr (kX > 1) block<T, kW, kX / 2>(p, n, m);
}

template <typename T, int kW, int kX>
TP_MULTIVERSION void rows_of(const Skinny<T>& p, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + kW <= end; n += kW) block<T, kW, kX>(p, n, 0);
  for (; n < end; ++n) block<T, 1, kX>(p, n, 0);
}

// As many sums at a time as there are registers for: each is a chain of additions
template <typename T>
auto* kernel_for(int64_t rows) {
  const bool few = rows < 4;
  if (has_avx512()) return few ? rows_of<T, 6, 2> : rows_of<T, 6, 4>;
  return few ? rows_of<T, 4, 1> : rows_of<T, 2, 2>;
}

}  // namespace

bool is_skinny(const Tensor& x, const Tensor& weight) {
  if (x.numel() > kMostSkinnyRows * weight.size(1)) return false;  // first: all of training
  const auto dtype = weight.scalar_type();
  return x.is_cpu() && weight.is_cpu() && (dtype == at::kFloat || dtype == at::kBFloat16) &&
         x.scalar_type() == dtype && x.size(-1) == weight.size(1) && x.numel() > 0 &&
         weight.numel() >= kLeastElements && weight.size(1) % kLanes<float> == 0 &&
         weight.is_contiguous();
}

Tensor skinny_linear_cpu(const Tensor& given, const Tensor& weight, const OptionalTensor& bias) {
  const auto widened = [](const Tensor& t) { return t.to(at::kFloat).contiguous(); };
  const Tensor x = widened(given), wide_bias = bias.has_value() ? widened(*bias) : Tensor();
  auto shape = given.sizes().vec();
  shape.back() = weight.size(0);
  const Tensor y = at::empty(shape, given.options());
  const int64_t in_size = weight.size(1), out_size = weight.size(0), rows = x.numel() / in_size;
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    const auto* const b = bias.has_value() ? in<float>(wide_bias) : nullptr;
    const Skinny<T> p{in<float>(x), in<T>(weight), b, out<T>(y), rows, in_size, out_size};
    const auto kernel = kernel_for<T>(rows);
    at::parallel_for(0, out_size, rows_per_thread(in_size),
                     [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  };
  if (weight.scalar_type() == at::kFloat)
    run(float{});
  else
    run(Bf16{});
  return y;
}

}  // namespace tp_ext
