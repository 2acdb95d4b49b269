// CUDA kernels of vocab-parallel cross entropy; formulas in vocab_cross_entropy.h. A block takes a
// row at a time, and of short rows each of its warps takes one: forward reads it once (each thread
// an online softmax of its own, merged at the end in a fixed order), backward reads and writes it
// once. Never materialised: softmax, fp32 logits.
//
// Rows start at any address (a vocabulary of 50257 makes every second one odd): up to 15 bytes are
// peeled off the front so that the body uses 16-byte accesses; the remainder is the tail.

#pragma once

#include <algorithm>
#include <initializer_list>

#include "launch_table.h"
#include "reduce.cuh"
#include "vec.cuh"
#include "vocab_cross_entropy.h"

namespace tp_ext {

// Threads of a row, and rows of a block. A row of up to 8 vectors a lane is one warp's: a sum over
// a block would take longer than such a row.
struct CeBlock {
  int threads, rows;
};
template <typename T>
inline CeBlock ce_block(int64_t width, const LaunchChoice& tuned = {}) {
  if (tuned.threads == 32 && tuned.rows >= 1 && tuned.rows <= 16) return {32, tuned.rows};
  if (tuned.threads > 32 && tuned.threads <= 512 && tuned.threads % 32 == 0 && tuned.rows == 1)
    return {tuned.threads, 1};
  const int64_t warps = (width + 32 * kVec<T> - 1) / (32 * kVec<T>);
  if (warps <= 8) return {32, 8};
  return {static_cast<int>(warps > 16 ? 512 : 32 * warps), 1};
}
inline int ce_blocks(int64_t rows, const CeBlock& block) {
  const int64_t blocks = (rows + block.rows - 1) / block.rows;
  return static_cast<int>(blocks < 0x7fffffff ? blocks : 0x7fffffff);
}

// Of rows of at most as many vectors a lane the next one is loaded while a warp computes its own
constexpr int kCeKept = 4;
constexpr int kCeAheadBlocks = 3;  // of 256 threads, for __launch_bounds__

// Whether the kernels that load the next row can have these rows: whole, aligned vectors of up to 4
// bytes an element (fp64 would spill). strides: from row to row of each tensor
template <typename T>
inline bool ce_ahead(int64_t width, std::initializer_list<const T*> rows,
                     std::initializer_list<int64_t> strides, const LaunchChoice& tuned) {
  const bool by_warps = tuned.threads == 0 || (tuned.threads == 32 && tuned.rows <= 8);
  return sizeof(T) <= 4 && tuned.stages != 1 && by_warps && width > 0 &&
         width <= kCeKept * 32 * kVec<T> &&
         std::all_of(rows.begin(), rows.end(), [&](auto p) { return vectorisable<T>(width, p); }) &&
         std::all_of(strides.begin(), strides.end(), [](auto s) { return s % kVec<T> == 0; });
}
// Their grid: what the multiprocessors hold, or as the table has it
inline int ce_ahead_blocks(int64_t rows, const CeBlock& block, int processors,
                           const LaunchChoice& tuned) {
  const int held = kCeAheadBlocks * 256 / (block.threads * block.rows);
  const int64_t most = int64_t{processors} * (tuned.blocks > 0 ? tuned.blocks : held);
  return static_cast<int>(std::min<int64_t>(std::max(ce_blocks(rows, block), 1), most));
}

// [0, head) and [body_end, n) one by one, [head, body_end) in vectors
struct RowCut {
  int64_t head, body_end;
};

template <typename T>
__device__ __forceinline__ RowCut cut_row(const T* row, int64_t n) {
  const int64_t past = (reinterpret_cast<uintptr_t>(row) % kVecBytes) / sizeof(T);
  int64_t head = past == 0 ? 0 : kVec<T> - past;
  if (head > n) head = n;
  return {head, head + (n - head) / kVec<T> * kVec<T>};
}

// Loads in flight per thread, to hide the latency of memory
constexpr int kCeUnroll = 4;

template <typename T, int N>
__device__ __forceinline__ void add_to_stats(CeStats<acc_t<T>>& s, const Vec<T, N>& x) {
  using A = acc_t<T>;
  const Vec<A, N> v = widen(x);
  A max = s.max;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    max = v.v[i] > max ? v.v[i] : max;
    s.sum += v.v[i];
  }
  if (max != s.max) {
    s.sum_exp = rescale(s.sum_exp, s.max, max);
    s.max = max;
  }
  const A shift = exp_shift(max);
#pragma unroll
  for (int i = 0; i < N; ++i) s.sum_exp += exp_down_for<sizeof(T) == 2>(v.v[i] - shift);
}

