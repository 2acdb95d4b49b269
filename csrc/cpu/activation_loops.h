// The two loops of the activation kernels on CPU: over all elements, and over columns that are
// summed on the way.

#pragma once

#include <ATen/ops/empty.h>
#include <algorithm>

#include "cpu/convert.h"
#include "cpu/simd.h"

namespace tp_ext {

// A bias in the type of the arithmetic, converted once instead of in every row
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

// Calls f(row, column, length) for pieces of a [rows, n] matrix, none across a row end, in
// parallel.
template <typename F>
void for_each_piece(int64_t rows, int64_t n, F f) {
  at::parallel_for(0, rows * n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t column = i % n, length = std::min(end - i, n - column);
      f(i / n, column, length);
      i += length;
    }
  });
}

// Adds one row of partial sums to the totals of up to kSumColumns columns.
constexpr int64_t kSumColumns = 256;
template <typename A>
TP_SIMD void add_partials(const A* __restrict partial, double* __restrict total, int64_t n) {
  for (int64_t j = 0; j < n; ++j) total[j] += static_cast<double>(partial[j]);
}

// Calls f(row, column, length, sums) for pieces of a [rows, n] matrix; f adds to sums[0 .. length)
// and, when there is more than one group of sums, to sums[k * n + 0 .. length). sums_out [groups *
// n] gets the totals over the rows. Tiles and the order of the additions depend on the shape alone:
// the same bits for any number of threads. A tile's sums stay in L1; 32 rows share one row of fp32
// partial sums, which therefore are accurate and cost 1/32 of a pass, and are added up in fp64.
template <typename T, typename F>
void for_each_piece_with_sums(int64_t rows, int64_t n, int64_t groups, T* sums_out, F f) {
  using A = acc_t<T>;
  if (n == 0) return;
  constexpr int64_t kTile = 2048;
  const int64_t tile = std::min(n, kTile), tiles = (n + tile - 1) / tile;
  constexpr int64_t kChunk = 32;
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
  const int64_t width = groups * n;
  const at::Tensor partials =
      at::empty({chunks, width}, at::TensorOptions().dtype(c10::CppTypeToScalarType<A>::value));
  A* const partial = out<A>(partials);
  at::parallel_for(
      0, chunks * tiles, std::max<int64_t>(1, kGrain / (kChunk * tile)),
      [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t first_row = task / tiles * kChunk, column = task % tiles * tile;
          const int64_t length = std::min(tile, n - column);
          A* const sums = partial + task / tiles * width + column;
          for (int64_t k = 0; k < groups; ++k) std::fill_n(sums + k * n, length, A(0));
          for (int64_t row = first_row; row < std::min(rows, first_row + kChunk); ++row)
            f(row, column, length, sums);
        }
      });
  at::parallel_for(0, width, std::max<int64_t>(kSumColumns, kGrain / std::max<int64_t>(chunks, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t column = begin; column < end; column += kSumColumns) {
                       const int64_t length = std::min(kSumColumns, end - column);
                       double total[kSumColumns] = {};
                       for (int64_t c = 0; c < chunks; ++c)
                         add_partials(partial + c * width + column, total, length);
                       for (int64_t j = 0; j < length; ++j)
                         sums_out[column + j] = from_acc<T>(static_cast<A>(total[j]));
                     }
                   });
}

}  // namespace tp_ext
