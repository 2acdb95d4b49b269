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

// The slots [first, first + count) of a token, one to each lane: their rows, of which ok(slot, row)
// asserts what it has to, and weights. -1: no such slot, or none of its rows.
template <typename A>
struct MoeLane {
  int64_t row;
  A weight;
};
template <typename A, typename Ok>
__device__ __forceinline__ MoeLane<A> moe_lane(const int64_t* rows, const A* weights, int64_t first,
                                               int64_t count, Ok ok) {
  const int64_t lane = threadIdx.x % kWarp;
  if (lane >= count) return {-1, A(1)};
  const int64_t slot = first + lane, row = rows[slot];
  ok(slot, row);
  return {row, moe_weight(weights, slot)};
}
template <typename A>
__device__ __forceinline__ MoeLane<A> moe_from_lane(const MoeLane<A>& mine, int lane) {
  return {__shfl_sync(0xffffffffu, mine.row, lane), __shfl_sync(0xffffffffu, mine.weight, lane)};
}

// Warps of moe_permute_kernel that write zeros where no slot is, each for up to 32 rows, and all
TP_HD int64_t moe_zero_warps(int64_t rows) { return (rows + kWarp - 1) / kWarp; }
template <int N>
int64_t moe_permute_threads(const MoeShape& shape) {
  return moe_zero_warps(shape.rows) * kWarp +
         warp_row_threads<N>(shape.tokens, shape.hidden, kParts);
}

// y of x. The first warps write zeros; of the others each reads kParts times 32 vectors of a token
// and writes them to the rows of its slots.
template <int N, typename T, typename Unique>
__global__ void moe_permute_kernel(const T* __restrict__ x, const int64_t* __restrict__ rows,
                                   const acc_t<T>* __restrict__ weights,
                                   const int64_t* __restrict__ slot_of, MoeShape shape,
                                   T* __restrict__ y, Unique unique) {
  const int lane = threadIdx.x % kWarp;
  const int64_t zero_warps = moe_zero_warps(shape.rows);
  const int64_t each = warps_of_row<N>(shape.hidden, kParts);
  const int64_t items = zero_warps + shape.tokens * each, stride = warp_count();
  int64_t item = warp_index();
  for (; item < zero_warps; item += stride) {
    const int64_t first = item * kWarp;
    const int unused = first + lane < shape.rows && slot_of[first + lane] < 0;
    for (int k = 0; k < kWarp; ++k) {
      if (!__shfl_sync(0xffffffffu, unused, k)) continue;
      for (int64_t i = lane * N; i < shape.hidden; i += kWarp * N)
        store_global(y, (first + k) * shape.hidden + i, moe_zeros<N, T>());
    }
  }
  for (; item < items; item += stride) {
    const int64_t part_of = item - zero_warps, token = divide(part_of, each);
    const int64_t column = ((part_of - token * each) * kParts * kWarp + lane) * N;
    const int left = parts_left<N>(column, shape.hidden);
    const Parts<N, T> from = load_parts<N>(x + token * shape.hidden, column, left);
    for (int64_t first = 0; first < shape.choices; first += kWarp) {
      const int64_t rest = shape.choices - first;
      const int count = static_cast<int>(rest < kWarp ? rest : kWarp);
      const auto mine = moe_lane(rows, weights, token * shape.choices + first, count,
                                 [&](int64_t slot, int64_t row) {
                                   if (row >= 0) unique(slot_of[row] == slot);
                                 });
      for (int k = 0; k < count; ++k) {
        const MoeLane<acc_t<T>> slot = moe_from_lane(mine, k);
        if (slot.row < 0) continue;
        T* const to = y + slot.row * shape.hidden + column;
        for_parts<N>(left, [&](int part, int i) {
          store_global(
              to, i,
              weights == nullptr ? from.v[part] : moe_scaled<N, T>(from.v[part], slot.weight));
        });
      }
    }
  }
}

// x of y: a thread adds up the slots of a token, in order, for kParts vectors at once
template <int N, typename T, typename InRange>
__global__ void __launch_bounds__(kThreads, 2)
    moe_unpermute_kernel(const T* __restrict__ y, const int64_t* __restrict__ rows,
                         const acc_t<T>* __restrict__ weights, MoeShape shape, T* __restrict__ x,
                         InRange in_range) {
  using A = acc_t<T>;
  for_warp_rows<N>(shape.tokens, shape.hidden, kParts, [&](int64_t token, int64_t column) {
    const int left = parts_left<N>(column, shape.hidden);
    A sum[kParts][N];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int e = 0; e < N; ++e) sum[part][e] = A(0);
    const auto add = [&](const Parts<N, T>& from, A weight) {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int e = 0; e < N; ++e) sum[part][e] += weight * to_acc(from.v[part].v[e]);
    };
    const auto row_at = [&](int64_t row) {
      return load_parts<N>(y + row * shape.hidden, column, left);
    };
    for (int64_t first = 0; first < shape.choices; first += kWarp) {
      const int64_t rest = shape.choices - first;
      const int count = static_cast<int>(rest < kWarp ? rest : kWarp);
      const auto mine =
          moe_lane(rows, weights, token * shape.choices + first, count,
                   [&](int64_t, int64_t row) { in_range(row >= -1 && row < shape.rows); });
      for (int k = 0; k < count; k += 2) {
        // At k + 1 == count, which is less than kWarp, there is no slot, as its row -1 says
        const MoeLane<A> one = moe_from_lane(mine, k), two = moe_from_lane(mine, k + 1);
        if (one.row >= 0 && two.row >= 0) {  // both in flight
          const Parts<N, T> from_one = row_at(one.row), from_two = row_at(two.row);
          add(from_one, one.weight), add(from_two, two.weight);
        } else if (one.row >= 0 || two.row >= 0) {
          const MoeLane<A>& only = one.row >= 0 ? one : two;
          add(row_at(only.row), only.weight);
        }
      }
    }
    T* const to = x + token * shape.hidden + column;
    for_parts<N>(left, [&](int part, int i) {
      Vec<T, N> total;
#pragma unroll
      for (int e = 0; e < N; ++e) total.v[e] = from_acc<T>(sum[part][e]);
      store_global(to, i, total);
    });
  });
}

// dot of x and y: a warp for each slot, the slots of a token are neighbours and share its row in
// the cache. With kGradient also dy = weights * x on the same pass; then slot_of is given, and more
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
