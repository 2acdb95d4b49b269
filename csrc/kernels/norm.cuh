// CUDA kernels of RMSNorm and LayerNorm (formulas in norm.h), one row of n elements by a group of
// threads.
//
// A block is (width, groups) threads: `width` of them share a row, a power of two up to 32, so that
// several rows fit in a warp, or whole warps with groups = 1. With kCached > 0 each thread keeps
// its kCached vectors of the row in registers, so x (and grad) are read from memory once. With
// kCached = 0, for rows that are too long or not aligned, it reads them again in each pass, one
// element at a time.
//
// Weight gradients: each group adds up the rows that it meets, in order, one block writes one row
// of partial sums, and a second kernel adds those rows in order. Nothing but the launch shape
// decides the result: no atomics.

#pragma once

#include "norm.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace tp_ext {

constexpr int kNormCached = 4;  // vectors of a row per thread
constexpr int kNormMaxThreads =
    512;  // leaves 128 registers to a thread, for x, grad and the two sums
constexpr int kNormGroupThreads = 256;

// How a row is dealt out; the same for forward and backward
struct NormLaunch {
  int width, groups;  // the block
  bool cached;  // whether the kernels with kCached = kNormCached and whole vectors can be used
};

template <typename T>
inline NormLaunch norm_launch(int64_t n, bool aligned) {
  const int64_t vectors = n / kVec<T>;
  const bool cached = aligned && vectors <= kNormCached * kNormMaxThreads;
  const int64_t wanted = cached ? (vectors + kNormCached - 1) / kNormCached : (n + 7) / 8;
  int width = 1;
  while (width < 32 && width < wanted) width *= 2;
  if (wanted > 32) {
    const int64_t whole = (wanted + 31) / 32 * 32;
    width = static_cast<int>(whole < kNormMaxThreads ? whole : kNormMaxThreads);
  }
  return {width, width <= 32 ? kNormGroupThreads / width : 1, cached};
}

// The sum over the threads of a row, which all get it; every thread of the block takes part
template <typename A>
__device__ __forceinline__ A norm_row_sum(A x, A* scratch) {
  if (blockDim.x > 32) return block_reduce(x, Sum(), A(0), scratch);
  for (int lane = blockDim.x / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// Calls f(slot, i) for the vectors i = slot * kN of its row that this thread owns
template <int kN, int kCached, typename F>
__device__ __forceinline__ void norm_each(int64_t n, F f) {
  if constexpr (kCached > 0) {
#pragma unroll
    for (int slot = 0; slot < kCached; ++slot) {
      const int64_t i = (static_cast<int64_t>(slot) * blockDim.x + threadIdx.x) * kN;
      if (i < n) f(slot, i);
    }
  } else {
    for (int64_t i = threadIdx.x * kN; i < n; i += static_cast<int64_t>(blockDim.x) * kN) f(0, i);
  }
}

// w or b at i, or its neutral value
template <int kN, typename W>
__device__ __forceinline__ Vec<acc_t<W>, kN> norm_param(const W* p, int64_t i, float neutral) {
  Vec<acc_t<W>, kN> result;
  if (p == nullptr) {
#pragma unroll
    for (int e = 0; e < kN; ++e) result.v[e] = neutral;
    return result;
  }
  const Vec<W, kN> v = load<kN>(p, i);
#pragma unroll
  for (int e = 0; e < kN; ++e) result.v[e] = to_acc(v.v[e]);
  return result;
}

template <typename T, typename W, bool kCentred, int kN, int kCached>
__global__ void __launch_bounds__(kNormMaxThreads)
    norm_fwd_kernel(const T* __restrict__ x, const W* __restrict__ weight,
                    const W* __restrict__ bias, T* __restrict__ y, acc_t<T>* __restrict__ means,
                    acc_t<T>* __restrict__ rstds, int64_t rows, int64_t n, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ A scratch[33];
  Vec<T, kN> kept[kCached > 0 ? kCached : 1];
  // All groups of a block go round the loop together, those past the last row with nothing to add:
  // the sums are taken by whole warps
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y, owned = row < rows ? n : 0;
    const T* const xr = x + row * n;
    const auto get = [&](int slot, int64_t i) {
      if constexpr (kCached > 0) return kept[slot];
      return load<kN>(xr, i);
    };
    if constexpr (kCached > 0)
      norm_each<kN, kCached>(owned, [&](int slot, int64_t i) { kept[slot] = load<kN>(xr, i); });
    A mean = 0;
    if constexpr (kCentred) {
      norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
        const Vec<T, kN> v = get(slot, i);
#pragma unroll
        for (int e = 0; e < kN; ++e) mean += to_acc(v.v[e]);
      });
      mean = norm_row_sum(mean, scratch) / static_cast<A>(n);
    }
    A squares = 0;
    norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
      const Vec<T, kN> v = get(slot, i);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const A d = to_acc(v.v[e]) - mean;
        squares += d * d;
      }
    });
    const A rstd = norm_rstd(norm_row_sum(squares, scratch), static_cast<A>(n), eps);
    norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
      const Vec<T, kN> v = get(slot, i);
      const auto w = norm_param<kN>(weight, i, 1.f);
      const auto b = norm_param<kN>(kCentred ? bias : nullptr, i, 0.f);
      Vec<T, kN> r;
