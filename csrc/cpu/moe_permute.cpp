// moe_permute, moe_unpermute and moe_dot on the CPU. Threads own tokens; the slots of a token are
// visited in order and no two slots share a row, so nothing depends on the number of threads.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "args/moe_permute.h"
#include "cpu/dispatch.h"
#include "cpu/norm_rows.h"
#include "kernels/moe_permute.h"

namespace tp_ext {
namespace {

constexpr int64_t kChunk = 1024;
constexpr int kDotLanes = 32;

int64_t tokens_per_thread(const MoeShape& shape) {
  return std::max<int64_t>(1, kGrain / (shape.choices * shape.hidden + 1));
}

void check_moe_rows(const Tensor& rows, int64_t num_rows) {
  const auto* row = in<int64_t>(rows);
  for (int64_t s = 0; s < rows.numel(); ++s)
    TORCH_CHECK_INDEX(row[s] >= -1 && row[s] < num_rows, "rows: ", row[s],
                      " must be -1 or in [0, num_rows), [0, ", num_rows, ")");
}

// Whether each row has a slot; checks that none has two
std::vector<char> rows_with_slot(const Tensor& rows, int64_t num_rows) {
  check_moe_rows(rows, num_rows);
  std::vector<char> used(num_rows, 0);
  const auto* row = in<int64_t>(rows);
  for (int64_t s = 0; s < rows.numel(); ++s) {
    if (row[s] < 0) continue;
    TORCH_CHECK_VALUE(!used[row[s]], "rows: ", row[s], " must occur once, it belongs to two slots");
    used[row[s]] = 1;
  }
  return used;
}

// Writes zeros to the rows of y that have no slot
void clear_unused(const std::vector<char>& used, const Tensor& y) {
  const int64_t num_rows = y.size(0);
  const size_t row_bytes = y.size(1) * y.element_size();
  char* const to = out<char>(y);
  if (row_bytes == 0) return;
  at::parallel_for(0, num_rows, std::max<int64_t>(1, kGrain / y.size(1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t r = begin; r < end; ++r)
                       if (!used[r]) std::memset(to + r * row_bytes, 0, row_bytes);
                   });
}

template <typename T>
TP_MULTIVERSION void scale_row(const T* __restrict x, acc_t<T> weight, int64_t n, T* __restrict y) {
  for (int64_t i = 0; i < n; ++i) y[i] = moe_scaled(x[i], weight);
}

// x = sum over the slots of a token of weights[j] * y[rows[j]]
template <typename T>
TP_MULTIVERSION void sum_slots(const T* y, const int64_t* rows, const acc_t<T>* weights,
                               int64_t choices, int64_t hidden, T* x) {
  using A = acc_t<T>;
  A sum[kChunk];
  for (int64_t start = 0; start < hidden; start += kChunk) {
    const int64_t size = std::min(kChunk, hidden - start);
    for (int64_t i = 0; i < size; ++i) sum[i] = 0;
    for (int64_t j = 0; j < choices; ++j) {
      if (rows[j] < 0) continue;
      const T* from = y + rows[j] * hidden + start;
      const A weight = moe_weight(weights, j);
      for (int64_t i = 0; i < size; ++i) sum[i] += weight * to_acc(from[i]);
    }
    for (int64_t i = 0; i < size; ++i) x[start + i] = from_acc<T>(sum[i]);
  }
}

template <typename T>
TP_MULTIVERSION acc_t<T> dot(const T* __restrict x, const T* __restrict y, int64_t n) {
  acc_t<T> lanes[kDotLanes] = {};
  int64_t i = 0;
  for (; i + kDotLanes <= n; i += kDotLanes)
    for (int l = 0; l < kDotLanes; ++l) lanes[l] += to_acc(x[i + l]) * to_acc(y[i + l]);
  for (int l = 0; i + l < n; ++l) lanes[l] += to_acc(x[i + l]) * to_acc(y[i + l]);
  return sum_lanes(lanes);
}

// Calls f(token) for all tokens, in parallel
template <typename F>
void each_token(const MoeShape& shape, F f) {
  at::parallel_for(0, shape.tokens, tokens_per_thread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) f(t);
  });
}

OptionalTensor contiguous(const OptionalTensor& t) { return t ? t->contiguous() : t; }

