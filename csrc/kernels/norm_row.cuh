// Assignment of a row of n elements to a group of threads in the CUDA kernels of RMSNorm and
// LayerNorm.
//
// A block is (width, groups) threads: `width` of them share a row, a power of two up to 32, so that
// several rows fit in a warp, or whole warps with groups = 1. With kCached > 0 each thread keeps
// its kCached vectors of the row in registers. With kCached = 0, for rows that are longer or not
// aligned, it keeps its elements in shared memory where the row fits, and otherwise reads them
// again in each pass. A thread accesses only the elements that it owns, in registers, shared memory
// and global memory: no pass waits for another thread.

#pragma once

#include <algorithm>

#include "launch_table.h"
#include "norm.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace tp_ext {

constexpr int kNormCached = 4;  // vectors of a row per thread
constexpr int kNormMaxThreads =
    512;  // leaves 128 registers per thread, for x, grad and the two sums
constexpr int kNormGroupThreads = 256;

// Assignment of a row to threads
struct NormLaunch {
  int width, groups;  // the block
  bool cached;        // whether a row fits the registers, in whole vectors
  int vectors;        // of the row per thread, if it does
  int stages = 1;     // rows on their way to a block, in backward: see norm_bwd_staged_kernel
};

template <typename T>
inline NormLaunch norm_launch(int64_t n, bool aligned, int kept = kNormCached,
                              int group_threads = kNormGroupThreads) {
  const int64_t vectors = n / kVec<T>;
  const bool cached = aligned && n > 0 && vectors <= kept * kNormMaxThreads;
  const int64_t wanted = cached ? (vectors + kept - 1) / kept : (n + 7) / 8;
  int width = 1;
  while (width < 32 && width < wanted) width *= 2;
  if (wanted > 32) {
    const int64_t whole = (wanted + 31) / 32 * 32;
    width = static_cast<int>(whole < kNormMaxThreads ? whole : kNormMaxThreads);
  }
  return {width, width <= 32 ? group_threads / width : 1, cached, kept};
}

// Forward of half types: the choice of the table if the row fits it, else the most vectors
template <typename T>
inline NormLaunch norm_fwd_launch(int64_t n, bool aligned, const LaunchChoice& tuned) {
  const int kept = tuned.vectors;
  const bool chosen =
      sizeof(T) == 2 && (kept == 1 || kept == 2) && n / kVec<T> <= kept * kNormMaxThreads;
  return norm_launch<T>(n, aligned, chosen ? kept : kNormCached);
}

// In backward a thread of half types keeps 1, 2 or kNormCached vectors of x and of grad. Fewer mean
// fewer registers, so more threads, but more of them for a row, which then sum through shared
// memory. Blocks of kNormMaxThreads that must fit a multiprocessor, for __launch_bounds__:
TP_HD constexpr int norm_bwd_blocks(int kept) { return kept == 1 ? 2 : 1; }
// Threads of a multiprocessor: with two vectors LayerNorm has 96 registers and RMSNorm 72 (sm_90)
TP_HD constexpr int norm_bwd_threads(int kept, bool centred) {
  return kept == 2 ? (centred ? 640 : 896) : norm_bwd_blocks(kept) * kNormMaxThreads;
}
// Whether all of a row is loaded at once, then computed. With four vectors LayerNorm's second sum
// leaves too few registers.
TP_HD constexpr bool norm_bwd_overlaps(int kept, bool centred) {
  return kept > 0 && (!centred || kept <= 2);
}

