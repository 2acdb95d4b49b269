// y = residual + dropout(x + bias), fused: 3 reads (x, residual, bias from cache), 1 write. Never
// materialised: the mask, the sum before dropout. The seed is read on the device, so a CUDA graph
// replays with new masks.
//
// One Philox counter serves eight neighbours of the *full* tensor. Where vectors of the full tensor
// are vectors of the shard too (local_inner, full_inner and offset whole vectors, pointers aligned)
// a thread owns a vector of columns and walks down the rows, so that no element's place is a
// division; otherwise it takes half a counter of one row and those of its elements that are local.
// Both give element i the same mask. A vector of fp32 is half a counter: another thread draws it
// again, and accesses stay contiguous; memory takes longer than the second draw.

#pragma once

#include "column_sum.cuh"
#include "divide.h"
#include "dropout.h"
#include "vec.cuh"

namespace tp_ext {

// Elements per thread on the vector path: 16 bytes, and at least half a counter
template <typename T>
constexpr int kDropoutVec = kVec<T> < 4 ? 4 : kVec<T>;

template <typename T>
struct DropoutArgs {
  const T *x, *bias, *residual;  // bias and residual may be null
  T* y;
  int64_t n, bias_size;
  SeedAndRows seed;
  Dropout<acc_t<T>> dropout;
  GlobalIndex index;
};

template <typename T>
bool dropout_vectorisable(const DropoutArgs<T>& a) {
  constexpr int64_t kN = kDropoutVec<T>, kBytes = kN * sizeof(T);
  const auto aligned = [](const T* p) { return reinterpret_cast<uintptr_t>(p) % kBytes == 0; };
  return a.index.local_inner % kN == 0 && a.index.full_inner % kN == 0 &&
         a.index.offset % kN == 0 && (a.bias == nullptr || a.bias_size % kN == 0) && aligned(a.x) &&
         aligned(a.bias) && aligned(a.residual) && aligned(a.y);
}

// The tensor as rows that the vector kernel walks down: element (row, column) is `first + row *
// stride + column` in the full tensor, unless the seed brings the number of each row
struct DropoutRows {
  int64_t rows, columns, stride;
};

// Rows of `last` elements, the last dim, where elements that are neighbours here are so in the full
// tensor; else the rows of the index, which may be few
template <typename T>
DropoutRows dropout_rows(const DropoutArgs<T>& a, int64_t last) {
  const int64_t inner = a.index.local_inner;
  const bool neighbours = inner == a.n || inner == a.index.full_inner;
  if (neighbours && last % kDropoutVec<T> == 0 && a.seed.size <= 2) return {a.n / last, last, last};
  return {a.n / inner, inner, a.index.full_inner};
}

// Bit k: whether element first + k of the full tensor is kept, for the rest of its counter
template <typename T>
__device__ __forceinline__ uint32_t dropout_kept(const DropoutArgs<T>& a, uint64_t seed,
                                                 uint64_t first) {
  if (a.dropout.keeps_all()) return 0xFF;
  return a.dropout.kept(seed, first / kCounterHalves) >> first % kCounterHalves;
}

// What decides on kN elements from each of `first` on, which lie in one counter of the full tensor:
// of numbers of 32 bits the upper 16, and the others only where these leave it open
template <int kN, int kRows, typename A>
__device__ __forceinline__ void dropout_numbers(const Dropout<A>& dropout, uint64_t seed,
                                                const uint64_t (&first)[kRows],
                                                uint32_t (&number)[kRows][kN]) {
  if (dropout.keeps_all()) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      for (int k = 0; k < kN; ++k) number[r][k] = 0;
    return;
  }
  uint64_t counter[kRows];
  PhiloxWords words[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) counter[r] = first[r] / kCounterHalves;
  philox4x32(seed, counter, 0, words);
  const auto word = [&](int r, int k) {
    const bool later = kN < kCounterHalves && first[r] % kCounterHalves != 0;
    return later ? words[r].w[(k + kN) / 2 % 4] : words[r].w[k / 2];
  };
  const uint32_t both = dropout.upper * 0x10001u;
  uint32_t open = 0;  // the upper bit of a half word that equals the threshold's
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kN; k += 2) {
      const uint32_t w = word(r, k), differs = w ^ both;
      open |= (differs - 0x10001u) & ~differs;
      number[r][k] = w << 16, number[r][k + 1] = w;
    }
  }
  if ((open & 0x80008000u) == 0) return;
  philox4x32(seed, counter, 1, words);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kN; k += 2) {
      const uint32_t w = word(r, k);
      number[r][k] |= w & 0xFFFFu;
      number[r][k + 1] = (number[r][k + 1] & 0xFFFF0000u) | w >> 16;
    }
  }
}