// The row's statistics without the target, in all its threads
template <typename A>
__device__ __forceinline__ CeStats<A> merge_threads(const CeStats<A>& mine, A* scratch) {
  if (blockDim.x == 32) {
    const A max = warp_reduce(mine.max, Max());
    const A sum_exp = warp_reduce(rescale(mine.sum_exp, mine.max, max), Sum());
    return {max, sum_exp, A(0), warp_reduce(mine.sum, Sum())};
  }
  const A max = block_reduce(mine.max, Max(), minus_inf<A>(), scratch);
  const A sum_exp = block_reduce(rescale(mine.sum_exp, mine.max, max), Sum(), A(0), scratch);
  return {max, sum_exp, A(0), block_reduce(mine.sum, Sum(), A(0), scratch)};
}

// Calls f(r) for the rows of this thread
template <typename F>
__device__ __forceinline__ void for_ce_rows(int64_t rows, F f) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; r < rows;
       r += stride)
    f(r);
}

// stats [rows, 4]. in_range(ok) asserts that a target is valid or ignored. With width >= 0 stats is
// [rows + 1, 4], the last row that of the shard, and ce_check_kernel finds targets that are too
// large.
template <typename T, typename InRange>
__global__ void ce_stats_kernel(const T* __restrict__ logits, int64_t row_stride, int64_t rows,
                                int64_t vocab_local, const int64_t* __restrict__ target,
                                int64_t vocab_start, int64_t vocab_size, int64_t ignore_index,
                                acc_t<T>* __restrict__ stats, InRange in_range,
                                int64_t width = -1) {
  using A = acc_t<T>;
  constexpr int N = kVec<T>;
  __shared__ A scratch[32];
  // What the others compare travels with the rows: no collective of its own
  // [Note: ranks compare width and vocabulary in the exchange of the loss]
  if (width >= 0 && blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) {
    put_shard_row(stats + 4 * rows, {width, vocab_size});
  }
  for_ce_rows(rows, [&](int64_t r) {
    const T* row = logits + r * row_stride;
    const RowCut cut = cut_row(row, vocab_local);
    CeStats<A> mine = no_columns<A>();

    for (int64_t i = threadIdx.x; i < cut.head; i += blockDim.x) {
      add_to_stats(mine, Vec<T, 1>{row[i]});
    }
    const int64_t step = static_cast<int64_t>(blockDim.x) * N;
    int64_t i = cut.head + static_cast<int64_t>(threadIdx.x) * N;
    for (; i + (kCeUnroll - 1) * step < cut.body_end; i += kCeUnroll * step) {
      // In two loops: each sum depends on the one before, and would hold back the next load
      Vec<T, N> x[kCeUnroll];
#pragma unroll
      for (int k = 0; k < kCeUnroll; ++k) x[k] = load<N>(row, i + k * step);
#pragma unroll
      for (int k = 0; k < kCeUnroll; ++k) add_to_stats(mine, x[k]);
    }
    for (; i < cut.body_end; i += step) add_to_stats(mine, load<N>(row, i));
    for (i = cut.body_end + threadIdx.x; i < vocab_local; i += blockDim.x) {
      add_to_stats(mine, Vec<T, 1>{row[i]});
    }

    const CeStats<A> all = merge_threads(mine, scratch);
    if (threadIdx.x == 0) {
      const int64_t t = target[r], hit = t - vocab_start;
      // In an exchange a target that is too large is found after it, on all ranks alike
      in_range((t >= 0 && (t < vocab_size || width >= 0)) || t == ignore_index);
      const bool here = hit >= 0 && hit < vocab_local;
      stats[4 * r] = all.max;
      stats[4 * r + 1] = all.sum_exp;
      // Of the ranks one has the target's logit: their sum is it
      stats[4 * r + 2] = here ? to_acc(row[hit]) : A(0);
      stats[4 * r + 3] = all.sum;
    }
  });
}

