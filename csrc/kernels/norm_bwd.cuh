// Backward of RMSNorm and LayerNorm on CUDA (formulas in norm.h, assignment of a row to threads in
// norm_row.cuh). x and grad are read from memory once, as in norm_fwd.cuh.
//
// Weight gradients: each group sums its rows in order, a block writes one row of partial sums, and
// a second kernel sums those rows in order. The result depends on the launch shape only: no
// atomics.

#pragma once

#include "norm_row.cuh"

namespace tp_ext {

// Sums v over the groups of the block in order and writes element i of the block's row of partial
// sums. Every thread of the block calls it; `owns`: whether i lies in the row.
template <int kN, typename A>
__device__ __forceinline__ void norm_write_partial(const Vec<A, kN>& v, A* partial, int64_t i,
                                                   bool owns, A* shared) {
  if (blockDim.y == 1) {
    if (owns)
      for (int e = 0; e < kN; ++e) partial[i + e] = v.v[e];
    return;
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // the previous call's sums have been read
  for (int e = 0; e < kN; ++e) shared[thread * kN + e] = v.v[e];
  __syncthreads();
  if (threadIdx.y != 0 || !owns) return;
  for (int e = 0; e < kN; ++e) {
    A total = 0;
    for (unsigned group = 0; group < blockDim.y; ++group)
      total += shared[(group * blockDim.x + threadIdx.x) * kN + e];
    partial[i + e] = total;
  }
}

// The same 16 bytes, opaque to the compiler: otherwise it keeps the widened elements of the first
// pass in registers, twice as many as there are
template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> norm_reread(const Vec<T, kN>& v) {
  static_assert(sizeof v == 16, "one 16-byte vector");
  uint32_t words[4];
  memcpy(words, &v, sizeof words);
  asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
  Vec<T, kN> result;
  memcpy(&result, words, sizeof words);
  return result;
}

// The elements widened at once, or, where registers are short, one by one where they are used
template <bool kAtOnce, typename T, int kN>
__device__ __forceinline__ decltype(auto) norm_widen(const Vec<T, kN>& v) {
  if constexpr (kAtOnce)
    return widen(v);
  else
    return (v);
}

// Adds v to kN elements at i of sums, in accesses of 16 bytes
template <int kN, typename A>
__device__ __forceinline__ void norm_add_to(A* sums, int64_t i, const Vec<A, kN>& v) {
  constexpr int kWide = kN < kVec<A> ? kN : kVec<A>;
#pragma unroll
  for (int e = 0; e < kN; e += kWide) {
    Vec<A, kWide> s = load<kWide>(sums, i + e);
#pragma unroll
    for (int k = 0; k < kWide; ++k) s.v[k] += v.v[e + k];
    store<kWide>(sums, i + e, s);
  }
}

// grad_sum: added to dx, or null. dx: null if not needed. partial [gridDim.x, 2 (1 without
// kCentred), n]: sums for dw | db of each block's rows; null if not needed, as always without
// kParams. With kCached = 0 blocks have one group, each thread adds to the sums of the elements
// that it owns, and these are in shared memory or, zeros at entry, in partial itself. Launched with
// 2 shared_row elements of T of shared memory and, with shared_sums, a row of A for each sum.
template <typename T, typename W, bool kCentred, int kN, int kCached, bool kParams>
__global__ void __launch_bounds__(kNormMaxThreads, norm_bwd_blocks(kCached))
    norm_bwd_kernel(const T* __restrict__ grad, const T* __restrict__ x,
                    const T* __restrict__ grad_sum, const W* __restrict__ weight,
                    const acc_t<T>* __restrict__ means, const acc_t<T>* __restrict__ rstds,
                    T* __restrict__ dx, acc_t<T>* __restrict__ partial, int64_t rows, int64_t n,
                    int64_t shared_row, bool shared_sums) {
  using A = acc_t<T>;
  constexpr int kSlots = kCached > 0 ? kCached : 1, kSumSlots = kParams ? kSlots : 1;
  constexpr bool kOverlap = norm_bwd_overlaps(kCached, kCentred);
  __shared__ A scratch[64];
  __shared__ A shared[kCached > 0 && kParams ? kNormGroupThreads * kN : 1];
  T* const own_x = shared_row > 0 ? reinterpret_cast<T*>(dynamic_shared()) : nullptr;
  T* const own_g = own_x + shared_row;
  Vec<T, kN> kept_x[kSlots], kept_g[kSlots];
  Vec<A, kN> dw[kSumSlots] = {}, db[kSumSlots] = {};
  A* const dw_out = partial + blockIdx.x * (kCentred ? 2 : 1) * n;
  A* const db_out = dw_out + n;
  A* const dw_sums = shared_sums ? reinterpret_cast<A*>(own_x + 2 * shared_row) : dw_out;
  A* const db_sums = shared_sums ? dw_sums + shared_row : db_out;
  if (kCached == 0 && shared_sums) {
    norm_each<kN, kCached>(n, [&](int, int64_t i) {
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        dw_sums[i + e] = A(0);
        if constexpr (kCentred) db_sums[i + e] = A(0);
      }
    });
  }
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y, owned = row < rows ? n : 0,
                  start = (kOverlap && row >= rows ? 0 : row) * n;
    const T *const xr = x + start, *const gr = grad + start;
    const A mean = kCentred && owned ? means[row] : A(0), rstd = owned ? rstds[row] : A(0);
    A sum_gw = 0, sum_gw_hat = 0;
    if constexpr (kOverlap) {
      norm_load_row<kN, kCached>(x, start, owned, kept_x);
      norm_load_row<kN, kCached>(grad, start, owned, kept_g);
    }
    norm_each_slot<kN, kCached, kOverlap>(owned, [&](int slot, int64_t i, bool owns) {
      Vec<T, kN> vx, vg;
      if constexpr (kOverlap) {
        vx = kept_x[slot] = norm_zeros_unless(owns, kept_x[slot]);
        vg = kept_g[slot] = norm_zeros_unless(owns, kept_g[slot]);
      } else {
        vx = load<kN>(xr, i);
        vg = load<kN>(gr, i);
        if constexpr (kCached > 0) kept_x[slot] = vx, kept_g[slot] = vg;
      }
      if (kCached == 0 && own_x != nullptr) {
        store<kN>(own_x, i, vx);
        store<kN>(own_g, i, vg);
      }
      const auto w = norm_param<kN>(weight, kOverlap && !owns ? 0 : i, 1.f);
      const auto &wide_x = norm_widen<kOverlap>(vx), &wide_g = norm_widen<kOverlap>(vg);
      Vec<A, kN> g_hat, g;
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const A hat = norm_hat(to_acc(wide_x.v[e]), mean, rstd);
        g.v[e] = to_acc(wide_g.v[e]);
        const A gw = norm_gw(g.v[e], A(w.v[e]));
        sum_gw_hat += gw * hat;
        if constexpr (kCentred) sum_gw += gw;
        if constexpr (kCached > 0 && kParams) {
          dw[slot].v[e] += g.v[e] * hat;
          if constexpr (kCentred) db[slot].v[e] += g.v[e];
        }
        g_hat.v[e] = g.v[e] * hat;
      }
      if (kCached == 0 && partial != nullptr) {
        norm_add_to<kN>(dw_sums, i, g_hat);
        if constexpr (kCentred) norm_add_to<kN>(db_sums, i, g);
      }
    });
    if (dx == nullptr) continue;
    if constexpr (kCentred)
      norm_row_sums(sum_gw, sum_gw_hat, scratch);
    else
      sum_gw_hat = norm_row_sum(sum_gw_hat, scratch);
    const A mean_gw = kCentred ? sum_gw / static_cast<A>(n) : A(0),
            mean_gw_hat = sum_gw_hat / static_cast<A>(n);
    norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
      Vec<T, kN> vx, vg, r;
      if constexpr (kCached > 0) {
        vx = norm_reread(kept_x[slot]);
        vg = norm_reread(kept_g[slot]);
      } else {
        vx = load<kN>(own_x != nullptr ? own_x : xr, i);
        vg = load<kN>(own_x != nullptr ? own_g : gr, i);
      }
      const auto w = norm_param<kN>(weight, i, 1.f);
      Vec<T, kN> more = {};
      if (grad_sum != nullptr) more = load<kN>(grad_sum + start, i);
      const auto &wide_x = norm_widen<kOverlap>(vx), &wide_g = norm_widen<kOverlap>(vg);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const A hat = norm_hat(to_acc(wide_x.v[e]), mean, rstd);
        const A d =
            norm_dx(norm_gw(to_acc(wide_g.v[e]), A(w.v[e])), hat, rstd, mean_gw, mean_gw_hat);
        r.v[e] = from_acc<T>(grad_sum != nullptr ? d + to_acc(more.v[e]) : d);
      }
      store<kN>(dx + start, i, r);
    });
  }
  if (partial == nullptr) return;
  if constexpr (kCached > 0 && kParams) {
#pragma unroll
    for (int slot = 0; slot < kCached; ++slot) {
      const int64_t i = (static_cast<int64_t>(slot) * blockDim.x + threadIdx.x) * kN;
      norm_write_partial(dw[slot], dw_out, i, i < n, shared);
      if constexpr (kCentred) norm_write_partial(db[slot], db_out, i, i < n, shared);
    }
  } else if (shared_sums) {
    norm_each<kN, kCached>(n, [&](int, int64_t i) {
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        dw_out[i + e] = dw_sums[i + e];
        if constexpr (kCentred) db_out[i + e] = db_sums[i + e];
      }
    });
  }
}

