// CUDA kernels of the vocab-parallel embedding: a copy of rows, and its deterministic transpose. No
// atomics: the launcher sorts the ids (stable), so the gradient rows of one id are neighbours and
// are summed in token order.

#pragma once

#include "warp_rows.cuh"

namespace tp_ext {

// y [tokens, hidden]; ids of other ranks give zeros. A warp copies kParts times 32
// vectors of one row. in_range(ok) asserts.
template <int N, typename T, typename Id, typename InRange>
__global__ void embedding_fwd_kernel(const T* __restrict__ weight, const Id* __restrict__ ids,
                                     int64_t tokens, int64_t hidden, int64_t vocab_start,
                                     int64_t vocab_local, int64_t vocab_size, T* __restrict__ y,
                                     InRange in_range) {
  for_warp_rows<N>(tokens, hidden, kParts, [&](int64_t token, int64_t column) {
    const int64_t id = ids[token], row = id - vocab_start;
    in_range(id >= 0 && id < vocab_size);
    const int left = parts_left<N>(column, hidden);
    Parts<N, T> from = {};
    if (row >= 0 && row < vocab_local) from = load_parts<N>(weight + row * hidden, column, left);
    T* const to = y + token * hidden + column;
    for_parts<N>(left, [&](int part, int i) { store_global<N>(to, i, from.v[part]); });
  });
}

// The local row of each id; num_rows for ids of other ranks, which sorts them to the end
template <typename Id>
__global__ void embedding_rows_kernel(const Id* __restrict__ ids, int64_t tokens,
                                      int64_t vocab_start, int64_t vocab_local, int64_t num_rows,
                                      int64_t* __restrict__ rows) {
  grid_stride(tokens, 1, [&](int64_t i) {
    const int64_t row = static_cast<int64_t>(ids[i]) - vocab_start;
    rows[i] = row >= 0 && row < vocab_local ? row : num_rows;
  });
}

// dweight [num_rows, hidden], zero on entry. rows is sorted, and positions gives the token of each
// entry. A warp owns 32 vectors of columns of the segment that begins at its entry; warps at other
// entries of a segment return.
template <int N, typename T>
__global__ void embedding_bwd_kernel(const T* __restrict__ grad, const int64_t* __restrict__ rows,
                                     const int64_t* __restrict__ positions, int64_t tokens,
                                     int64_t hidden, int64_t num_rows, T* __restrict__ dweight) {
  using A = acc_t<T>;
  constexpr int kUnroll = 4;  // gradient rows in flight: a frequent id makes a long segment
  for_warp_rows<N>(tokens, hidden, [&](int64_t begin, int64_t column) {
    const int64_t row = rows[begin];
    if (row == num_rows || (begin > 0 && rows[begin - 1] == row) || column >= hidden) return;
    A sum[N];
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = A(0);
    int64_t i = begin;
    for (; i + kUnroll <= tokens && rows[i + kUnroll - 1] == row; i += kUnroll) {
      Vec<T, N> g[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) g[k] = load<N>(grad, positions[i + k] * hidden + column);
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += to_acc(g[k].v[j]);
      }
    }
    for (; i < tokens && rows[i] == row; ++i) {
      const Vec<T, N> g = load<N>(grad, positions[i] * hidden + column);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += to_acc(g.v[j]);
    }
    Vec<T, N> total;
#pragma unroll
    for (int j = 0; j < N; ++j) total.v[j] = from_acc<T>(sum[j]);
    store_global<N>(dweight, row * hidden + column, total);
  });
}

}  // namespace tp_ext