// A vector as words: nvcc moves elements of half types one by one
using CeWords = Vec<uint32_t, 4>;
template <typename T>
__device__ __forceinline__ Vec<T, kVec<T>> ce_elements(const CeWords& words) {
  Vec<T, kVec<T>> result;
  memcpy(static_cast<void*>(&result), &words, sizeof result);
  return result;
}
// This lane's vectors of a row of n elements, all in flight; those past its end are its first one
template <typename T>
__device__ __forceinline__ void ce_load_row(const T* row, unsigned n, CeWords* to) {
#pragma unroll
  for (unsigned k = 0; k < kCeKept; ++k) {
    const unsigned i = (32 * k + threadIdx.x) * kVec<T>;
    to[k] = *reinterpret_cast<const CeWords*>(row + (i < n ? i : 0));
  }
}
// Calls f(k, i) for those that lie in the row
template <typename T, typename F>
__device__ __forceinline__ void ce_each(unsigned n, F f) {
#pragma unroll
  for (unsigned k = 0; k < kCeKept; ++k) {
    const unsigned i = (32 * k + threadIdx.x) * kVec<T>;
    if (i < n) f(k, i);
  }
}

// The larger of two elements each; of half types in one instruction
template <typename T>
__device__ __forceinline__ CeWords larger(const CeWords& a, const CeWords& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2) {
    using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    CeWords result;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Two x, y;
      memcpy(&x, &a.v[k], 4), memcpy(&y, &b.v[k], 4);
      x = __hmax2(x, y);
      memcpy(&result.v[k], &x, 4);
    }
    return result;
  } else
#endif
  {
    constexpr int N = kVec<T>;
    const Vec<T, N> x = ce_elements<T>(a), y = ce_elements<T>(b);
    Vec<T, N> most;
#pragma unroll
    for (int e = 0; e < N; ++e) most.v[e] = to_acc(x.v[e]) > to_acc(y.v[e]) ? x.v[e] : y.v[e];
    CeWords result;
    memcpy(&result, &most, sizeof result);
    return result;
  }
}

// The same for rows that ce_ahead accepts, a warp each: the row stays in registers, so that its
// maximum comes first, and the next one is loaded before the sums go through the warp.
template <typename T, typename InRange>
__global__ void __launch_bounds__(256, kCeAheadBlocks)
    ce_stats_ahead_kernel(const T* __restrict__ logits, int64_t row_stride, int64_t rows,
                          int64_t vocab_local, const int64_t* __restrict__ target,
                          int64_t vocab_start, int64_t vocab_size, int64_t ignore_index,
                          acc_t<T>* __restrict__ stats, InRange in_range, int64_t width = -1) {
  using A = acc_t<T>;
  constexpr int N = kVec<T>;
  const unsigned n = static_cast<unsigned>(vocab_local);
  if (width >= 0 && blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0)
    put_shard_row(stats + 4 * rows, {width, vocab_size});
  const unsigned step = gridDim.x * blockDim.y;
  int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= rows) return;
  CeWords x[kCeKept], next[kCeKept];
  ce_load_row(logits + r * row_stride, n, next);
  int64_t next_target = target[r];
  Vec<T, N> lowest;