#pragma unroll
      for (int e = 0; e < kN; ++e)
        r.v[e] = from_acc<T>(norm_hat(to_acc(v.v[e]), mean, rstd) * w.v[e] + b.v[e]);
      store<kN>(y + row * n, i, r);
    });
    if (threadIdx.x == 0 && row < rows) {
      if constexpr (kCentred) means[row] = mean;
      rstds[row] = rstd;
    }
  }
}

// Adds up v over the groups of the block in order and writes element i of the block's row of
// partial sums. Every thread of the block calls it; `owns` says whether i lies in the row.
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

// The same 16 bytes, of which the compiler knows nothing: it would keep the widened elements of the
// first pass in registers, twice as many as it has
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

// partial [gridDim.x, 2 (1 without kCentred), n]: sums for dw | db of each block's rows; null if
// not wanted. With kCached = 0 it holds zeros at entry and blocks have one group: each thread adds
// to its own elements of it.
template <typename T, typename W, bool kCentred, int kN, int kCached>
__global__ void __launch_bounds__(kNormMaxThreads)
    norm_bwd_kernel(const T* __restrict__ grad, const T* __restrict__ x,
                    const W* __restrict__ weight, const acc_t<T>* __restrict__ means,
                    const acc_t<T>* __restrict__ rstds, T* __restrict__ dx,
                    acc_t<T>* __restrict__ partial, int64_t rows, int64_t n) {
  using A = acc_t<T>;
  constexpr int kSlots = kCached > 0 ? kCached : 1;
  __shared__ A scratch[33];
  __shared__ A shared[kCached > 0 ? kNormGroupThreads * kN : 1];
  Vec<T, kN> kept_x[kSlots], kept_g[kSlots];
  Vec<A, kN> dw[kSlots] = {}, db[kSlots] = {};
  A* const dw_out = partial + blockIdx.x * (kCentred ? 2 : 1) * n;
  A* const db_out = dw_out + n;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y, owned = row < rows ? n : 0;
    const T *const xr = x + row * n, *const gr = grad + row * n;
    const A mean = kCentred && owned ? means[row] : A(0), rstd = owned ? rstds[row] : A(0);
    A sum_gw = 0, sum_gw_hat = 0;
    norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
      const Vec<T, kN> vx = load<kN>(xr, i), vg = load<kN>(gr, i);
      kept_x[slot] = vx;
      kept_g[slot] = vg;
      const auto w = norm_param<kN>(weight, i, 1.f);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const A hat = norm_hat(to_acc(vx.v[e]), mean, rstd), g = to_acc(vg.v[e]);
        sum_gw_hat += g * w.v[e] * hat;
        if constexpr (kCentred) sum_gw += g * w.v[e];
        if constexpr (kCached > 0) {
          dw[slot].v[e] += g * hat;
          if constexpr (kCentred) db[slot].v[e] += g;
        } else if (partial != nullptr) {
          dw_out[i + e] += g * hat;
          if constexpr (kCentred) db_out[i + e] += g;
        }
      }
    });
    const A mean_gw = kCentred ? norm_row_sum(sum_gw, scratch) / static_cast<A>(n) : A(0);
    const A mean_gw_hat = norm_row_sum(sum_gw_hat, scratch) / static_cast<A>(n);
    norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
      Vec<T, kN> vx, vg, r;
      if constexpr (kCached > 0) {
        vx = norm_reread(kept_x[slot]);
        vg = norm_reread(kept_g[slot]);
      } else {
        vx = load<kN>(xr, i);
        vg = load<kN>(gr, i);
      }
      const auto w = norm_param<kN>(weight, i, 1.f);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const A hat = norm_hat(to_acc(vx.v[e]), mean, rstd);
        r.v[e] = from_acc<T>(norm_dx(to_acc(vg.v[e]) * w.v[e], hat, rstd, mean_gw, mean_gw_hat));
      }
      store<kN>(dx + row * n, i, r);
    });
  }
  if constexpr (kCached > 0) {
    if (partial == nullptr) return;
#pragma unroll
    for (int slot = 0; slot < kCached; ++slot) {
      const int64_t i = (static_cast<int64_t>(slot) * blockDim.x + threadIdx.x) * kN;
      norm_write_partial(dw[slot], dw_out, i, i < n, shared);
      if constexpr (kCentred) norm_write_partial(db[slot], db_out, i, i < n, shared);
    }
  }
}

// dw[k] = the sum over p of partial[p][0][k], db[k] that of partial[p][1][k]; blockIdx.y says which
// of the two, and gridDim.y how many there are. A block is 32 columns by kNormSumRows threads.
constexpr int kNormSumRows = 16;
template <typename A, typename W>
__global__ void __launch_bounds__(32 * kNormSumRows)
    norm_sum_kernel(const A* __restrict__ partial, W* __restrict__ dw, W* __restrict__ db,
                    int64_t num_partial, int64_t n) {
  __shared__ A sums[kNormSumRows][33];
  W* const out = blockIdx.y == 0 ? dw : db;
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