// With the next row in flight (norm_bwd_staged_kernel) registers hold sums alone. Four vectors of
// LayerNorm, with two sums, would still spill.
constexpr int kNormStagedThreads = 256, kNormStagedGroupThreads = 128;  // of a block, at most
TP_HD constexpr bool norm_staged_kept(int kept, bool centred) {
  return kept == 1 || kept == 2 || (kept == kNormCached && !centred);
}
// For __launch_bounds__: 64 registers for one vector of RMSNorm, 80 for two of it or one of
// LayerNorm, 96 for two of that, 128
TP_HD constexpr int norm_staged_bound(int kept, bool centred) {
  return kept == 2 && centred ? 320 : kNormStagedThreads;
}
TP_HD constexpr int norm_staged_blocks(int kept, bool centred) {
  return kept == kNormCached || (kept == 2 && centred) ? 2 : kept == 2 || centred ? 3 : 4;
}
// Vectors of shared memory of a thread; an odd number, so that those of 8 threads are in 32 banks
TP_HD constexpr int norm_staged_vectors(int kept, bool adds) { return (adds ? 6 : 4) * kept + 1; }
inline int64_t norm_staged_bytes(const NormLaunch& launch, bool adds) {
  return int64_t{launch.width} * launch.groups * norm_staged_vectors(launch.vectors, adds) *
         kVecBytes;
}

// Bytes that a multiprocessor must have requested so that memory is never idle: 4.3 TB/s times 700
// ns over 132 multiprocessors
constexpr int kBytesInFlight = 23 << 10;

// The choice of the table if the row fits it. Else the next row in flight, if `limit` bytes of
// shared memory have place for it, and the most vectors with enough bytes in flight. adds: there is
// a grad_sum.
template <typename T>
inline NormLaunch norm_bwd_launch(int64_t n, bool aligned, bool centred, const LaunchChoice& tuned,
                                  bool adds = false, int64_t limit = 0) {
  if (sizeof(T) != 2) return norm_launch<T>(n, aligned);
  const bool chosen = tuned.vectors == 1 || tuned.vectors == 2 || tuned.vectors == kNormCached;
  for (int kept = chosen ? tuned.vectors : kNormCached; tuned.stages != 1 && kept > 0; kept /= 2) {
    NormLaunch launch = norm_launch<T>(n, aligned, kept, kNormStagedGroupThreads);
    launch.stages = 2;
    if (launch.cached && norm_staged_kept(kept, centred) && launch.width <= kNormStagedThreads &&
        norm_staged_bytes(launch, adds) <= limit)
      return launch;
    if (chosen) break;
  }
  const auto in_flight = [&](int k) {
    return norm_bwd_threads(k, centred) * (norm_bwd_overlaps(k, centred) ? k : 1) * 2 * kVecBytes;
  };
  const auto fits = [&](int k) { return n / kVec<T> <= k * kNormMaxThreads; };
  int kept = kNormCached;
  while (kept > 1 && in_flight(kept) < kBytesInFlight && fits(kept / 2)) kept /= 2;
  return norm_launch<T>(n, aligned, chosen && fits(tuned.vectors) ? tuned.vectors : kept);
}

// Blocks of the grid: what a multiprocessor holds, since each costs a row of partial sums
inline int64_t norm_bwd_grid(const NormLaunch& launch, int64_t rows, bool centred, int processors,
                             const LaunchChoice& tuned, bool adds = false, int64_t limit = 0) {
  const int threads = launch.width * launch.groups;
  int64_t held = norm_bwd_threads(launch.cached ? launch.vectors : kNormCached, centred) / threads;
  if (launch.stages == 2) {
    held = norm_staged_blocks(launch.vectors, centred) *
           norm_staged_bound(launch.vectors, centred) / threads;
    held = std::min<int64_t>(held, limit / norm_staged_bytes(launch, adds));
  }
  const int64_t each = tuned.blocks > 0 ? tuned.blocks : held < 1 ? 1 : held;
  const int64_t useful = (rows + launch.groups - 1) / launch.groups;
  return useful < processors * each ? useful : processors * each;
}

// Storage of rows longer than the registers: `row` elements of T of shared memory for each row (0:
// none, they are read again) and, in backward, whether the sums for dw and db follow them
struct NormShared {
  int64_t row;
  bool sums;
  int64_t bytes;  // of a block
};

// `kept` rows of n elements for each of `groups` groups and `sums` rows of sums, within `limit`
// bytes: the sums, which cost a read and a write of every element, lose their place first.
template <typename T>
inline NormShared norm_shared(int64_t n, int groups, int kept, int sums, int64_t limit) {
  const int64_t row = (n + 15) / 16 * 16, rows = groups * kept * row * int64_t{sizeof(T)};
  const int64_t all = rows + sums * row * int64_t{sizeof(acc_t<T>)};
  if (all <= limit) return {row, sums > 0, all};
  if (rows <= limit) return {row, false, rows};
  return {0, false, 0};
}