#pragma unroll
  for (int e = 0; e < N; ++e) lowest.v[e] = from_acc<T>(minus_inf<A>());
  CeWords none;
  memcpy(&none, &lowest, sizeof none);
  for (; r < rows; r += step) {
    const T* const row = logits + r * row_stride;
    const int64_t t = next_target, hit = t - vocab_start;
    const bool here = hit >= 0 && hit < vocab_local;
    const T at_target = row[here ? hit : 0];
    CeWords most_words = none;
#pragma unroll
    for (int k = 0; k < kCeKept; ++k) x[k] = next[k];
    ce_each<T>(n, [&](int k, int) { most_words = larger<T>(x[k], most_words); });
    if (r + step < rows) {
      ce_load_row(row + step * row_stride, n, next);
      next_target = target[r + step];
    }
    const Vec<A, N> most = widen(ce_elements<T>(most_words));
    A max = most.v[0];
#pragma unroll
    for (int e = 1; e < N; ++e) max = Max()(max, most.v[e]);
    max = warp_reduce(max, Max());
    const A shift = exp_shift(max);
    A sum = 0, sum_exp = 0;
    ce_each<T>(n, [&](int k, int) {
      const Vec<A, N> v = widen(ce_elements<T>(x[k]));
#pragma unroll
      for (int e = 0; e < N; ++e) {
        sum += v.v[e];
        sum_exp += exp_down_for<sizeof(T) == 2>(v.v[e] - shift);
      }
    });
    sum = warp_reduce(sum, Sum()), sum_exp = warp_reduce(sum_exp, Sum());
    if (threadIdx.x == 0) {
      in_range((t >= 0 && (t < vocab_size || width >= 0)) || t == ignore_index);
      store<4>(stats, 4 * r, Vec<A, 4>{max, sum_exp, here ? to_acc(at_target) : A(0), sum});
    }
  }
}

// On stats [ranks, rows + 1, 4]: agree(ok) asserts that the ranks' columns make up one vocabulary,
// in_range(ok) that a target is in it or ignored. A thread per row.
template <typename A, typename Agree, typename InRange>
__global__ void ce_check_kernel(const A* __restrict__ stats, int64_t ranks, int64_t rows,
                                const int64_t* __restrict__ target, int64_t vocab_size,
                                int64_t ignore_index, Agree agree, InRange in_range) {
  if (blockIdx.x == 0 && threadIdx.x == 0) agree(shards_agree(stats, ranks, rows));
  grid_stride(rows, 1, [&](int64_t r) {
    const int64_t t = target[r];
    const bool ok = (t >= 0 && t < vocab_size) || t == ignore_index;
    if (!ok) agree(shards_agree(stats, ranks, rows));  // the cause, if both are wrong
    in_range(ok);
  });
}

// stats [ranks, rows + shard_rows, 4] -> loss [rows], lse [rows, 2]; a thread per row
template <typename A>
__global__ void ce_loss_kernel(const A* __restrict__ stats, int64_t ranks, int64_t rows,
                               const int64_t* __restrict__ target, int64_t ignore_index,
                               CeOptions<A> options, A* __restrict__ loss, A* __restrict__ lse,
                               int64_t shard_rows = 0) {
  grid_stride(rows, 1, [&](int64_t r) {
    CeStats<A> row = no_columns<A>();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const A* s = stats + 4 * (rank * (rows + shard_rows) + r);
      merge(row, CeStats<A>{s[0], s[1], s[2], s[3]});
    }
    loss[r] = target[r] == ignore_index ? A(0) : ce_loss(row, options);
    lse[2 * r] = row.max;
    lse[2 * r + 1] = log_of(row.sum_exp);
  });
}