// x + bias and + residual where there are any; neither; neither, and the columns of y are summed
enum class DropoutForm { kWhole, kPlain, kSummed };

// Rows of a thread at once. Of dropout alone 2, for 24 KB of loads in flight on a multiprocessor
// (77 registers), as there are of two tensors with 1; with sums 2 leave no room for as many warps.
inline int dropout_rows_at_once(DropoutForm form, const LaunchChoice& tuned) {
  if (tuned.vectors == 1 || tuned.vectors == 2) return tuned.vectors;
  return form == DropoutForm::kPlain ? 2 : 1;
}

// A thread owns kN neighbouring columns and walks down the rows, kRows of them loaded and drawn
// together; which ones are summed in which order does not depend on kRows. partial [gridDim.y,
// columns] is for kSummed.
template <typename T, DropoutForm kForm, int kRows>
__global__ void __launch_bounds__(kColumnThreads)
    dropout_vector_kernel(DropoutArgs<T> a, DropoutRows rows, acc_t<T>* partial) {
  using A = acc_t<T>;
  constexpr int kN = kDropoutVec<T>;
  constexpr bool kWhole = kForm == DropoutForm::kWhole;
  const uint64_t seed = a.seed.seed();
  const uint32_t threshold = a.dropout.threshold();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kN;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  const int64_t first = a.seed.row(0) * a.index.full_inner + a.index.offset + column;
  Vec<A, kN> sum = {}, bias = {};
  if (kWhole && a.bias && column < rows.columns)
    bias = widen(load<kN>(a.bias, column - divide(column, a.bias_size) * a.bias_size));
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  if (column >= rows.columns) row = rows.rows;
  for (; row < rows.rows; row += kRows * step) {
    Vec<T, kN> x[kRows], residual[kRows];
    uint64_t place[kRows];  // in the full tensor
    uint32_t number[kRows][kN];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Past the end the first one again: without a branch the loads are in flight together
      const int64_t at = r == 0 || row + r * step < rows.rows ? row + r * step : row;
      x[r] = load<kN>(a.x, at * rows.columns + column);
      if (kWhole && a.residual) residual[r] = load<kN>(a.residual, at * rows.columns + column);
      place[r] = static_cast<uint64_t>(a.seed.size <= 2 ? first + at * rows.stride
                                                        : a.seed.row(at) * rows.stride +
                                                              a.index.offset + column);
    }
    dropout_numbers<kN, kRows>(a.dropout, seed, place, number);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r > 0 && row + r * step >= rows.rows) continue;
      Vec<A, kN> value = widen(x[r]);
      Vec<T, kN> y;
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        if (kWhole && a.bias) value.v[k] += bias.v[k];
        value.v[k] *= a.dropout.factor(number[r][k] >= threshold);
        if (kForm == DropoutForm::kSummed) sum.v[k] += value.v[k];
        if (kWhole && a.residual) value.v[k] += to_acc(residual[r].v[k]);
        y.v[k] = from_acc<T>(value.v[k]);
      }
      store_global(a.y, (row + r * step) * rows.columns + column, y);
    }
  }
  if constexpr (kForm == DropoutForm::kSummed) {
    block_column_sum(sum.v);
    if (threadIdx.y == 0 && column < rows.columns)
      store<kN>(partial, blockIdx.y * rows.columns + column, sum);
  }
}

// A row of local_inner elements touches at most this many quads (halves of counters)
TP_HD int64_t quads_per_row(const GlobalIndex& index) { return (index.local_inner + 6) / 4; }

template <typename T>
__global__ void dropout_general_kernel(DropoutArgs<T> a) {
  const uint64_t seed = a.seed.seed();
  const int64_t quads = quads_per_row(a.index);
  grid_stride(a.n / a.index.local_inner * quads, 1, [&](int64_t item) {
    const int64_t row = divide(item, quads), start = row * a.index.local_inner;
    const int64_t first = a.seed.row(row) * a.index.full_inner + a.index.offset;
    const int64_t quad = first / 4 + (item - row * quads);
    if (4 * quad >= first + a.index.local_inner) return;
    const uint32_t kept = dropout_kept(a, seed, static_cast<uint64_t>(4 * quad));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t column = 4 * quad + k - first, i = start + column;
      if (column < 0 || column >= a.index.local_inner) continue;
      acc_t<T> value = to_acc(a.x[i]);
      if (a.bias) value += to_acc(a.bias[i - divide(i, a.bias_size) * a.bias_size]);
      value *= a.dropout.factor(kept >> k & 1);
      if (a.residual) value += to_acc(a.residual[i]);
      a.y[i] = from_acc<T>(value);
    }
  });
}

}  // namespace tp_ext
