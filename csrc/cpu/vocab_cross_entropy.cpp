// Vocab-parallel cross entropy on the CPU: a row is walked once, in chunks that stay in the L1
// cache between finding their maximum and summing their exponentials.

#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "args/vocab_cross_entropy.h"
#include "cpu/dispatch.h"
#include "cpu/half_convert.h"
#include "kernels/vocab_cross_entropy.h"

namespace tp_ext {
namespace {

// Adds a chunk to the statistics of its row. Two accumulators each, since every sum and maximum
// waits for the previous one; after the first chunks the maximum hardly grows, and nothing is
// rescaled. The exponentials are summed in Wide: the rounding of their sum affects the whole
// gradient of the row.
template <typename Wide, typename A>
TP_MULTIVERSION void add_chunk(const A* v, int64_t n, CeStats<A>& row) {
  const int64_t half = n / 2;
  const A* const w = v + half;
  A max = n % 2 ? v[n - 1] : minus_inf<A>(), max_w = minus_inf<A>();
  A sum = n % 2 ? v[n - 1] : A(0), sum_w = 0;
  Wide sum_exp = 0;
  if (max != max) max = minus_inf<A>();  // a NaN never wins
#pragma omp simd reduction(max : max, max_w) reduction(+ : sum, sum_w)
  for (int64_t i = 0; i < half; ++i) {
    max = v[i] > max ? v[i] : max;
    max_w = w[i] > max_w ? w[i] : max_w;
    sum += v[i];
    sum_w += w[i];
  }
  max = max_w > max ? max_w : max;
  if (max > row.max) {
    row.sum_exp = rescale(row.sum_exp, row.max, max);
    row.max = max;
  }
  const A shift = exp_shift(row.max);
#pragma omp simd reduction(+ : sum_exp)
  for (int64_t i = 0; i < n; ++i) sum_exp += exp_down(v[i] - shift);
  row.sum_exp += static_cast<A>(sum_exp);
  row.sum += sum + sum_w;
}

template <typename T>
CeStats<acc_t<T>> row_stats(const T* x, int64_t n) {
  using Wide = std::conditional_t<sizeof(T) == sizeof(acc_t<T>), double, acc_t<T>>;
  constexpr int64_t kChunk = kBufferLength;
  CeStats<acc_t<T>> row = no_columns<acc_t<T>>();
  Fp32Buffer<T> buffer;
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t size = std::min(kChunk, n - start);
    add_chunk<Wide>(buffer.load(x + start, size), size, row);
  }
  return row;
}

// dx may alias x
template <typename A>
TP_MULTIVERSION void grad_loop(const A* x, A* dx, int64_t n, CeRowGrad<A> row) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = row(x[i]);
}

template <typename T>
void row_grad(const T* x, T* dx, int64_t n, CeRowGrad<acc_t<T>> row) {
  Fp32Buffer<T> from, to;
  for_each_buffer<T>(n, [&](int64_t i, int64_t m) {
    grad_loop(from.load(x + i, m), to.target(dx + i), m, row);
    to.store(dx + i, m);
  });
}

// Every rank checks every target, so that all of them raise. Without exact_size vocab_size is p
// times this rank's width: only the exchange shows whether all ranks have that width, and whether a
// target is too large.
void check_target_values(const at::Tensor& target, int64_t vocab_size, int64_t ignore_index,
                         bool exact_size) {
  const int64_t* t = in<int64_t>(target);
  const int64_t end = exact_size ? vocab_size : std::numeric_limits<int64_t>::max();
  for (int64_t i = 0; i < target.numel(); ++i) {
    TORCH_CHECK_INDEX((t[i] >= 0 && t[i] < end) || t[i] == ignore_index, "target: ", t[i],
                      " must be in [0, vocab_size), [0, ", vocab_size, "), or ignore_index, ",
                      ignore_index);
  }
}

template <typename A>
void check_shards(const A* stats, int64_t ranks, int64_t rows) {
  if (shards_agree(stats, ranks, rows)) return;
  std::vector<int64_t> widths, sizes, split;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const CeShard shard = shard_of(stats, rows, rank);
    widths.push_back(shard.width), sizes.push_back(shard.vocab_size);
    split.push_back(sizes[0] / ranks + (rank < sizes[0] % ranks));
    TORCH_CHECK_VALUE(shard.width < kCeSizes,
                      "sizes: must be the same on all ranks, and each rank must have its number of "
                      "columns, p = ",
                      ranks);
  }
  bool given = false, same = true;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    given = given || sizes[rank] != ranks * widths[rank];
    same = same && sizes[rank] == sizes[0];
  }
  TORCH_CHECK_VALUE(
      given, "vocab_size: must be given where ranks hold different numbers of columns, ",
      at::IntArrayRef(widths), "; ", std::accumulate(widths.begin(), widths.end(), int64_t{0}),
      " if none of them are padding, p = ", ranks);
  TORCH_CHECK_VALUE(same, "vocab_size: ", at::IntArrayRef(sizes),
                    " on the ranks must be the same number on all, p = ", ranks);
  TORCH_CHECK_VALUE(false, "logits_local: ", at::IntArrayRef(widths),
                    " columns on the ranks must be ", at::IntArrayRef(split),
                    ", the shards of vocab_size = ", sizes[0], " at p = ", ranks,
                    ", or equally many, at least ", split[0]);
}

