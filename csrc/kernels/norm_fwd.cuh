// Forward of RMSNorm and LayerNorm on CUDA (formulas in norm.h, assignment of a row to threads in
// norm_row.cuh). x and the residual are read from memory once, unless a row fits neither registers
// nor shared memory.

#pragma once

#include "norm_row.cuh"

namespace tp_ext {

// With a residual the rows are those of sum = x + residual, rounded to T and written in the same
// pass: there is one if kAdds where rows stay in registers, else if the pointer is not null.
// Launched with groups * shared_row elements of T of shared memory.
template <typename T, typename W, bool kCentred, int kN, int kCached, bool kAdds>
__global__ void __launch_bounds__(kNormMaxThreads, 1)
    norm_fwd_kernel(const T* __restrict__ x, const T* __restrict__ residual,
                    const W* __restrict__ weight, const W* __restrict__ bias, T* __restrict__ sum,
                    T* __restrict__ y, acc_t<T>* __restrict__ means, acc_t<T>* __restrict__ rstds,
                    int64_t rows, int64_t n, acc_t<T> eps, int64_t shared_row) {
  using A = acc_t<T>;
  __shared__ A scratch[64];
  const bool adds = kCached > 0 ? kAdds : residual != nullptr;
  T* const own =
      shared_row > 0 ? reinterpret_cast<T*>(dynamic_shared()) + threadIdx.y * shared_row : nullptr;
  constexpr int kSlots = kCached > 0 ? kCached : 1;
  Vec<T, kN> kept[kSlots];
  // All groups of a block run the same iterations, those past the last row with nothing to add: the
  // sums need whole warps
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < rows;
       first += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = first + threadIdx.y, owned = row < rows ? n : 0, start = row * n;
    const T* const again = own != nullptr ? own : adds ? sum + start : x + start;
    const auto read = [&](int64_t i) {
      Vec<T, kN> v = load<kN>(x + start, i);
      if (adds) {
        const Vec<T, kN> r = load<kN>(residual + start, i);
#pragma unroll
        for (int e = 0; e < kN; ++e) v.v[e] = from_acc<T>(to_acc(v.v[e]) + to_acc(r.v[e]));
        store<kN>(sum + start, i, v);
      }
      return v;
    };
    // The vector at i: loaded in the first pass, kept or reloaded in the later ones
    const auto get_first = [&](int slot, int64_t i) {
      if constexpr (kCached > 0) return kept[slot];
      const Vec<T, kN> v = read(i);
      if (own != nullptr) store<kN>(own, i, v);
      return v;
    };
    const auto get = [&](int slot, int64_t i) {
      if constexpr (kCached > 0) return kept[slot];
      return load<kN>(again, i);
    };
    // All loads of a row without a branch or a store between them, so that they are in flight
    // together; those of a row past the last are of the first
    if constexpr (kCached > 0) {
      const int64_t from = row < rows ? start : 0;
      norm_load_row<kN, kCached>(x, from, n, kept);
      if constexpr (kAdds) {
        Vec<T, kN> r[kSlots];
        norm_load_row<kN, kCached>(residual, from, n, r);
        norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
#pragma unroll
          for (int e = 0; e < kN; ++e)
            kept[slot].v[e] = from_acc<T>(to_acc(kept[slot].v[e]) + to_acc(r[slot].v[e]));
          store<kN>(sum + start, i, kept[slot]);
        });
      }
    }
    A mean = 0;
    if constexpr (kCentred) {
      norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
        const Vec<T, kN> v = get_first(slot, i);
#pragma unroll
        for (int e = 0; e < kN; ++e) mean += to_acc(v.v[e]);
      });
      mean = norm_row_sum(mean, scratch) / static_cast<A>(n);
    }
    A squares = 0, rest = 0;
    norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
      const Vec<T, kN> v = kCentred ? get(slot, i) : get_first(slot, i);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const A d = to_acc(v.v[e]) - mean;
        squares += d * d;
        if constexpr (kCentred) rest += d;
      }
    });
    if constexpr (kCentred) {
      norm_row_sums(squares, rest, scratch);
      norm_correct(mean, squares, rest, static_cast<A>(n));
    } else {
      squares = norm_row_sum(squares, scratch);
    }
    const A rstd = norm_rstd(squares, static_cast<A>(n), eps);
    // Two parameters, or wider ones, would leave too few registers
    constexpr bool kTogether = kCached > 0 && !kCentred && sizeof(W) == sizeof(T);
    Vec<W, kN> weights[kSlots];
    if (kTogether && weight != nullptr) norm_load_row<kN, kSlots>(weight, 0, n, weights);
    norm_each<kN, kCached>(owned, [&](int slot, int64_t i) {
      const Vec<T, kN> v = get(slot, i);
      const auto w = norm_param<kN>(weight, i, 1.f, kTogether ? &weights[slot] : nullptr);
      const auto b = norm_param<kN>(kCentred ? bias : nullptr, i, 0.f);
      Vec<T, kN> r;
#pragma unroll
      for (int e = 0; e < kN; ++e)
        r.v[e] = from_acc<T>(norm_hat(to_acc(v.v[e]), mean, rstd) * w.v[e] + b.v[e]);
      store<kN>(y + start, i, r);
    });
    if (threadIdx.x == 0 && row < rows) {
      if constexpr (kCentred) means[row] = mean;
      rstds[row] = rstd;
    }
  }
}

}  // namespace tp_ext
