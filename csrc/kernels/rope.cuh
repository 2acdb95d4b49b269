// Rotary embedding on CUDA: one read and one write of x; cos and sin of a token are shared by its
// heads and come from cache. A thread rotates N pairs (or copies N of the other elements): N
// elements are 16 bytes where everything is aligned, otherwise N = 1. threadIdx.y counts tokens,
// threadIdx.x work within a token.

#pragma once

#include <algorithm>

#include "launch_table.h"
#include "rope.h"
#include "vec.cuh"

namespace tp_ext {

template <typename T>
bool rope_vectorisable(const T* x, const acc_t<T>* cos, const acc_t<T>* sin, const T* y,
                       const RopeShape& s) {
  constexpr int64_t kN = kVec<T>;
  const auto aligned = [](const void* p, size_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  return s.half % kN == 0 && s.head_dim % kN == 0 && s.batch_stride % kN == 0 &&
         s.token_stride % kN == 0 && s.head_stride % kN == 0 && aligned(x, kVecBytes) &&
         aligned(y, kVecBytes) && aligned(cos, kN * sizeof(acc_t<T>)) &&
         aligned(sin, kN * sizeof(acc_t<T>));
}

// Threads of a token and tokens of a block, by the table or as many threads as a token has work for;
// blocks of the grid
struct RopeLaunch {
  unsigned threads, tokens;
  int blocks;
};
template <int N>
inline RopeLaunch rope_launch(const RopeShape& s, const LaunchChoice& tuned) {
  const int64_t work = s.heads * ((s.head_dim - s.half) / N);
  const bool chosen = tuned.threads >= 32 && tuned.threads <= kThreads && tuned.threads % 32 == 0;
  const auto threads = static_cast<unsigned>(
      std::min<int64_t>(chosen ? tuned.threads : kThreads, (work + 31) / 32 * 32));
  const unsigned tokens = kThreads / threads;
  const int most = grid_for(s.tokens, static_cast<int>(tokens));
  return {threads, tokens, tuned.blocks > 0 ? std::min(tuned.blocks, most) : most};
}

template <typename T, int N, bool kInterleaved>
__device__ __forceinline__ void rotate_pairs(const T* x, const acc_t<T>* cos, const acc_t<T>* sin,
                                             acc_t<T> sign, int64_t i, int64_t half, T* y) {
  const int64_t low = kInterleaved ? 2 * i : i, high = kInterleaved ? 2 * i + N : i + half;
  Vec<T, N> in[2] = {load<N>(x, low), load<N>(x, high)}, out[2];
  const Vec<acc_t<T>, N> c = load<N>(cos, i), s = load<N>(sin, i);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    // Element e of the 2 N interleaved ones is in[e / N].v[e % N]
    const int a = kInterleaved ? 2 * j : j, b = kInterleaved ? 2 * j + 1 : N + j;
    const auto rotated =
        rotate(to_acc(in[a / N].v[a % N]), to_acc(in[b / N].v[b % N]), c.v[j], sign * s.v[j]);
    out[a / N].v[a % N] = from_acc<T>(rotated.first);
    out[b / N].v[b % N] = from_acc<T>(rotated.second);
  }
  store_global(y, low, out[0]);
  store_global(y, high, out[1]);
}

// cos and sin [rows, half] of positions [rows]; P is int64_t or double, Frequency RopeSeries or
// RopeFrequencies
template <typename A, typename P, typename Frequency>
__global__ void rope_tables_kernel(const P* positions, int64_t rows, int64_t half,
                                   const Frequency frequency, double amplitude, A* cos, A* sin) {
  grid_stride(rows * half, 1, [&](int64_t item) {
    const int64_t row = divide(item, half), i = item - row * half;
    const auto unit = cos_sin_of(static_cast<double>(positions[row]) * frequency(i));
    cos[item] = static_cast<A>(amplitude * unit.cos);
    sin[item] = static_cast<A>(amplitude * unit.sin);
  });
}

// in_range(ok) asserts
template <typename T, int N, bool kInterleaved, typename InRange>
__global__ void rope_kernel(const T* x, const acc_t<T>* cos, const acc_t<T>* sin,
                            const int64_t* positions, T* y, RopeShape s, acc_t<T> sign,
                            InRange in_range) {
  const int64_t rotations = s.half / N, per_head = rotations + (s.head_dim - 2 * s.half) / N;
  const int64_t work = s.heads * per_head;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; t < s.tokens;
       t += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const RopeToken token = rope_token(s, positions, t);
    in_range(token.row >= 0 && token.row < s.rows);
    for (int64_t item = threadIdx.x; item < work; item += blockDim.x) {
      const int64_t h = divide(item, per_head), k = item - h * per_head;
      const T* from = x + token.start + h * s.head_stride;
      T* to = y + (t * s.heads + h) * s.head_dim;
      if (k < rotations) {
        rotate_pairs<T, N, kInterleaved>(from, cos + token.row * s.half, sin + token.row * s.half,
                                         sign, k * N, s.half, to);
      } else {
        const int64_t i = 2 * s.half + (k - rotations) * N;
        store_global(to, i, load<N>(from, i));
      }
    }
  }
}

}  // namespace tp_ext