struct CpuLoss {
  static void stats(const Rows& rows, const Tensor& target, const CrossEntropyArgs& args,
                    bool shard_row, bool vocab_size_given, const Tensor& stats) {
    const auto& vocab = args.vocab;
    check_target_values(target, vocab.size, args.ignore_index, vocab_size_given || !shard_row);
    dispatch_floating(rows.tensor.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
      using T = decltype(type);
      const T* x = in<T>(rows.tensor);
      const int64_t* t = in<int64_t>(target);
      auto* result = reinterpret_cast<CeStats<acc_t<T>>*>(out<acc_t<T>>(stats));
      if (shard_row) put_shard_row(&result[rows.count].max, {rows.width, vocab.size});
      at::parallel_for(0, rows.count, rows_per_thread(vocab.local),
                       [&](int64_t begin, int64_t end) {
                         for (int64_t r = begin; r < end; ++r) {
                           const T* row = x + r * rows.stride;
                           const int64_t hit = t[r] - vocab.start;
                           result[r] = row_stats(row, vocab.local);
                           if (hit >= 0 && hit < vocab.local) result[r].target = to_acc(row[hit]);
                         }
                       });
    });
  }

  static void loss(const Tensor& stats, const Tensor& target, const CrossEntropyArgs& args,
                   const Tensor& loss, const Tensor& lse) {
    const int64_t ranks = stats.size(0), count = target.numel(), rank_rows = stats.size(1);
    dispatch_floating(stats.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
      using A = acc_t<decltype(type)>;
      if (has_shard_row(stats, target)) {
        check_shards(in<A>(stats), ranks, count);
        check_target_values(target, args.vocab.size, args.ignore_index, true);
      }
      const auto* parts = reinterpret_cast<const CeStats<A>*>(in<A>(stats));
      const auto options = args.options<A>();
      for (int64_t r = 0; r < count; ++r) {
        CeStats<A> row = parts[r];
        for (int64_t rank = 1; rank < ranks; ++rank) merge(row, parts[rank * rank_rows + r]);
        const bool ignored = in<int64_t>(target)[r] == args.ignore_index;
        out<A>(loss)[r] = ignored ? A(0) : ce_loss(row, options);
        out<A>(lse)[2 * r] = row.max;
        out<A>(lse)[2 * r + 1] = log_of(row.sum_exp);
      }
    });
  }

  static void gradient(const CrossEntropyGrad& given, const Rows& x, const Rows& dx,
                       const CrossEntropyArgs& args) {
    dispatch_floating(x.tensor.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
      using T = decltype(type);
      using A = acc_t<T>;
      const auto options = args.options<A>();
      at::parallel_for(0, x.count, rows_per_thread(x.width), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const T* from = in<T>(x.tensor) + r * x.stride;
          T* to = out<T>(dx.tensor) + r * dx.stride;
          const int64_t t = in<int64_t>(given.target)[r], hit = t - args.vocab.start;
          const int64_t valid = t == args.ignore_index ? 0 : args.vocab.local;
          const CeRowGrad<A> row(in<A>(given.grad)[r], in<A>(given.lse) + 2 * r, options);
          const bool here = hit >= 0 && hit < valid;
          const A x_hit = here ? to_acc(from[hit]) : A(0);  // before the row may be overwritten
          row_grad(from, to, valid, row);
          if (here) to[hit] = from_acc<T>(row.at_target(x_hit));
          std::fill(to + valid, to + x.width, T(0));
        }
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  using Primitives = CrossEntropyPrimitives<CpuLoss>;
  m.impl("_vocab_ce_stats", Primitives::stats);
  m.impl("_vocab_ce_loss", Primitives::loss);
  m.impl("_vocab_ce_bwd", Primitives::bwd);
  m.impl("_vocab_ce_bwd_", Primitives::bwd_inplace);
}

}  // namespace tp_ext