// dlogits may alias logits: each element is read and written by one thread, the target's included,
// so neither pointer is __restrict__.
template <typename T>
__global__ void ce_bwd_kernel(const acc_t<T>* __restrict__ grad, const T* logits,
                              int64_t row_stride, T* dlogits, int64_t grad_stride, int64_t rows,
                              int64_t width, int64_t vocab_local,
                              const int64_t* __restrict__ target, const acc_t<T>* __restrict__ lse,
                              int64_t vocab_start, int64_t ignore_index,
                              CeOptions<acc_t<T>> options) {
  using A = acc_t<T>;
  constexpr int N = kVec<T>;
  for_ce_rows(rows, [&](int64_t r) {
    const T* x = logits + r * row_stride;
    T* dx = dlogits + r * grad_stride;
    const int64_t t = target[r], hit = t - vocab_start;
    const int64_t valid = t == ignore_index ? 0 : vocab_local;  // zero from here on
    const CeRowGrad<A, sizeof(T) == 2> row(grad[r], lse + 2 * r, options);
    const auto at = [&](int64_t i, T value) {
      if (i >= valid) return from_acc<T>(A(0));
      return from_acc<T>(i == hit ? row.at_target(to_acc(value)) : row(to_acc(value)));
    };
    const auto vector_at = [&](int64_t i, Vec<T, N> v) {
      // Almost every vector: no element needs to look at its index
      if (i + N <= valid && static_cast<uint64_t>(hit - i) >= N) {
        const Vec<A, N> wide = widen(v);
#pragma unroll
        for (int j = 0; j < N; ++j) v.v[j] = from_acc<T>(row(wide.v[j]));
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) v.v[j] = at(i + j, v.v[j]);
      }
      store_global<N>(dx, i, v);
    };

    // Vectors require both rows equally far from a 16-byte boundary
    RowCut cut = cut_row(x, width);
    if ((reinterpret_cast<uintptr_t>(x) - reinterpret_cast<uintptr_t>(dx)) % kVecBytes != 0) {
      cut = {0, 0};
    }
    for (int64_t i = threadIdx.x; i < cut.head; i += blockDim.x) dx[i] = at(i, x[i]);
    const int64_t step = static_cast<int64_t>(blockDim.x) * N;
    int64_t i = cut.head + static_cast<int64_t>(threadIdx.x) * N;
    for (; i + (kCeUnroll - 1) * step < cut.body_end; i += kCeUnroll * step) {
      Vec<T, N> v[kCeUnroll];
#pragma unroll
      for (int k = 0; k < kCeUnroll; ++k) v[k] = load<N>(x, i + k * step);
#pragma unroll
      for (int k = 0; k < kCeUnroll; ++k) vector_at(i + k * step, v[k]);
    }
    for (; i < cut.body_end; i += step) vector_at(i, load<N>(x, i));
    for (i = cut.body_end + threadIdx.x; i < width; i += blockDim.x) dx[i] = at(i, x[i]);
  });
}

// The same for rows that ce_ahead accepts, a warp each, with the next one loaded before this one is
// written
template <typename T>
__global__ void __launch_bounds__(256, kCeAheadBlocks)
    ce_bwd_ahead_kernel(const acc_t<T>* __restrict__ grad, const T* logits, int64_t row_stride,
                        T* dlogits, int64_t grad_stride, int64_t rows, int64_t width,
                        int64_t vocab_local, const int64_t* __restrict__ target,
                        const acc_t<T>* __restrict__ lse, int64_t vocab_start, int64_t ignore_index,
                        CeOptions<acc_t<T>> options) {
  using A = acc_t<T>;
  constexpr int N = kVec<T>;
  const unsigned n = static_cast<unsigned>(width), step = gridDim.x * blockDim.y;
  int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= rows) return;
  CeWords x[kCeKept], next[kCeKept];
  ce_load_row(logits + r * row_stride, n, next);
  int64_t next_target = target[r];
  A next_grad = grad[r], next_lse[] = {lse[2 * r], lse[2 * r + 1]};
  for (; r < rows; r += step) {
    const int64_t t = next_target, hit_here = t - vocab_start;
    const unsigned valid = t == ignore_index ? 0 : static_cast<unsigned>(vocab_local);
    const unsigned hit = static_cast<uint64_t>(hit_here) < n ? static_cast<unsigned>(hit_here) : n;
    const CeRowGrad<A, sizeof(T) == 2> row(next_grad, next_lse, options);
#pragma unroll
    for (int k = 0; k < kCeKept; ++k) x[k] = next[k];
    if (r + step < rows) {
      ce_load_row(logits + (r + step) * row_stride, n, next);
      next_target = target[r + step], next_grad = grad[r + step];
      next_lse[0] = lse[2 * (r + step)], next_lse[1] = lse[2 * (r + step) + 1];
    }
    ce_each<T>(n, [&](int k, unsigned i) {
      const Vec<A, N> wide = widen(ce_elements<T>(x[k]));
      Vec<T, N> v;
      if (i + N <= valid && hit - i >= N) {
#pragma unroll
        for (int e = 0; e < N; ++e) v.v[e] = from_acc<T>(row(wide.v[e]));
      } else {
#pragma unroll
        for (int e = 0; e < N; ++e)
          v.v[e] = from_acc<T>(i + e >= valid ? A(0)
                               : i + e == hit ? row.at_target(wide.v[e])
                                              : row(wide.v[e]));
      }
      store_global<N>(dlogits + r * grad_stride, i, v);
    });
  }
}

}  // namespace tp_ext