Tensor moe_permute(const Tensor& x_any, const Tensor& rows_any, int64_t num_rows,
                   const OptionalTensor& weights_any) {
  const MoeShape shape = check_moe_permute(x_any, rows_any, num_rows, weights_any);
  const Tensor x = x_any.contiguous(), rows = rows_any.contiguous();
  const OptionalTensor weights = contiguous(weights_any);
  const Tensor y = at::empty({num_rows, shape.hidden}, x.options());
  clear_unused(rows_with_slot(rows, num_rows), y);
  dispatch_floating(x.scalar_type(), "moe_permute", [&](auto zero) {
    using T = decltype(zero);
    const auto* row = in<int64_t>(rows);
    const auto* weight = in<acc_t<T>>(weights);
    each_token(shape, [&](int64_t t) {
      const T* const from = in<T>(x) + t * shape.hidden;
      for (int64_t s = t * shape.choices; s < (t + 1) * shape.choices; ++s) {
        if (row[s] < 0) continue;
        T* const to = out<T>(y) + row[s] * shape.hidden;
        if (weight == nullptr)
          std::copy_n(from, shape.hidden, to);
        else
          scale_row(from, weight[s], shape.hidden, to);
      }
    });
  });
  return y;
}

Tensor moe_unpermute(const Tensor& y_any, const Tensor& rows_any,
                     const OptionalTensor& weights_any) {
  const MoeShape shape = check_moe_unpermute(y_any, rows_any, weights_any);
  const Tensor y = y_any.contiguous(), rows = rows_any.contiguous();
  const OptionalTensor weights = contiguous(weights_any);
  check_moe_rows(rows, shape.rows);
  const Tensor x = at::empty({shape.tokens, shape.hidden}, y.options());
  dispatch_floating(y.scalar_type(), "moe_unpermute", [&](auto zero) {
    using T = decltype(zero);
    const auto* weight = in<acc_t<T>>(weights);
    each_token(shape, [&](int64_t t) {
      const int64_t first = t * shape.choices;
      sum_slots(in<T>(y), in<int64_t>(rows) + first, weight ? weight + first : nullptr,
                shape.choices, shape.hidden, out<T>(x) + t * shape.hidden);
    });
  });
  return x;
}

Tensor moe_dot(const Tensor& x_any, const Tensor& y_any, const Tensor& rows_any) {
  const MoeShape shape = check_moe_dot(x_any, "x", y_any, rows_any);
  const Tensor x = x_any.contiguous(), y = y_any.contiguous(), rows = rows_any.contiguous();
  check_moe_rows(rows, shape.rows);
  const Tensor result = at::empty(rows.sizes(), x.options().dtype(moe_weights_dtype(x)));
  dispatch_floating(x.scalar_type(), "moe_dot", [&](auto zero) {
    using T = decltype(zero);
    const auto* row = in<int64_t>(rows);
    each_token(shape, [&](int64_t t) {
      const T* const from = in<T>(x) + t * shape.hidden;
      for (int64_t s = t * shape.choices; s < (t + 1) * shape.choices; ++s)
        out<acc_t<T>>(result)[s] =
            row[s] < 0 ? 0 : dot(from, in<T>(y) + row[s] * shape.hidden, shape.hidden);
    });
  });
  return result;
}

// While a row of grad is in the cache it serves both gradients
std::tuple<Tensor, Tensor> moe_unpermute_bwd(const Tensor& grad_any, const Tensor& y_any,
                                             const Tensor& rows_any, const Tensor& weights_any) {
  const MoeShape shape = check_moe_dot(grad_any, "grad", y_any, rows_any);
  check_moe_weights(weights_any, grad_any, rows_any);
  const Tensor grad = grad_any.contiguous(), y = y_any.contiguous();
  const Tensor rows = rows_any.contiguous(), weights = weights_any.contiguous();
  const Tensor dy = at::empty(y.sizes(), y.options());
  const Tensor dweights = at::empty(rows.sizes(), weights.options());
  clear_unused(rows_with_slot(rows, shape.rows), dy);
  dispatch_floating(y.scalar_type(), "moe_unpermute", [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const auto* row = in<int64_t>(rows);
    each_token(shape, [&](int64_t t) {
      const T* const from = in<T>(grad) + t * shape.hidden;
      for (int64_t s = t * shape.choices; s < (t + 1) * shape.choices; ++s) {
        const int64_t start = row[s] * shape.hidden;
        if (row[s] >= 0) scale_row(from, in<A>(weights)[s], shape.hidden, out<T>(dy) + start);
        out<A>(dweights)[s] = row[s] < 0 ? A(0) : dot(from, in<T>(y) + start, shape.hidden);
      }
    });
  });
  return {dy, dweights};
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_moe_permute", moe_permute);
  m.impl("_moe_unpermute", moe_unpermute);
  m.impl("_moe_unpermute_bwd", moe_unpermute_bwd);
  m.impl("_moe_dot", moe_dot);
}

}  // namespace tp_ext
