// Attention of a few queries on the CPU: all rows of q that share a head of k and v go through its
// keys, and then its values, once, which is what a step of decoding waits for. A GEMM of so few rows
// copies its operands first, and takes twice as long where they come from memory.

#include "query_attention.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/prefetch.h"
#include "cpu/vectors.h"

namespace tp_ext {
namespace {

constexpr int64_t kAhead = 16;    // rows between a prefetch and its use
constexpr int64_t kTogether = 4;  // values that share a pass over the sums

// One head of k and v; strides are those of the rows, in elements
template <typename T>
struct HeadRows {
  using A = acc_t<T>;
  const A* q;  // [rows, width], scaled
  const T *k, *v;
  int64_t k_stride, v_stride;
  A* weights;  // [rows, keys]
  A* sums;     // [rows, v_width]
  int64_t rows, keys, width, v_width;
};

template <typename T>
TP_INLINE void fetch_row(const T* row, int64_t width) {
  for (int64_t d = 0; d < width; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 3);
}

template <typename T, int kRows>
TP_INLINE void products_of_key(const HeadRows<T>& p, const T* key, int64_t first, int64_t j) {
  using A = acc_t<T>;
  Vector<A> lanes[4] = {};
  for (int64_t d = 0; d < p.width; d += kLanes<A>) {
    const Vector<A> k = load(key + d);
    for (int i = 0; i < kRows; ++i) lanes[i] += load(p.q + (first + i) * p.width + d) * k;
  }
  const HalfVector<A> sums = sums_of_lanes<A>(lanes);
  for (int i = 0; i < kRows; ++i) p.weights[(first + i) * p.keys + j] = sums[i];
}

template <typename T>
TP_MULTIVERSION void products(const HeadRows<T>& p) {
  for (int64_t j = 0; j < p.keys; ++j) {
    const T* const key = p.k + j * p.k_stride;
    fetch_row(key + kAhead * p.k_stride, p.width);
    int64_t i = 0;
    for (; i + 4 <= p.rows; i += 4) products_of_key<T, 4>(p, key, i, j);
    for (; i < p.rows; ++i) products_of_key<T, 1>(p, key, i, j);
  }
}

template <typename A>
TP_MULTIVERSION void softmax(A* row, int64_t n) {
  A max = -std::numeric_limits<A>::infinity();
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < n; ++j) max = row[j] > max ? row[j] : max;
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) {
    row[j] = exp_down(row[j] - max);
    sum += row[j];
  }
  const A inverse = A(1) / sum;
  for (int64_t j = 0; j < n; ++j) row[j] *= inverse;
}

template <typename T, int kValues>
TP_INLINE void add_values(const HeadRows<T>& p, int64_t j) {
  using A = acc_t<T>;
  const T* const value = p.v + j * p.v_stride;
  for (int64_t d = 0; d < p.v_width; d += kLanes<A>) {
    Vector<A> v[kValues];
    for (int i = 0; i < kValues; ++i) v[i] = load(value + i * p.v_stride + d);
    for (int64_t r = 0; r < p.rows; ++r) {
      A* const at = p.sums + r * p.v_width + d;
      const A* const w = p.weights + r * p.keys + j;
      Vector<A> sum = load(at);
      for (int i = 0; i < kValues; ++i) sum += w[i] * v[i];
      std::memcpy(at, &sum, sizeof sum);
    }
  }
}

template <typename T>
TP_MULTIVERSION void weighted_values(const HeadRows<T>& p) {
  int64_t j = 0;
  for (; j + kTogether <= p.keys; j += kTogether) {
    for (int i = 0; i < kTogether; ++i) fetch_row(p.v + (j + kAhead + i) * p.v_stride, p.v_width);
    add_values<T, kTogether>(p, j);
  }
  for (; j < p.keys; ++j) add_values<T, 1>(p, j);
}

template <typename T>
void attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& y, double scale) {
  using A = acc_t<T>;
  const int64_t heads = q.size(1), rows = q.size(2), width = q.size(3);
  const int64_t keys = k.size(2), v_width = v.size(3);
  const int64_t grain = std::max<int64_t>(1, kGrain / (keys * (width + v_width) + 1));
  at::parallel_for(0, q.size(0) * heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(rows * (width + keys + v_width));
    A *const scaled = scratch.data(), *const weights = scaled + rows * width,
             *const sums = weights + rows * keys;
    for (int64_t head = begin; head < end; ++head) {
      const int64_t b = head / heads, h = head % heads;
      const T* const queries = in<T>(q) + head * rows * width;
      for (int64_t i = 0; i < rows * width; ++i)
        scaled[i] = to_acc(queries[i]) * static_cast<A>(scale);
      std::fill_n(sums, rows * v_width, A(0));
      const HeadRows<T> p{scaled,
                          in<T>(k) + b * k.stride(0) + h * k.stride(1),
                          in<T>(v) + b * v.stride(0) + h * v.stride(1),
                          k.stride(2),
                          v.stride(2),
                          weights,
                          sums,
                          rows,
                          keys,
                          width,
                          v_width};
      products(p);
      for (int64_t r = 0; r < rows; ++r) softmax(weights + r * keys, keys);
      weighted_values(p);
      T* const result = out<T>(y) + head * rows * v_width;
      for (int64_t i = 0; i < rows * v_width; ++i) result[i] = from_acc<T>(sums[i]);
    }
  });
}

}  // namespace

bool few_queries(const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto dtype = q.scalar_type();
  const bool paired = q.sizes().slice(0, 2) == k.sizes().slice(0, 2) &&
                      v.sizes().slice(0, 3) == k.sizes().slice(0, 3) && k.is_cpu() && v.is_cpu();
  const bool known = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16;
  const auto whole = [](const Tensor& t) { return t.size(3) % 16 == 0 && t.stride(3) == 1; };
  return paired && known && k.scalar_type() == dtype && v.scalar_type() == dtype &&
         q.size(2) <= kMostQueries && k.size(2) > 0 && q.numel() > 0 && whole(k) && whole(v) &&
         q.size(3) == k.size(3);
}

Tensor query_attention_cpu(const Tensor& given, const Tensor& k, const Tensor& v, double scale) {
  const Tensor q = given.contiguous();
  const Tensor y = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  if (q.scalar_type() == at::kFloat)
    attend<float>(q, k, v, y, scale);
  else if (q.scalar_type() == at::kDouble)
    attend<double>(q, k, v, y, scale);
  else
    attend<Bf16>(q, k, v, y, scale);
  return y;
}

}  // namespace tp_ext
