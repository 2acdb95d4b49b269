// y = residual + dropout(x + bias), fused: 3 reads (x, residual, bias from cache), 1 write. Never
// materialised: the mask, the sum before dropout. The seed is read on the device, so a CUDA graph
// replays with new masks.
//
// One Philox counter serves eight neighbours of the *full* tensor. Where vectors of the full tensor
// are vectors of the shard too (local_inner, full_inner and offset whole vectors, pointers aligned)
// a thread takes one; otherwise it takes half a counter of one row and those of its elements that
// are local. Both give element i the same mask. A vector of fp32 is half a counter: another thread
// draws it again, and accesses stay contiguous; memory takes longer than the second draw.

#pragma once

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

// Bit k: whether element first + k of the full tensor is kept, for the rest of its counter
template <typename T>
__device__ __forceinline__ uint32_t dropout_kept(const DropoutArgs<T>& a, uint64_t seed,
                                                 uint64_t first) {
  if (a.dropout.keeps_all()) return 0xFF;
  return a.dropout.kept(seed, first / kCounterHalves) >> first % kCounterHalves;
}

template <typename T>
__global__ void dropout_vector_kernel(DropoutArgs<T> a) {
  constexpr int kN = kDropoutVec<T>;
  const uint64_t seed = a.seed.seed();
  grid_stride(a.n, kN, [&](int64_t i) {
    const Vec<T, kN> x = load<kN>(a.x, i);
    Vec<T, kN> bias, residual, y;
    if (a.bias) bias = load<kN>(a.bias, i - divide(i, a.bias_size) * a.bias_size);
    if (a.residual) residual = load<kN>(a.residual, i);
    const int64_t row = divide(i, a.index.local_inner);
    const uint64_t first = static_cast<uint64_t>(a.seed.row(row) * a.index.full_inner +
                                                 a.index.offset + i - row * a.index.local_inner);
    const uint32_t kept = dropout_kept(a, seed, first);
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      acc_t<T> value = to_acc(x.v[k]);
      if (a.bias) value += to_acc(bias.v[k]);
      value *= a.dropout.factor(kept >> k & 1);
      if (a.residual) value += to_acc(residual.v[k]);
      y.v[k] = from_acc<T>(value);
    }
    store_global(a.y, i, y);
  });
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
