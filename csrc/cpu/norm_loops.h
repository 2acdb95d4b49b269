// The loops over rows of the CPU kernels of RMSNorm and LayerNorm (cpu/norm.cpp; formulas in
// kernels/norm.h).
//
// A row is widened once into a buffer that stays in the cache. The last pass over a row, which
// reads no memory, fetches what comes next: hardware does not look past a page, which a long row
// is.

#pragma once

#include <algorithm>

#include "cpu/simd.h"
#include "kernels/norm.h"

namespace tp_ext {

// Sums run in this many interleaved lanes, then pairwise: vectorised, and more precise than one
// running sum
constexpr int kLanes = 32;

// Rows whose backward is done together
constexpr int kNormBlock = 4;
constexpr int kNormBlockLanes = 16;

// Elements between two fetches: a whole number of cache lines of every type
constexpr int kNormTile = 64;

template <int kCount, typename A>
inline __attribute__((always_inline)) A sum_lanes(A (&lanes)[kCount]) {
  for (int width = kCount / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

// x as accumulation type: itself, or converted into cache
template <typename T>
inline __attribute__((always_inline)) const acc_t<T>* widen(const T* __restrict x, int64_t n,
                                                            acc_t<T>* __restrict cache) {
  for (int64_t j = 0; j < n; ++j) cache[j] = to_acc(x[j]);
  return cache;
}
inline __attribute__((always_inline)) const float* widen(const float* x, int64_t, float*) {
  return x;
}
inline __attribute__((always_inline)) const double* widen(const double* x, int64_t, double*) {
  return x;
}

template <typename T>
inline __attribute__((always_inline)) void fetch_tile(const T* p) {
  for (size_t byte = 0; byte < kNormTile * sizeof(T); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + byte, 0, 2);
}

// f(k) for k < n, while the rows `next` of n elements are fetched
template <typename F, typename... T>
inline __attribute__((always_inline)) void each_while_fetching(int64_t n, F f, const T*... next) {
  int64_t k = 0;
  for (; k + kNormTile <= n; k += kNormTile) {
    (fetch_tile(next + k), ...);
    for (int l = 0; l < kNormTile; ++l) f(k + l);
  }
  for (; k < n; ++k) f(k);
}

template <typename T>
inline __attribute__((always_inline)) void add_row(const T* __restrict x,
                                                   const T* __restrict residual, T* __restrict sum,
                                                   int64_t n) {
  for (int64_t k = 0; k < n; ++k) sum[k] = from_acc<T>(to_acc(x[k]) + to_acc(residual[k]));
}

// With a residual the rows are those of sum = x + residual, written along
template <typename T, bool kCentred>
TP_SIMD void norm_forward_rows(const T* x, const T* residual, T* sum, const acc_t<T>* __restrict w,
                               const acc_t<T>* __restrict b, T* y, acc_t<T>* means, acc_t<T>* rstds,
                               int64_t rows, int64_t n, acc_t<T> eps, acc_t<T>* cache) {
  using A = acc_t<T>;
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = x + i * n;
    if (residual != nullptr) {
      add_row(row, residual + i * n, sum + i * n, n);
      row = sum + i * n;
    }
    const A* __restrict r = widen(row, n, cache);
    A mean = 0;
    if constexpr (kCentred) {
      A lanes[kLanes] = {};
      int64_t j = 0;
      for (; j + kLanes <= n; j += kLanes)
        for (int l = 0; l < kLanes; ++l) lanes[l] += r[j + l];
      for (int l = 0; j + l < n; ++l) lanes[l] += r[j + l];
      mean = sum_lanes(lanes) / static_cast<A>(n);
    }
    A lanes[kLanes] = {}, rest[kLanes] = {};
    const auto add = [&](int64_t k, int l) __attribute__((always_inline)) {
      const A d = r[k] - mean;
      lanes[l] += d * d;
      if constexpr (kCentred) rest[l] += d;
    };
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes)
      for (int l = 0; l < kLanes; ++l) add(j + l, l);
    for (int l = 0; j + l < n; ++l) add(j + l, l);
    A squares = sum_lanes(lanes);
    if constexpr (kCentred) {
      norm_correct(mean, squares, sum_lanes(rest), static_cast<A>(n));
      means[i] = mean;
    }
    const A rstd = norm_rstd(squares, static_cast<A>(n), eps);
    rstds[i] = rstd;
    T* __restrict out = y + i * n;
    const auto write = [&](int64_t k) __attribute__((always_inline)) {
      if constexpr (kCentred) {
        out[k] = from_acc<T>(norm_hat(r[k], mean, rstd) * w[k] + b[k]);
      } else {
        out[k] = from_acc<T>(norm_hat(r[k], mean, rstd) * w[k]);
      }
    };
    const int64_t next = std::min(i + 1, rows - 1) * n;
    if (residual != nullptr) {
      each_while_fetching(n, write, x + next, residual + next);
    } else {
      each_while_fetching(n, write, x + next);
    }
  }
}

// The sums that the backward of kRows rows needs: those over each row, in lanes, and those over the
// rows, on top of what dw and db (centred only) hold. These stay in no cache next to long rows: they
// are read and written once for all rows. Pointers are restrict as parameters: as variables gcc
// would not believe them.
template <typename A, bool kCentred, bool kDx, bool kParams, int kRows>
inline __attribute__((always_inline)) void norm_add_sums(
    const A* const (&r)[kRows], const A* const (&u)[kRows], const A* __restrict w,
    const A (&mean)[kRows], const A (&rstd)[kRows], A (&sum_gw)[kRows][kNormBlockLanes],
    A (&sum_gw_hat)[kRows][kNormBlockLanes], A* __restrict dw, A* __restrict db, int64_t n) {
  const auto add = [&](int64_t k, int l) __attribute__((always_inline)) {
    A dwk = kParams ? dw[k] : A(0), dbk = kParams && kCentred ? db[k] : A(0);
    const A wk = w[k];
    const auto row = [&](int q) __attribute__((always_inline)) {
      const A hat = norm_hat(r[q][k], mean[q], rstd[q]), uk = u[q][k];
      // No product is shared: each is fused with its sum or none is, whatever kRows, so that a row
      // gives the same bits alone and in a block
      if constexpr (kDx) sum_gw_hat[q][l] += uk * (wk * hat);
      if constexpr (kDx && kCentred) sum_gw[q][l] += uk * wk;
      if constexpr (kParams) dwk += uk * hat;
      if constexpr (kParams && kCentred) dbk += uk;
    };
    row(0);
    if constexpr (kRows > 1) row(1);
    if constexpr (kRows > 2) row(2), row(3);
    if constexpr (kParams) dw[k] = dwk;
    if constexpr (kParams && kCentred) db[k] = dbk;
  };
  int64_t j = 0;
  for (; j + kNormBlockLanes <= n; j += kNormBlockLanes)
    for (int l = 0; l < kNormBlockLanes; ++l) add(j + l, l);
  for (int l = 0; j + l < n; ++l) add(j + l, l);
}

// dx of one row, r and u being x and grad widened. `next`: the elements from this row to the one to
// fetch
template <typename T>
inline __attribute__((always_inline)) void norm_dx_row(
    const acc_t<T>* __restrict r, const acc_t<T>* __restrict u, const acc_t<T>* __restrict w,
    const T* __restrict grad_sum, T* __restrict dx, acc_t<T> mean, acc_t<T> rstd, acc_t<T> mean_gw,
    acc_t<T> mean_gw_hat, int64_t n, const T* next_x, const T* next_g, int64_t next) {
  const auto value = [&](int64_t k) __attribute__((always_inline)) {
    return norm_dx(u[k] * w[k], norm_hat(r[k], mean, rstd), rstd, mean_gw, mean_gw_hat);
  };
  if (grad_sum != nullptr) {
    each_while_fetching(
        n,
        [&](int64_t k)
            __attribute__((always_inline)) { dx[k] = from_acc<T>(value(k) + to_acc(grad_sum[k])); },
        next_x, next_g, grad_sum + next);
  } else {
    each_while_fetching(
        n, [&](int64_t k) __attribute__((always_inline)) { dx[k] = from_acc<T>(value(k)); }, next_x,
        next_g);
  }
}

// What the backward of some rows reads and writes. grad_sum: added to dx, or null. dx: null if it
// is not wanted. dw, db (centred only): null if neither is wanted.
template <typename T>
struct NormBackward {
  const T *grad, *x, *grad_sum;
  const acc_t<T>*w, *means, *rstds;
  T* dx;
  acc_t<T>*dw, *db;
  int64_t n;
};

// The backward of kRows rows at once; `next`: the elements from them to the rows that come next
template <typename T, bool kCentred, bool kDx, bool kParams, int kRows>
inline __attribute__((always_inline)) void norm_backward_block(const NormBackward<T>& p,
                                                               int64_t first, int64_t next,
                                                               acc_t<T>* cache) {
  using A = acc_t<T>;
  const int64_t n = p.n;
  const T *const x = p.x + first * n, *const g = p.grad + first * n;
  const A *r[kRows], *u[kRows];
  A mean[kRows], rstd[kRows];
  A sum_gw[kRows][kNormBlockLanes] = {}, sum_gw_hat[kRows][kNormBlockLanes] = {};
  for (int q = 0; q < kRows; ++q) {
    r[q] = widen(x + q * n, n, cache + 2 * q * n);
    u[q] = widen(g + q * n, n, cache + (2 * q + 1) * n);
    mean[q] = kCentred ? p.means[first + q] : A(0);
    rstd[q] = p.rstds[first + q];
  }
  norm_add_sums<A, kCentred, kDx, kParams, kRows>(r, u, p.w, mean, rstd, sum_gw, sum_gw_hat, p.dw,
                                                  p.db, n);
  if constexpr (!kDx) return;
  for (int q = 0; q < kRows; ++q) {
    const A mean_gw = kCentred ? sum_lanes(sum_gw[q]) / static_cast<A>(n) : A(0);
    const A mean_gw_hat = sum_lanes(sum_gw_hat[q]) / static_cast<A>(n);
    const int64_t row = (first + q) * n;
    norm_dx_row(r[q], u[q], p.w, p.grad_sum == nullptr ? nullptr : p.grad_sum + row, p.dx + row,
                mean[q], rstd[q], mean_gw, mean_gw_hat, n, p.x + row + next, p.grad + row + next,
                next);
  }
}

template <typename T, bool kCentred, bool kDx, bool kParams>
TP_SIMD void norm_backward_rows(const NormBackward<T>& p, int64_t rows, acc_t<T>* cache) {
  int64_t i = 0;
  for (; i + kNormBlock <= rows; i += kNormBlock) {
    const int64_t next = i + 2 * kNormBlock <= rows ? kNormBlock * p.n : 0;
    norm_backward_block<T, kCentred, kDx, kParams, kNormBlock>(p, i, next, cache);
  }
  for (; i < rows; ++i) norm_backward_block<T, kCentred, kDx, kParams, 1>(p, i, 0, cache);
}

// total[k] = the sum of partial[c * stride + k] over the chunks c in order, for columns [begin,
// end)
template <typename A>
TP_SIMD void norm_sum_chunks(const A* __restrict partial, A* __restrict total, int64_t chunks,
                             int64_t stride, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) total[k] = partial[k];
  for (int64_t c = 1; c < chunks; ++c)
    for (int64_t k = begin; k < end; ++k) total[k] += partial[c * stride + k];
}

}  // namespace tp_ext
