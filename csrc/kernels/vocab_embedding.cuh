// CUDA kernels of the vocab-parallel embedding: a copy of rows, and its deterministic transpose. No
// atomics: the launcher sorts the ids (stable), so the gradient rows of one id are neighbours and
// are summed in token order, and each row of the table is written once.

#pragma once

#include "launch_table.h"
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
template <typename Id, typename Row>
__global__ void embedding_rows_kernel(const Id* __restrict__ ids, int64_t tokens,
                                      int64_t vocab_start, int64_t vocab_local, int64_t num_rows,
                                      Row* __restrict__ rows) {
  grid_stride(tokens, 1, [&](int64_t i) {
    const int64_t row = static_cast<int64_t>(ids[i]) - vocab_start;
    rows[i] = static_cast<Row>(row >= 0 && row < vocab_local ? row : num_rows);
  });
}

// Where the entries of a row begin and end in the sorted list
struct alignas(16) Segment {
  int64_t begin, end;
};

// segments [num_rows], zero on entry
template <typename Row>
__global__ void embedding_segments_kernel(const Row* __restrict__ sorted, int64_t tokens,
                                          int64_t num_rows, Segment* __restrict__ segments) {
  grid_stride(tokens, 1, [&](int64_t i) {
    const Row row = sorted[i];
    if (row == num_rows) return;
    if (i == 0 || sorted[i - 1] != row) segments[row].begin = i;
    if (i + 1 == tokens || sorted[i + 1] != row) segments[row].end = i + 1;
  });
}

// Gradient rows of a segment in flight together: a frequent id makes a long one
inline int embedding_rows_at_once(const LaunchChoice& tuned) { return tuned.vectors == 4 ? 4 : 8; }

// dweight [num_rows, hidden]; positions gives the token of each entry of the sorted list. A warp
// owns 32 vectors of columns of a row: the sum of its segment, or zeros. Without a number of blocks
// ptxas keeps to 40 registers and loads one gradient row after the other.
template <int N, int kRows, typename T>
__global__ void __launch_bounds__(kThreads, 4)
    embedding_bwd_kernel(const T* __restrict__ grad, const Segment* __restrict__ segments,
                         const int64_t* __restrict__ positions, int64_t hidden, int64_t num_rows,
                         T* __restrict__ dweight) {
  using A = acc_t<T>;
  for_warp_rows<N>(num_rows, hidden, [&](int64_t row, int64_t column) {
    if (column >= hidden) return;
    const Segment segment = segments[row];
    Vec<A, N> sum = {};
    // Past the end of the segment the last entry again, not added: without a branch the loads are in
    // flight together
    for (int64_t i = segment.begin; i < segment.end; i += kRows) {
      int64_t token[kRows];
      Vec<T, N> g[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k)
        token[k] = positions[i + k < segment.end ? i + k : segment.end - 1];
#pragma unroll
      for (int k = 0; k < kRows; ++k) g[k] = load<N>(grad, token[k] * hidden + column);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const Vec<A, N> wide = widen(g[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) sum.v[j] += i + k < segment.end ? wide.v[j] : A(0);
      }
    }
    Vec<T, N> total;
#pragma unroll
    for (int j = 0; j < N; ++j) total.v[j] = from_acc<T>(sum.v[j]);
    store_global<N>(dweight, row * hidden + column, total);
  });
}

}  // namespace tp_ext