#ifdef __CUDACC__
// That memory; tests on a host supply their own
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}
#endif

// The sum over the threads of a row, returned to all of them; every thread of the block takes part
template <typename A>
__device__ __forceinline__ A norm_row_sum(A x, A* scratch) {
  if (blockDim.x > 32) return block_reduce(x, Sum(), A(0), scratch);
  for (int lane = blockDim.x / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// The same of two sums; scratch holds 64 A's
template <typename A>
__device__ __forceinline__ void norm_row_sums(A& x, A& y, A* scratch) {
  if (blockDim.x > 32) return block_sums(x, y, scratch);
  x = norm_row_sum(x, scratch), y = norm_row_sum(y, scratch);
}

// Calls f(slot, i) for the vectors i = slot * kN of its row that this thread owns
template <int kN, int kCached, typename F>
__device__ __forceinline__ void norm_each(int64_t n, F f) {
  if constexpr (kCached > 0) {
#pragma unroll
    for (int slot = 0; slot < kCached; ++slot) {
      const unsigned i = (slot * blockDim.x + threadIdx.x) * kN;  // 32 bits: it fits the registers
      if (i < n) f(slot, i);
    }
  } else {
#pragma unroll 4
    for (int64_t i = threadIdx.x * kN; i < n; i += static_cast<int64_t>(blockDim.x) * kN) f(0, i);
  }
}

// Calls f(slot, i, owns) for all vectors i, past the end of the row without `owns`: what f does
// then must not matter. No branch separates the slots, so that their accesses overlap. Without
// kOverlap as norm_each.
template <int kN, int kCached, bool kOverlap, typename F>
__device__ __forceinline__ void norm_each_slot(int64_t n, F f) {
  if constexpr (kOverlap) {
#pragma unroll
    for (int slot = 0; slot < kCached; ++slot) {
      const unsigned i = (slot * blockDim.x + threadIdx.x) * kN;
      f(slot, i, i < static_cast<unsigned>(n));
    }
  } else {
    norm_each<kN, kCached>(n, [&](int slot, int64_t i) { f(slot, i, true); });
  }
}

// The vectors of the row at p + start, all in flight; those past its end are its first one
template <int kN, int kCached, typename T>
__device__ __forceinline__ void norm_load_row(const T* p, int64_t start, int64_t n,
                                              Vec<T, kN>* kept) {
  norm_each_slot<kN, kCached, true>(
      n, [&](int slot, int64_t i, bool owns) { kept[slot] = load<kN>(p + start, owns ? i : 0); });
}

template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> norm_zeros_unless(bool owns, const Vec<T, kN>& v) {
  static_assert(sizeof v == kVecBytes);
  uint32_t words[4];
  memcpy(words, &v, sizeof words);
#pragma unroll
  for (int k = 0; k < 4; ++k) words[k] = owns ? words[k] : 0;
  Vec<T, kN> result;
  memcpy(&result, words, sizeof words);
  return result;
}

// w or b at i, or its neutral value; `loaded` if it was loaded before
template <int kN, bool kAtOnce = true, typename W>
__device__ __forceinline__ Vec<acc_t<W>, kN> norm_param(const W* p, int64_t i, float neutral,
                                                        const Vec<W, kN>* loaded = nullptr) {
  Vec<acc_t<W>, kN> result;
  if (p == nullptr) {
#pragma unroll
    for (int e = 0; e < kN; ++e) result.v[e] = neutral;
    return result;
  }
  const Vec<W, kN> v = loaded != nullptr ? *loaded : load<kN>(p, i);
  if constexpr (kAtOnce) {
    return widen(v);
  } else {  // where registers are short
#pragma unroll
    for (int e = 0; e < kN; ++e) result.v[e] = to_acc(v.v[e]);
    return result;
  }
}

}  // namespace tp_ext
