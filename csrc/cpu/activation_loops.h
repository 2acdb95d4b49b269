// The two loops of the activation kernels on CPU: over all elements, and over elements whose
// columns are summed in the same pass.

#pragma once

#include <ATen/ops/empty.h>
#include <algorithm>

#include "cpu/bf16_pairs.h"
#include "cpu/dispatch.h"
#include "cpu/half_convert.h"

namespace tp_ext {

// Prefetch distance of loops over contiguous memory
template <typename T>
constexpr int64_t kAhead = 4096 / sizeof(T);

// A bias in the accumulation type, converted once instead of once per row
template <typename T>
at::Tensor widened(const at::Tensor& bias) {
  if constexpr (kIsHalf<T>) {
    const at::Tensor wide = at::empty(bias.sizes(), bias.options().dtype(at::kFloat));
    widen(in<T>(bias), out<float>(wide), bias.numel());
    return wide;
  } else {
    return bias;
  }
}

// Values of the n columns of a row (a bias or sums), in the order in which the loops over T take
// them: in sequence, or the even columns followed by as many odd ones (bf16_pairs.h)
template <typename T>
constexpr int64_t columns_size(int64_t n) {
  return kPaired<T> ? n + n % 2 : n;
}
// The column at a place; n for a padding place
template <typename T>
int64_t column_at(int64_t place, int64_t n) {
  if constexpr (!kPaired<T>) return place;
  const int64_t half = columns_size<T>(n) / 2;
  return place < half ? 2 * place : 2 * (place - half) + 1;
}
template <typename T, typename A>
struct Columns {
  A* data;
  int64_t n;

  // The columns from `column` on, even for pairs. null stays null: there is no bias
  Columns from(int64_t column) const {
    return {data == nullptr ? data : data + (kPaired<T> ? column / 2 : column), n};
  }
  // The k-th of several rows of columns
  Columns row(int64_t k) const {
    return {data == nullptr ? data : data + k * columns_size<T>(n), n};
  }
  A* odd() const { return data == nullptr ? data : data + columns_size<T>(n) / 2; }
};

template <typename T>
using ConstColumns = Columns<T, const acc_t<T>>;
template <typename T>
using MutableColumns = Columns<T, acc_t<T>>;

// The columns of a bias [groups * n], in the accumulation type
template <typename T>
at::Tensor columns_of(const at::Tensor& bias, int64_t groups) {
  if constexpr (kPaired<T>) {
    const int64_t n = bias.numel() / groups, size = columns_size<T>(n);
    const at::Tensor wide = at::empty({groups * size}, bias.options().dtype(at::kFloat));
    for (int64_t k = 0; k < groups; ++k)
      widen_pairs(in<T>(bias) + k * n, out<float>(wide) + k * size, n);
    return wide;
  } else {
    return widened<T>(bias);
  }
}

// Calls f(row, column, length), in parallel, for chunks of the rows of a [rows, n] matrix; for
// pairs a chunk starts at an even column.
template <typename F>
void for_each_row_chunk(int64_t rows, int64_t n, F f) {
  const auto even = [&](int64_t i) { return i - i % n % 2; };
  at::parallel_for(0, rows * n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = even(begin); i < even(end);) {
      const int64_t column = i % n, length = std::min(even(end) - i, n - column);
      f(i / n, column, length);
      i += length;
    }
  });
}

// Adds one row of partial sums to the totals of up to kSumColumns columns.
constexpr int64_t kSumColumns = 256;
template <typename A>
TP_MULTIVERSION void add_partials(const A* __restrict partial, double* __restrict total,
                                  int64_t n) {
  for (int64_t j = 0; j < n; ++j) total[j] += static_cast<double>(partial[j]);
}

// Calls f(row, column, length, sums) for chunks of the rows of a [rows, n] matrix; f adds to
// sums.row(k), the sums of group k of `groups`. sums_out [groups * n] gets the totals over the
// rows. Tiles and the order of the additions depend on the shape alone: the same bits for any
// number of threads. The data shared by a tile's rows stays in L1; each band of 16 rows, or of 32
// from 256 rows on, shares one row of fp32 partial sums, which are added up in fp64. Few rows need
// the shorter chains: there the exact sum of the bands gains little on torch, whose chains have 16
// rows; many rows make them cost 1/32 of a pass. Sums are in the column order of loops over Loop.
template <typename T, typename Loop = T, typename F>
void for_each_row_chunk_with_sums(int64_t rows, int64_t n, int64_t groups, T* sums_out, F f) {
  using A = acc_t<T>;
  if (n == 0) return;
  const int64_t tile = std::min(n, 2048 / groups), tiles = (n + tile - 1) / tile;
  const int64_t band = rows < 256 ? 16 : 32, bands = (rows + band - 1) / band;
  const int64_t size = columns_size<Loop>(n), width = groups * size;
  const at::Tensor partials =
      at::empty({bands, width}, at::TensorOptions().dtype(c10::CppTypeToScalarType<A>::value));
  A* const partial = out<A>(partials);
  at::parallel_for(0, bands * tiles, std::max<int64_t>(1, kGrain / (band * tile)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t task = begin; task < end; ++task) {
                       const int64_t first_row = task / tiles * band, column = task % tiles * tile;
                       const int64_t length = std::min(tile, n - column);
                       const MutableColumns<Loop> sums{partial + task / tiles * width, n};
                       for (int64_t k = 0; k < groups; ++k) {
                         const MutableColumns<Loop> own = sums.row(k).from(column);
                         const int64_t evens = kPaired<Loop> ? (length + 1) / 2 : length;
                         std::fill_n(own.data, evens, A(0));
                         if constexpr (kPaired<Loop>) std::fill_n(own.odd(), evens, A(0));
                       }
                       for (int64_t row = first_row; row < std::min(rows, first_row + band); ++row)
                         f(row, column, length, sums.from(column));
                     }
                   });
  at::parallel_for(0, width, std::max<int64_t>(kSumColumns, kGrain / std::max<int64_t>(bands, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t first = begin; first < end; first += kSumColumns) {
                       const int64_t length = std::min(kSumColumns, end - first);
                       double total[kSumColumns] = {};
                       for (int64_t c = 0; c < bands; ++c)
                         add_partials(partial + c * width + first, total, length);
                       int64_t group = first / size, place = first % size;
                       for (int64_t j = 0; j < length; ++j) {
                         const int64_t column = column_at<Loop>(place, n);
                         if (column < n)
                           sums_out[group * n + column] = from_acc<T>(static_cast<A>(total[j]));
                         if (++place == size) place = 0, ++group;
                       }
                     }
                   });
}

}  // namespace tp_ext
