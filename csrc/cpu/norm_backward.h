// Backward of RMSNorm and LayerNorm over some rows, two at a time: one pass sums over each row and
// over the rows, while prefetching the memory of dx; the next writes dx, while prefetching the next
// rows.

#pragma once

#include "cpu/norm_rows.h"

namespace tp_ext {

// Rows processed together
constexpr int kNormBlock = 2;
constexpr int kNormBlockLanes = 16;

// x in the accumulation type: itself, or converted into cache
template <typename T>
TP_INLINE const acc_t<T>* widened_row(const T* x, int64_t n, acc_t<T>* cache) {
  if constexpr (kIsHalf<T>) {
    widen(x, cache, n);
    return cache;
  } else {
    return x;
  }
}

// kRows rows: x and grad, widened, their statistics and, in lanes, the sums over each row
template <typename A, int kRows>
struct NormBlock {
  const A *r[kRows], *u[kRows];
  A mean[kRows], rstd[kRows];
  A sum_gw[kRows][kNormBlockLanes] = {}, sum_gw_hat[kRows][kNormBlockLanes] = {};
};

// The sums for the backward of a block: those over each row, and those over the rows, added to dw
// and db (centred only). dx: prefetched for writing. Pointers are restrict as parameters: gcc
// ignores restrict on variables.
template <typename T, bool kCentred, bool kDx, bool kParams, int kRows, typename A = acc_t<T>>
TP_INLINE void norm_add_sums(NormBlock<A, kRows>& block, const A* __restrict w, A* __restrict dw,
                             A* __restrict db, T* dx, int64_t n) {
  constexpr int kTile = kNormBlockLanes;
  // No product is shared: each is fused with its sum or none is, whatever kRows, so that a row
  // gives the same bits alone and in a block
  const auto add = [&](int64_t k, auto&& add_gw) TP_INLINED {
    A dwk = kParams ? dw[k] : A(0), dbk = kParams && kCentred ? db[k] : A(0);
    const A wk = w[k];
    const auto row = [&](int q) TP_INLINED {
      const A hat = norm_hat(block.r[q][k], block.mean[q], block.rstd[q]), uk = block.u[q][k];
      if constexpr (kDx) add_gw(q, uk, wk, hat);
      if constexpr (kParams) dwk += uk * hat;
      if constexpr (kParams && kCentred) dbk += uk;
    };
    row(0);
    if constexpr (kRows > 1) row(1);
    if constexpr (kParams) dw[k] = dwk;
    if constexpr (kParams && kCentred) db[k] = dbk;
  };
  int64_t k = 0;
  for (; k + kTile <= n; k += kTile) {
    if constexpr (kDx)
      for (int q = 0; q < kRows; ++q) fetch<2, kTile>(dx + q * n + k);
    for (int l = 0; l < kTile; ++l)
      add(k + l, [&](int q, A uk, A wk, A hat) TP_INLINED {
        block.sum_gw_hat[q][l] += uk * (wk * hat);
        if constexpr (kCentred) block.sum_gw[q][l] += uk * wk;
      });
  }
  if (k == n) return;
  // The rest of the row, padded with zeros so that lanes are counted at compile time
  A gw[kRows][kTile] = {}, gw_hat[kRows][kTile] = {};
  for (int l = 0; l < n - k; ++l)
    add(k + l, [&](int q, A uk, A wk, A hat) TP_INLINED {
      gw_hat[q][l] = uk * (wk * hat);
      gw[q][l] = uk * wk;
    });
  for (int q = 0; q < kRows; ++q)
    for (int l = 0; l < kTile; ++l)
      block.sum_gw_hat[q][l] += gw_hat[q][l], block.sum_gw[q][l] += gw[q][l];
}

// One row of dx, from the widened x and grad. `next`: distance in elements from this row to the one
// to prefetch, next_x and next_g. Members are restrict, as gcc knows them through a restrict
// reference.
template <typename T, typename A = acc_t<T>>
struct NormDxRow {
  const A* __restrict r, * __restrict u, * __restrict w;
  const T* __restrict grad_sum;  // added, or null
  T* __restrict dx;
  A mean, rstd, mean_gw, mean_gw_hat;
  int64_t n;
  const T *next_x, *next_g;
  int64_t next;
};

template <typename T>
TP_INLINE void norm_dx_row(const NormDxRow<T>& __restrict p) {
  const auto value = [&](int64_t k) TP_INLINED {
    return norm_dx(p.u[k] * p.w[k], norm_hat(p.r[k], p.mean, p.rstd), p.rstd, p.mean_gw,
                   p.mean_gw_hat);
  };
  if (p.grad_sum != nullptr) {
    const auto write = [&](int64_t k)
                           TP_INLINED { p.dx[k] = from_acc<T>(value(k) + to_acc(p.grad_sum[k])); };
    sweep<2>(p.n, write, p.next_x, p.next_g, p.grad_sum + p.next);
  } else {
    const auto write = [&](int64_t k) TP_INLINED { p.dx[k] = from_acc<T>(value(k)); };
    sweep<2>(p.n, write, p.next_x, p.next_g);
  }
}

// Inputs and outputs of the backward of some rows. grad_sum: added to dx, or null. dx: null if not
// needed. dw, db (centred only): null if neither is needed.
template <typename T>
struct NormBackward {
  const T *grad, *x, *grad_sum;
  const acc_t<T>*w, *means, *rstds;
  T* dx;
  acc_t<T>*dw, *db;
  int64_t rows, n;
  acc_t<T>* cache;  // 2 * kNormBlock rows, of half types
};

// The backward of kRows rows at once; `next`: distance in elements to the next rows
template <typename T, bool kCentred, bool kDx, bool kParams, int kRows>
TP_INLINE void norm_backward_block(const NormBackward<T>& p, int64_t first, int64_t next) {
  using A = acc_t<T>;
  const int64_t n = p.n;
  const T *const x = p.x + first * n, *const g = p.grad + first * n;
  NormBlock<A, kRows> block;
  for (int q = 0; q < kRows; ++q) {
    block.r[q] = widened_row(x + q * n, n, p.cache + 2 * q * n);
    block.u[q] = widened_row(g + q * n, n, p.cache + (2 * q + 1) * n);
    block.mean[q] = kCentred ? p.means[first + q] : A(0);
    block.rstd[q] = p.rstds[first + q];
  }
  norm_add_sums<T, kCentred, kDx, kParams, kRows>(block, p.w, p.dw, p.db,
                                                  kDx ? p.dx + first * n : nullptr, n);
  if constexpr (!kDx) return;
  for (int q = 0; q < kRows; ++q) {
    const int64_t row = (first + q) * n;
    const NormDxRow<T> dx_row{
        block.r[q],
        block.u[q],
        p.w,
        p.grad_sum == nullptr ? nullptr : p.grad_sum + row,
        p.dx + row,
        block.mean[q],
        block.rstd[q],
        kCentred ? sum_lanes(block.sum_gw[q]) / static_cast<A>(n) : A(0),
        sum_lanes(block.sum_gw_hat[q]) / static_cast<A>(n),
        n,
        p.x + row + next,
        p.grad + row + next,
        next,
    };
    norm_dx_row(dx_row);
  }
}

template <typename T, bool kCentred, bool kDx, bool kParams>
TP_MULTIVERSION void norm_backward_rows(const NormBackward<T>& p) {
  int64_t i = 0;
  for (; i + kNormBlock <= p.rows; i += kNormBlock) {
    const int64_t next = i + 2 * kNormBlock <= p.rows ? kNormBlock * p.n : 0;
    norm_backward_block<T, kCentred, kDx, kParams, kNormBlock>(p, i, next);
  }
  if (i < p.rows) norm_backward_block<T, kCentred, kDx, kParams, 1>(p, i, 0);
}

// total[k] (+)= the sum of partial[c * stride + k] over the chunks c in order, for columns [begin,
// end)
template <typename A>
TP_MULTIVERSION void norm_sum_chunks(const A* __restrict partial, A* __restrict total,
                                     int64_t chunks, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t c = 0; c < chunks; ++c)
    for (int64_t k = begin; k < end; ++k) total[k] += partial[c * stride + k];
}

}  // namespace tp_ext
