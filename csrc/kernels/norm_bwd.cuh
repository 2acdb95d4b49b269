// Backward of RMSNorm and LayerNorm on CUDA (formulas in norm.h, assignment of a row to threads in
// norm_row.cuh). x and grad are read from memory once, as in norm_fwd.cuh.
//
// Weight gradients: each group sums its rows in order, a block writes one row of partial sums, and
// a second kernel sums those rows in order. The result depends on the launch shape only: no
// atomics.

#pragma once

#include "async_copy.cuh"
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

// What one vector adds to the row's sums of gw and gw * xhat; add(e, g, xhat) for each element
template <bool kCentred, typename A, int kN, typename X, typename P, typename F>
__device__ __forceinline__ void norm_bwd_terms(const X& x, const X& g, const Vec<P, kN>& w, A mean,
                                               A rstd, A& sum_gw, A& sum_gw_hat, F add) {
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const A hat = norm_hat(to_acc(x.v[e]), mean, rstd), each = to_acc(g.v[e]);
    const A gw = norm_gw(each, A(w.v[e]));
    sum_gw_hat += gw * hat;
    if constexpr (kCentred) sum_gw += gw;
    add(e, each, hat);
  }
}

// dx of one vector; more: added to it, if adds
template <typename T, int kN, typename A, typename X, typename P, typename M>
__device__ __forceinline__ Vec<T, kN> norm_bwd_dx(const X& x, const X& g, const Vec<P, kN>& w,
                                                  A mean, A rstd, A mean_gw, A mean_gw_hat,
                                                  bool adds, const M& more) {
  Vec<T, kN> r;
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const A hat = norm_hat(to_acc(x.v[e]), mean, rstd);
    const A d = norm_dx(norm_gw(to_acc(g.v[e]), A(w.v[e])), hat, rstd, mean_gw, mean_gw_hat);
    r.v[e] = from_acc<T>(adds ? d + to_acc(more.v[e]) : d);
  }
  return r;
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
      const auto w = norm_param<kN, kOverlap>(weight, kOverlap && !owns ? 0 : i, 1.f);
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
      const auto w = norm_param<kN, kOverlap>(weight, i, 1.f);
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

// A vector of shared memory in one access, which is not moved ahead of what is computed before it: no
// registers for it until then
template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> norm_read(const Vec<T, kN>* p) {
#ifdef __CUDA_ARCH__
  uint32_t w[4];
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p)))
               : "memory");
  Vec<T, kN> v;
  memcpy(&v, w, sizeof v);
  return v;
#else
  return *p;
#endif
}

// The same, to the bit, with the next row on its way to shared memory while this one is computed: a
// thread reads its vectors from there in both passes, so that neither row needs registers. Rows fit
// kCached vectors a thread. Launched with norm_staged_vectors of shared memory for each thread:
// [x, grad and, if there is one, grad_sum][2 stages][kCached].
template <typename T, typename W, bool kCentred, int kN, int kCached, bool kParams>
__global__ void __launch_bounds__(norm_staged_bound(kCached, kCentred),
                                  norm_staged_blocks(kCached, kCentred))
    norm_bwd_staged_kernel(const T* __restrict__ grad, const T* __restrict__ x,
                           const T* __restrict__ grad_sum, const W* __restrict__ weight,
                           const acc_t<T>* __restrict__ means, const acc_t<T>* __restrict__ rstds,
                           T* __restrict__ dx, acc_t<T>* __restrict__ partial, int64_t rows,
                           int64_t n) {
  using A = acc_t<T>;
  using V = Vec<T, kN>;
  constexpr int kSumSlots = kParams ? kCached : 1;
  __shared__ A scratch[64];
  const bool adds = grad_sum != nullptr;
  const auto at = [](int tensor, int slot) { return 2 * tensor * kCached + slot; };
  V* const staged = reinterpret_cast<V*>(dynamic_shared()) +
                    (threadIdx.y * blockDim.x + threadIdx.x) * norm_staged_vectors(kCached, adds);
  int next = 0;  // 0 and kCached in turns
  A next_mean = 0, next_rstd = 0;
  const auto copy_row = [&](int64_t row) {
    const int64_t owned = row < rows ? n : 0, start = row * n;
    next_mean = kCentred && owned ? means[row] : A(0), next_rstd = owned ? rstds[row] : A(0);
    norm_each_slot<kN, kCached, true>(owned, [&](int slot, int64_t i, bool owns) {
      const int64_t from = start + i;  // not read past the end
      const auto copy = [&](int tensor, const T* p) {
        copy_async(staged + next + at(tensor, slot), reinterpret_cast<const V*>(p + from), owns);
      };
      copy(0, x), copy(1, grad);
      if (adds) copy(2, grad_sum);
    });
    end_copies();
  };
  Vec<A, kN> dw[kSumSlots] = {}, db[kSumSlots] = {};
  const unsigned step = gridDim.x * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  copy_row(row);
  for (; row - threadIdx.y < rows; row += step) {
    const V* const kept = staged + next;
    const A mean = next_mean, rstd = next_rstd;
    const int64_t owned = row < rows ? n : 0;
    next = kCached - next;
    copy_row(row + step);
    wait_for_copies<1>();
    A sum_gw = 0, sum_gw_hat = 0;
    norm_each_slot<kN, kCached, true>(owned, [&](int slot, int64_t i, bool owns) {
      const auto w = norm_param<kN>(weight, owns ? i : 0, 1.f);
      const auto wide_x = widen(norm_read(kept + at(0, slot))),
                 wide_g = widen(norm_read(kept + at(1, slot)));
      norm_bwd_terms<kCentred>(wide_x, wide_g, w, mean, rstd, sum_gw, sum_gw_hat,
                               [&](int e, A each, A hat) {
                                 if constexpr (kParams) {
                                   dw[slot].v[e] += each * hat;
                                   if constexpr (kCentred) db[slot].v[e] += each;
                                 }
                               });
    });
    if (dx == nullptr) continue;
    if constexpr (kCentred)
      norm_row_sums(sum_gw, sum_gw_hat, scratch);
    else
      sum_gw_hat = norm_row_sum(sum_gw_hat, scratch);
    const A mean_gw = kCentred ? sum_gw / static_cast<A>(n) : A(0),
            mean_gw_hat = sum_gw_hat / static_cast<A>(n);
    norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
      const auto w = norm_param<kN>(weight, i, 1.f);
      const auto wide_x = widen(norm_read(kept + at(0, slot))),
                 wide_g = widen(norm_read(kept + at(1, slot)));
      Vec<A, kN> more = {};
      if (adds) more = widen(norm_read(kept + at(2, slot)));
      store<kN>(dx + row * n, i,
                norm_bwd_dx<T>(wide_x, wide_g, w, mean, rstd, mean_gw, mean_gw_hat, adds, more));
    });
  }
  if constexpr (kParams) {
    if (partial == nullptr) return;
    A *const dw_out = partial + blockIdx.x * (kCentred ? 2 : 1) * n, *const shared =
                                                                         reinterpret_cast<A*>(
                                                                             dynamic_shared());
    wait_for_copies<0>();  // nothing comes into shared memory any more
#pragma unroll
    for (int slot = 0; slot < kCached; ++slot) {
      const int64_t i = (static_cast<int64_t>(slot) * blockDim.x + threadIdx.x) * kN;
      norm_write_partial(dw[slot], dw_out, i, i < n, shared);
      if constexpr (kCentred) norm_write_partial(db[slot], dw_out + n, i, i < n, shared);
    }
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
