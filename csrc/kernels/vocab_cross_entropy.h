// Cross entropy over a sharded vocabulary: the formulas, one row at a time.
//
// With M = max x, S = sum exp(x - M) over the full vocabulary of V, lse = M + log S, t the target:
//   loss       = (1 - eps) (lse - x_t) + eps (lse - sum x / V) + z lse^2
//   d loss/d x_j = softmax_j (1 + 2 z lse) - (1 - eps) [j == t] - eps / V
// Each rank contributes four numbers per row; the softmax is never stored.
//
// lse is exchanged as the pair (M, log S): near |M| = 1000 one fp32 number would lose the digits
// that determine the loss of a confident row, and every probability.

#pragma once

#include "scalar.h"

namespace tp_ext {

// One row of one rank's columns: the layout of the exchanged tensor, [rows, 4]. No columns: (-inf,
// 0, 0, 0).
template <typename A>
struct CeStats {
  A max, sum_exp, target, sum;
};

// An extra row after those of each rank when several ranks exchange rows: the number of columns
// that the rank holds, and the size of the full vocabulary given to it. So a vocabulary sharded or
// given differently on some rank is an error on all of them. Each number is split into two halves,
// which fp32 represents exactly.
constexpr int64_t kCeHalf = int64_t{1} << 20;
// Above all numbers of columns; from it on, what stands for the sizes that a rank was given
constexpr int64_t kCeSizes = int64_t{1} << 39;

struct CeShard {
  int64_t width, vocab_size;
};

template <typename A>
TP_HD void put_shard_row(A* row, CeShard shard) {
  row[0] = static_cast<A>(shard.width / kCeHalf);
  row[1] = static_cast<A>(shard.width % kCeHalf);
  row[2] = static_cast<A>(shard.vocab_size / kCeHalf);
  row[3] = static_cast<A>(shard.vocab_size % kCeHalf);
}

// The extra row of one rank, after its `rows` others: stats [ranks, rows + 1, 4]
template <typename A>
TP_HD CeShard shard_of(const A* stats, int64_t rows, int64_t rank) {
  const A* row = stats + 4 * (rank * (rows + 1) + rows);
  return {static_cast<int64_t>(row[0]) * kCeHalf + static_cast<int64_t>(row[1]),
          static_cast<int64_t>(row[2]) * kCeHalf + static_cast<int64_t>(row[3])};
}

// Whether the ranks' columns make up one vocabulary: of one size, and either with the widths of
// torch.tensor_split or with equal ones
template <typename A>
TP_HD bool shards_agree(const A* stats, int64_t ranks, int64_t rows) {
  const CeShard first = shard_of(stats, rows, 0);
  bool split = true, equal = ranks * first.width >= first.vocab_size;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const CeShard s = shard_of(stats, rows, rank);
    if (s.vocab_size != first.vocab_size) return false;
    split = split && s.width == s.vocab_size / ranks + (rank < s.vocab_size % ranks ? 1 : 0);
    equal = equal && s.width == first.width;
  }
  return split || equal;
}

template <typename A>
TP_HD A minus_inf() {
  return static_cast<A>(-HUGE_VAL);
}

template <typename A>
TP_HD CeStats<A> no_columns() {
  return {minus_inf<A>(), A(0), A(0), A(0)};
}

// The number to subtract before exp: -inf - -inf would turn columns that are merely masked into NaN
template <typename A>
TP_HD A exp_shift(A max) {
  return max == minus_inf<A>() ? A(0) : max;
}

// sum exp(x - from) as sum exp(x - to), to >= from
template <typename A>
TP_HD A rescale(A sum_exp, A from, A to) {
  return from == to ? sum_exp : sum_exp * exp_of(from - to);
}

// A NaN never becomes the maximum; it survives in sum_exp, which every result depends on.
template <typename A>
TP_HD void merge(CeStats<A>& into, const CeStats<A>& other) {
  const A max = other.max > into.max ? other.max : into.max;
  into.sum_exp = rescale(into.sum_exp, into.max, max) + rescale(other.sum_exp, other.max, max);
  into.max = max;
  into.target += other.target;
  into.sum += other.sum;
}

TP_HD float log_of(float x) {
#ifdef __CUDA_ARCH__
  return ::logf(x);
#else
  return std::log(x);
#endif
}
TP_HD double log_of(double x) {
#ifdef __CUDA_ARCH__
  return ::log(x);
#else
  return std::log(x);
#endif
}

// The terms that the loss adds to plain cross entropy
template <typename A>
struct CeOptions {
  A label_smoothing, z_loss, vocab_size;
};

// The loss of a row from its statistics over the full vocabulary. Disabled terms are left out
// rather than multiplied by 0: with masked (-inf) logits that would be a NaN. In fp64, once per
// row, so that the loss is rounded once.
template <typename A>
TP_HD A ce_loss(const CeStats<A>& s, const CeOptions<A>& options) {
  const double max = s.max, log_sum = log_of(static_cast<double>(s.sum_exp));
  double loss = log_sum - (s.target - max);
  if (options.label_smoothing != A(0)) {
    const double smooth = log_sum - (s.sum / static_cast<double>(options.vocab_size) - max);
    loss = (1.0 - options.label_smoothing) * loss + options.label_smoothing * smooth;
  }
  if (options.z_loss != A(0)) loss += options.z_loss * (max + log_sum) * (max + log_sum);
  return static_cast<A>(loss);
}

// e^x for x <= 0 that only enters sums, or results that are rounded to a half type (kHalf): on the
// GPU two instructions, 0 below -87.3 (numbers less than 1.2e-38 would take three more), relative
// error 1.2e-7 + 9e-8 |x|, which e^x outweighs
template <bool kHalf, typename A>
TP_HD A exp_down_for(A x) {
#ifdef __CUDA_ARCH__
  if constexpr (kHalf) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
  } else {
    return exp_down(x);
  }
#else
  return exp_down(x);
#endif
}

// The constants of a row's gradient, g d loss / d x_j = scale exp((x_j - max) - log_sum) -
// everywhere - [j == t] hit. kHalf: the results are rounded to a half type
template <typename A, bool kHalf = false>
struct CeRowGrad {
  A max, log_sum, scale, everywhere, hit;

  TP_HD CeRowGrad(A g, const A* lse, const CeOptions<A>& options)
      : max(lse[0]),
        log_sum(lse[1]),
        scale(options.z_loss != A(0) ? g * (A(1) + A(2) * options.z_loss * (lse[0] + lse[1])) : g),
        everywhere(g * options.label_smoothing / options.vocab_size),
        hit(g * (A(1) - options.label_smoothing)) {}

  // The exponent is at most 0: no x is above max, and log_sum is the logarithm of at least 1
  TP_HD A operator()(A x) const { return less(x, everywhere); }
  // At the target a probability near 1 almost cancels: product and difference are rounded once
  TP_HD A at_target(A x) const { return less(x, everywhere + hit); }

 private:
  TP_HD A less(A x, A what) const {
    return scale * exp_down_for<kHalf>((x - max) - log_sum) - what;
  }
};

}  // namespace tp_ext
