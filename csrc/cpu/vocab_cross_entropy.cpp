// Vocab-parallel cross entropy on the CPU: a row is walked once, in chunks that stay in the L1
// cache between finding their maximum and summing their exponentials.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "cpu/half_convert.h"
#include "cpu/dispatch.h"
#include "kernels/vocab_cross_entropy.h"
#include "args/vocab.h"

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

int64_t rows_per_thread(int64_t width) { return std::max<int64_t>(1, kGrain / (width + 1)); }

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

at::Tensor stats_cpu(const at::Tensor& logits, const at::Tensor& target_any, int64_t vocab_start,
                     int64_t vocab_local, int64_t vocab_size, int64_t ignore_index, bool shard_row,
                     bool vocab_size_given) {
  check_ce_logits(logits, target_any, vocab_start, vocab_local, vocab_size);
  const at::Tensor target = target_any.contiguous();
  check_target_values(target, vocab_size, ignore_index, vocab_size_given || !shard_row);
  const Rows rows = rows_of(logits);
  const at::Tensor stats =
      at::empty({rows.count + shard_row, 4}, logits.options().dtype(ce_stats_dtype(logits)));
  dispatch_floating(logits.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
    using T = decltype(type);
    const T* x = in<T>(rows.tensor);
    const int64_t* t = in<int64_t>(target);
    auto* result = reinterpret_cast<CeStats<acc_t<T>>*>(out<acc_t<T>>(stats));
    if (shard_row) put_shard_row(&result[rows.count].max, {rows.width, vocab_size});
    at::parallel_for(0, rows.count, rows_per_thread(vocab_local), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = x + r * rows.stride;
        const int64_t hit = t[r] - vocab_start;
        result[r] = row_stats(row, vocab_local);
        if (hit >= 0 && hit < vocab_local) result[r].target = to_acc(row[hit]);
      }
    });
  });
  return stats;
}

std::tuple<at::Tensor, at::Tensor> loss_cpu(const at::Tensor& stats_any,
                                            const at::Tensor& target_any, int64_t vocab_size,
                                            int64_t ignore_index, double label_smoothing,
                                            double z_loss) {
  check_ce_stats(stats_any, target_any);
  const at::Tensor stats = stats_any.contiguous(), target = target_any.contiguous();
  const int64_t ranks = stats.size(0), count = target.numel(), rank_rows = stats.size(1);
  const at::Tensor loss = at::empty({count}, stats.options());
  const at::Tensor lse = at::empty({count, 2}, stats.options());
  dispatch_floating(stats.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
    using A = acc_t<decltype(type)>;
    if (has_shard_row(stats, target)) {
      check_shards(in<A>(stats), ranks, count);
      check_target_values(target, vocab_size, ignore_index, true);
    }
    const auto* parts = reinterpret_cast<const CeStats<A>*>(in<A>(stats));
    const CeOptions<A> options{A(label_smoothing), A(z_loss), A(vocab_size)};
    for (int64_t r = 0; r < count; ++r) {
      CeStats<A> row = parts[r];
      for (int64_t rank = 1; rank < ranks; ++rank) merge(row, parts[rank * rank_rows + r]);
      const bool ignored = in<int64_t>(target)[r] == ignore_index;
      out<A>(loss)[r] = ignored ? A(0) : ce_loss(row, options);
      out<A>(lse)[2 * r] = row.max;
      out<A>(lse)[2 * r + 1] = log_of(row.sum_exp);
    }
  });
  return {loss, lse};
}

void fill_grad(const at::Tensor& grad_any, const Rows& x, const Rows& dx,
               const at::Tensor& target_any, const at::Tensor& lse_any, int64_t vocab_start,
               int64_t vocab_local, int64_t vocab_size, int64_t ignore_index,
               double label_smoothing, double z_loss) {
  const at::Tensor grad = grad_any.contiguous(), target = target_any.contiguous(),
                   lse = lse_any.contiguous();
  dispatch_floating(x.tensor.scalar_type(), "vocab_parallel_cross_entropy", [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    const CeOptions<A> options{A(label_smoothing), A(z_loss), A(vocab_size)};
    at::parallel_for(0, x.count, rows_per_thread(x.width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* from = in<T>(x.tensor) + r * x.stride;
        T* to = out<T>(dx.tensor) + r * dx.stride;
        const int64_t t = in<int64_t>(target)[r], hit = t - vocab_start;
        const int64_t valid = t == ignore_index ? 0 : vocab_local;
        const CeRowGrad<A> row(in<A>(grad)[r], in<A>(lse) + 2 * r, options);
        const bool here = hit >= 0 && hit < valid;
        const A x_hit = here ? to_acc(from[hit]) : A(0);  // before the row may be overwritten
        row_grad(from, to, valid, row);
        if (here) to[hit] = from_acc<T>(row.at_target(x_hit));
        std::fill(to + valid, to + x.width, T(0));
      }
    });
  });
}

at::Tensor bwd_cpu(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                   const at::Tensor& lse, int64_t vocab_start, int64_t vocab_local,
                   int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                   double z_loss) {
  check_ce_logits(logits, target, vocab_start, vocab_local, vocab_size);
  check_ce_grad(grad, lse, logits, target);
  const at::Tensor dx = at::empty_like(logits, at::MemoryFormat::Contiguous);
  fill_grad(grad, rows_of(logits), rows_of(dx), target, lse, vocab_start, vocab_local, vocab_size,
            ignore_index, label_smoothing, z_loss);
  return dx;
}

void bwd_inplace_cpu(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                     const at::Tensor& lse, int64_t vocab_start, int64_t vocab_local,
                     int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                     double z_loss) {
  Rows rows;
  check_ce_writable(logits);
  if (!rows_of(logits, rows)) {  // no row structure in memory: copy
    logits.copy_(bwd_cpu(grad, logits, target, lse, vocab_start, vocab_local, vocab_size,
                         ignore_index, label_smoothing, z_loss));
    return;
  }
  check_ce_logits(logits, target, vocab_start, vocab_local, vocab_size);
  check_ce_grad(grad, lse, logits, target);
  fill_grad(grad, rows, rows, target, lse, vocab_start, vocab_local, vocab_size, ignore_index,
            label_smoothing, z_loss);
}

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_vocab_ce_stats", stats_cpu);
  m.impl("_vocab_ce_loss", loss_cpu);
  m.impl("_vocab_ce_bwd", bwd_cpu);
  m.impl("_vocab_ce_bwd_", bwd_inplace_cpu);
}

}  // namespace
}  // namespace tp_ext
