// Forward of RMSNorm and LayerNorm over some rows.
//
// A row is loaded, its squared deviations are summed (LayerNorm), and it is written. One loop does
// all three, each for another row, to keep memory busy: while row i is loaded, the deviations of
// row i - 1 are summed and row i - 2 is written. fp16, whose conversions no plain loop vectorises,
// is converted in fractions of a row at a time (half_convert.h).

#pragma once

#include "cpu/norm_rows.h"

namespace tp_ext {

// Sums use this many interleaved lanes, added pairwise at the end: vectorised, and more precise
// than one running sum
constexpr int kNormLanes = 32;

template <typename T>
constexpr bool kBufferedRows = std::is_same_v<T, Fp16>;

// With a residual the rows are those of sum = x + residual, written in the same pass; otherwise
// both are null. b and means are LayerNorm's.
template <typename T>
struct NormForward {
  const T *x, *residual;
  T *sum, *y;
  const acc_t<T>*w, *b;
  acc_t<T>*means, *rstds;
  int64_t rows, n;
  acc_t<T> eps;
  acc_t<T>* cache;  // 3 rows, of half types
};

template <typename A>
struct NormSums {
  A loaded[kNormLanes] = {};  // of the elements; of their squares without kCentred
  A squares[kNormLanes] = {}, rests[kNormLanes] = {};  // of the deviations
};

// A span of columns of the three rows of a step. Members are restrict, as gcc knows them through a
// restrict reference.
template <typename T, typename A = acc_t<T>>
struct NormSpan {
  int64_t n;
  // The loaded row; `ahead`: distance in elements to the next one
  const T* __restrict x, * __restrict residual;
  T* __restrict sum;
  A* __restrict cache;
  int64_t ahead;
  // The row whose deviations are summed
  const A* __restrict squared;
  A squared_mean;
  // The written row; to_next: distance in elements to the next one
  const A* __restrict row;
  A mean, rstd;
  const A* __restrict w, * __restrict b;
  T* __restrict y;
  int64_t to_next;
  A* __restrict buffered;
};

// The enabled steps: x and residual are loaded, into sum and cache if not null; the deviations of
// `squared` from its mean are summed; `row` is written to y. For buffered rows the loaded row is in
// cache already, and the written row goes to `buffered`. A disabled step computes no sum.
template <typename T, bool kCentred, bool kAdds, bool kLoad, bool kSquare, bool kWrite>
TP_INLINE void norm_forward_step(NormSums<acc_t<T>>& sums, const NormSpan<T>& __restrict p) {
  using A = acc_t<T>;
  constexpr int kTile = kNormLanes;
  constexpr bool kConverts = !kBufferedRows<T>;
  const auto add = [&](int64_t k) TP_INLINED {
    const acc_t<T> sum = to_acc(p.x[k]) + to_acc(p.residual[k]);
    p.sum[k] = from_acc<T>(sum);
  };
  const auto load = [&](int64_t k) TP_INLINED {
    if constexpr (kConverts) {
      const A value = to_acc(kAdds ? p.sum[k] : p.x[k]);
      if constexpr (kIsHalf<T>) p.cache[k] = value;
      return value;
    } else {
      return p.cache[k];
    }
  };
  const auto write = [&](int64_t k) TP_INLINED {
    const A product = norm_hat(p.row[k], p.mean, p.rstd) * p.w[k];
    const A value = kCentred ? product + p.b[k] : product;
    if constexpr (kConverts) {
      p.y[k] = from_acc<T>(value);
    } else {
      p.buffered[k] = value;
    }
  };
  const auto add_loaded = [&](A value, int l)
                              TP_INLINED { sums.loaded[l] += kCentred ? value : value * value; };
  const auto add_deviation = [&](A d, int l) TP_INLINED {
    sums.squares[l] += d * d;
    sums.rests[l] += d;
  };
  const int64_t n = p.n;
  int64_t k = 0;
  for (; k + kTile <= n; k += kTile) {
    if constexpr (kLoad && kWrite) {
      // One stream less where four are read and written already
      if constexpr (!kAdds) fetch<2, kTile>(p.x + p.ahead + k);
      if constexpr (kAdds) fetch<2, kTile>(p.sum + p.ahead + k);
      fetch<2, kTile>(p.y + p.to_next + k);
    }
    if constexpr (kLoad && kAdds && kConverts)
      for (int l = 0; l < kTile; ++l) add(k + l);
    if constexpr (kLoad)
      for (int l = 0; l < kTile; ++l) add_loaded(load(k + l), l);
    if constexpr (kSquare)
      for (int l = 0; l < kTile; ++l) add_deviation(p.squared[k + l] - p.squared_mean, l);
    if constexpr (kWrite)
      for (int l = 0; l < kTile; ++l) write(k + l);
  }
  if (k == n) return;
  // The rest of the row, its sums padded with zeros so that lanes are counted at compile time
  const int rest = static_cast<int>(n - k);
  if constexpr (kLoad) {
    A values[kTile] = {};
    if constexpr (kAdds && kConverts)
      for (int l = 0; l < rest; ++l) add(k + l);
    for (int l = 0; l < rest; ++l) values[l] = load(k + l);
    for (int l = 0; l < kTile; ++l) add_loaded(values[l], l);
  }
  if constexpr (kSquare) {
    A deviations[kTile] = {};
    for (int l = 0; l < rest; ++l) deviations[l] = p.squared[k + l] - p.squared_mean;
    for (int l = 0; l < kTile; ++l) add_deviation(deviations[l], l);
  }
  if constexpr (kWrite)
    for (int l = 0; l < rest; ++l) write(k + l);
}

// Widens n elements of x, or of sum, which is written, into the cache; `rest` has room for as many
template <bool kAdds, typename T>
TP_INLINE void widen_part(const T* x, const T* residual, T* sum, float* __restrict cache,
                          float* __restrict rest, int64_t n) {
  widen(x, cache, n);
  if constexpr (kAdds) {
    widen(residual, rest, n);
    for (int64_t k = 0; k < n; ++k) cache[k] += rest[k];
    narrow(cache, sum, n);
    widen(sum, cache, n);
  }
}

template <typename T, bool kCentred, bool kAdds>
TP_INLINE void norm_forward_of(const NormForward<T>& p) {
  using A = acc_t<T>;
  using Yes = std::true_type;
  using No = std::false_type;
  const int64_t n = p.n, rows = p.rows;
  const A size = static_cast<A>(n);
  const auto kept = [&](int64_t i) TP_INLINED {
    if constexpr (kIsHalf<T>) {
      return p.cache + i % 3 * n;
    } else {
      return (kAdds ? p.sum : p.x) + i * n;
    }
  };
  // Loads row i, sums the deviations of row i - 1, writes row i - 2
  const auto step = [&](auto loads, auto squares, auto writes, int64_t i) TP_INLINED {
    const int64_t previous = i - 1, last = kCentred ? i - 2 : i - 1;
    NormSums<A> sums;
    const auto part = [&](int64_t begin, int64_t m, A* buffered) TP_INLINED {
      const int64_t from = i * n + begin, to = last * n + begin;
      A* const cache = kIsHalf<T> ? p.cache + i % 3 * n + begin : nullptr;
      const T* const residual = kAdds ? p.residual + from : nullptr;
      T* const sum = kAdds ? p.sum + from : nullptr;
      if constexpr (loads && kBufferedRows<T>)
        widen_part<kAdds>(p.x + from, residual, sum, cache, buffered, m);
      const NormSpan<T> span{
          m,
          p.x + from,
          residual,
          sum,
          cache,
          i + 1 < rows ? n : 0,
          squares ? kept(previous) + begin : nullptr,
          squares ? p.means[previous] : A(0),
          writes ? kept(last) + begin : nullptr,
          writes && kCentred ? p.means[last] : A(0),
          writes ? p.rstds[last] : A(0),
          p.w + begin,
          p.b + begin,
          p.y + to,
          n,
          buffered,
      };
      norm_forward_step<T, kCentred, kAdds, loads, squares, writes>(sums, span);
    };
    if constexpr (kBufferedRows<T>) {
      static_assert(kBufferLength % kNormLanes == 0);
      Fp32Buffer<T> buffered;
      for_each_buffer<T>(n, [&](int64_t k, int64_t m) TP_INLINED {
        part(k, m, buffered.target(p.y));
        if constexpr (writes) buffered.store(p.y + last * n + k, m);
      });
    } else {
      part(0, n, nullptr);
    }
    if constexpr (loads) {
      const A loaded = sum_lanes(sums.loaded);
      if constexpr (kCentred) {
        p.means[i] = loaded / size;
      } else {
        p.rstds[i] = norm_rstd(loaded, size, p.eps);
      }
    }
    if constexpr (squares) {
      A total = sum_lanes(sums.squares);
      norm_correct(p.means[previous], total, sum_lanes(sums.rests), size);
      p.rstds[previous] = norm_rstd(total, size, p.eps);
    }
  };
  if (rows == 0) return;
  step(Yes{}, No{}, No{}, 0);
  if constexpr (kCentred) {
    if (rows > 1) {
      step(No{}, Yes{}, No{}, 1);
      step(Yes{}, No{}, No{}, 1);
    }
    for (int64_t i = 2; i < rows; ++i) step(Yes{}, Yes{}, Yes{}, i);
    step(No{}, Yes{}, No{}, rows);
    if (rows > 1) step(No{}, No{}, Yes{}, rows);
    step(No{}, No{}, Yes{}, rows + 1);
  } else {
    for (int64_t i = 1; i < rows; ++i) step(Yes{}, No{}, Yes{}, i);
    step(No{}, No{}, Yes{}, rows);
  }
}

template <typename T, bool kCentred>
TP_MULTIVERSION void norm_forward_rows(const NormForward<T>& p) {
  if (p.residual != nullptr) {
    norm_forward_of<T, kCentred, true>(p);
  } else {
    norm_forward_of<T, kCentred, false>(p);
  }
}

}  // namespace tp_ext