// dw[k] = the sum over p of partial[p][0][k], db[k] that of partial[p][1][k]; blockIdx.y selects
// one of the gridDim.y sums; null: not needed. A block is 32 columns by kNormSumRows threads.
constexpr int kNormSumRows = 16;
template <typename A, typename W>
__global__ void __launch_bounds__(32 * kNormSumRows)
    norm_sum_kernel(const A* __restrict__ partial, W* __restrict__ dw, W* __restrict__ db,
                    int64_t num_partial, int64_t n) {
  __shared__ A sums[kNormSumRows][33];
  W* const out = blockIdx.y == 0 ? dw : db;
  if (out == nullptr) return;
  partial += blockIdx.y * n;
  const int64_t stride = gridDim.y * n;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * 32; first < n;
       first += static_cast<int64_t>(gridDim.x) * 32) {
    const int64_t k = first + threadIdx.x;
    A sum = 0;
    if (k < n)
      for (int64_t p = threadIdx.y; p < num_partial; p += kNormSumRows)
        sum += partial[p * stride + k];
    __syncthreads();  // the previous round's sums have been read
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && k < n) {
      A total = 0;
      for (int r = 0; r < kNormSumRows; ++r) total += sums[r][threadIdx.x];
      out[k] = from_acc<W>(total);
    }
  }
}

}  // namespace tp_ext
