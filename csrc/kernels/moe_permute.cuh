// moe_permute, moe_unpermute and moe_dot on CUDA. No atomics: a row of y is written by its only
// slot, which moe_slots_kernel looks up, and a sum over the slots of a token is one thread's.
//
// in_range(ok) and unique(ok) assert: rows must be -1 or less than their number, and occur once.

#pragma once

#include "moe_permute.h"
#include "reduce.cuh"
#include "warp_rows.cuh"

namespace tp_ext {

// The slot of each row; slot_of is -1 on entry
template <typename InRange>
__global__ void moe_slots_kernel(const int64_t* __restrict__ rows, int64_t slots, int64_t num_rows,
                                 int64_t* __restrict__ slot_of, InRange in_range) {
  grid_stride(slots, 1, [&](int64_t slot) {
    const int64_t row = rows[slot];
    in_range(row >= -1 && row < num_rows);
    if (row >= 0 && row < num_rows) slot_of[row] = slot;
  });
}

template <int N, typename T>
__device__ __forceinline__ Vec<T, N> moe_scaled(const Vec<T, N>& x, acc_t<T> weight) {
  Vec<T, N> result;
#pragma unroll
  for (int e = 0; e < N; ++e) result.v[e] = moe_scaled(x.v[e], weight);
  return result;
}

template <int N, typename T>
__device__ __forceinline__ Vec<T, N> moe_zeros() {
  Vec<T, N> zeros;
#pragma unroll
  for (int e = 0; e < N; ++e) zeros.v[e] = from_acc<T>(acc_t<T>(0));
  return zeros;
}

// y of x. A warp reads 32 vectors of a token and writes them to the rows of its slots; more warps,
// one for each 32 vectors of a row, write zeros where no slot is.
template <int N, typename T, typename Unique>
__global__ void moe_permute_kernel(const T* __restrict__ x, const int64_t* __restrict__ rows,
                                   const acc_t<T>* __restrict__ weights,
                                   const int64_t* __restrict__ slot_of, MoeShape shape,
                                   T* __restrict__ y, Unique unique) {
  for_warp_rows<N>(shape.tokens + shape.rows, shape.hidden, [&](int64_t item, int64_t column) {
    if (column >= shape.hidden) return;
    if (item >= shape.tokens) {
      const int64_t row = item - shape.tokens;
      if (slot_of[row] < 0) store_global(y, row * shape.hidden + column, moe_zeros<N, T>());
      return;
    }
    const Vec<T, N> v = load<N>(x, item * shape.hidden + column);
    for (int64_t j = 0; j < shape.choices; ++j) {
      const int64_t slot = item * shape.choices + j, row = rows[slot];
      if (row < 0) continue;
      unique(slot_of[row] == slot);
      store_global(y, row * shape.hidden + column,
                   weights == nullptr ? v : moe_scaled<N, T>(v, weights[slot]));
    }
  });
}

// x of y: a thread adds up the slots of a token, in order
template <int N, typename T, typename InRange>
__global__ void moe_unpermute_kernel(const T* __restrict__ y, const int64_t* __restrict__ rows,
                                     const acc_t<T>* __restrict__ weights, MoeShape shape,
                                     T* __restrict__ x, InRange in_range) {
  constexpr int kUnroll = 4;  // rows in flight
  for_warp_rows<N>(shape.tokens, shape.hidden, [&](int64_t token, int64_t column) {
    if (column >= shape.hidden) return;
    acc_t<T> sum[N];
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] = acc_t<T>(0);
    for (int64_t first = 0; first < shape.choices; first += kUnroll) {
      Vec<T, N> v[kUnroll];
      int64_t row[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        row[u] = first + u < shape.choices ? rows[token * shape.choices + first + u] : -1;
        in_range(row[u] >= -1 && row[u] < shape.rows);
        if (row[u] >= 0) v[u] = load<N>(y, row[u] * shape.hidden + column);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row[u] < 0) continue;
        const acc_t<T> weight = moe_weight(weights, token * shape.choices + first + u);
#pragma unroll
        for (int e = 0; e < N; ++e) sum[e] += weight * to_acc(v[u].v[e]);
      }
    }
    Vec<T, N> total;
#pragma unroll
    for (int e = 0; e < N; ++e) total.v[e] = from_acc<T>(sum[e]);
    store_global(x, token * shape.hidden + column, total);
  });
}

// dot of x and y: a warp for each slot, the slots of a token are neighbours and share its row in the
// cache. With kGradient also dy = weights * x on the same pass; then slot_of is given, and more
// warps, one for each row, write zeros where no slot is.
template <int N, bool kGradient, typename T, typename Ok>
__global__ void moe_dot_kernel(const T* __restrict__ x, const T* __restrict__ y,
                               const int64_t* __restrict__ rows,
                               const acc_t<T>* __restrict__ weights,
                               const int64_t* __restrict__ slot_of, MoeShape shape,
                               T* __restrict__ dy, acc_t<T>* __restrict__ dot, Ok ok) {
  using A = acc_t<T>;
  const int64_t slots = shape.tokens * shape.choices, items = slots + (kGradient ? shape.rows : 0);
  const int64_t lane = threadIdx.x % kWarp, stride = warp_count();
  for (int64_t item = warp_index(); item < items; item += stride) {
    if (item >= slots) {
      const int64_t row = item - slots;
      if (slot_of[row] >= 0) continue;
      for (int64_t i = lane * N; i < shape.hidden; i += kWarp * N)
        store_global(dy, row * shape.hidden + i, moe_zeros<N, T>());
      continue;
    }
    const int64_t row = rows[item];
    A sum = 0;
    if (row >= 0) {
      A weight = 0;
      if constexpr (kGradient) {
        ok(slot_of[row] == item);
        weight = weights[item];
      } else {
        ok(row < shape.rows);
      }
      const int64_t from = divide(item, shape.choices) * shape.hidden, to = row * shape.hidden;
#pragma unroll 2
      for (int64_t i = lane * N; i < shape.hidden; i += kWarp * N) {
        const Vec<T, N> a = load<N>(x, from + i), b = load<N>(y, to + i);
#pragma unroll
        for (int e = 0; e < N; ++e) sum += to_acc(a.v[e]) * to_acc(b.v[e]);
        if constexpr (kGradient) store_global(dy, to + i, moe_scaled<N, T>(a, weight));
      }
    } else if constexpr (!kGradient) {
      ok(row == -1);
    }
    sum = warp_reduce(sum, Sum());
    if (lane == 0) dot[item] = sum;
  }
}

}  // namespace tp_ext
