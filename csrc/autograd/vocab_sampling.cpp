// The choice of tokens from logits whose columns (the vocabulary) are sharded, without gathering
// them: the same ids on all ranks and for every p. What is drawn: tp_ext/nn/sampling.py.
//
//   argmax   of each rank's columns; one all-gather of two numbers a row; of equal ones the first
//   sample   argmax of logits / temperature with Gumbel noise, a function of seed, row and id alone
//
// With the rows of the argmax travel the ranks' widths and vocabularies, as with those of the loss.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "autograd/function.h"
#include "autograd/vocab_loss.h"
#include "check.h"

namespace tp_ext {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

int64_t width_of(const Tensor& x) { return x.sym_size(-1).guard_int(__FILE__, __LINE__); }

// This rank's logits without padding, the id of the first column and the size of the vocabulary;
// `width` is what the ranks compare, and no rank has more than `widest` columns
struct Columns {
  Columns(const Tensor& logits, std::string name, const SymInt& vocab_start,
          const SymInt& vocab_local, const SymInt& vocab_size, const Sizes& sizes)
      : group(std::move(name)),
        p(comm::size(group)),
        start(vocab_start.guard_int(__FILE__, __LINE__)),
        full(vocab_size.guard_int(__FILE__, __LINE__)) {
    check_floating(logits, "logits");
    TORCH_CHECK_VALUE(logits.dim() >= 1,
                      "logits: a 0-d tensor must have a last dim, the vocabulary");
    const ColumnsOfRanks of_ranks = columns_of_ranks(sizes, vocab_size, group);
    const int64_t own = width_of(logits);
    width = compared_width(own, of_ranks, group);
    widest = of_ranks.empty() ? std::max(own, (full + p - 1) / p)
                              : *std::max_element(of_ranks.begin(), of_ranks.end());
    const int64_t local = vocab_local.guard_int(__FILE__, __LINE__);
    real = local == own ? logits : logits.narrow(-1, 0, local);
  }

  Tensor gathered(const Tensor& x) const {
    static const auto op = TP_OP(all_gather_region);
    return op.call(x, group, 0, Sizes());
  }

  // Raises on every rank unless the ranks' widths and vocabularies, [p, 2], form one vocabulary: the
  // operator that compares them for the loss is called with no rows. Returns its loss, on which a
  // traced result must depend
  Tensor compare(const Tensor& ranks) const {
    static const auto op = TP_OP(_vocab_ce_loss);
    const Tensor numbers = at::constant_pad_nd(ranks.unsqueeze(-1), {1, 0}).reshape({p, 1, 4});
    const Tensor no_target = at::empty({0}, ranks.options().dtype(at::kLong));
    return std::get<0>(op.call(numbers, no_target, full, -100, 0.0, 0.0));
  }

  std::string group;
  Tensor real;
  int64_t p, start, full, width = 0, widest = 0;
};

// The id of the largest score over all ranks. fp64 holds every id and every score exactly
Tensor argmax_over_ranks(const Tensor& scores, const Columns& columns) {
  const bool has_columns = width_of(scores) > 0;
  if (columns.p == 1 && has_columns) return scores.argmax(-1);
  auto shape = scores.sym_sizes().vec();
  shape.pop_back();
  SymInt rows = 1;
  for (const SymInt& size : shape) rows = rows * size;
  const Tensor best =
      scores.new_empty_symint({1, 2, rows + 1}, scores.options().dtype(at::kDouble));
  const Tensor best_score = best.select(1, 0), best_id = best.select(1, 1);
  best_score.fill_(columns.width);  // in the last column, as the vocabulary
  best_id.fill_(columns.full);
  const auto of_rows = [&](const Tensor& x) { return x.narrow_symint(-1, 0, rows); };
  if (has_columns) {
    const Tensor index = scores.argmax(-1, true);
    of_rows(best_score).copy_(scores.gather(-1, index).flatten());
    of_rows(best_id).copy_(index.flatten() + columns.start);
  } else {  // nothing but padding here
    of_rows(best_score).fill_(kNever);
    of_rows(best_id).fill_(columns.start);
  }
  if (columns.p == 1) return of_rows(best_id).to(at::kLong).view_symint(shape);
  const Tensor everyone = columns.gathered(best);
  const Tensor loss = columns.compare(everyone.select_symint(-1, rows));
  // Among equal scores the first rank, whose ids are lower
  const Tensor winner = of_rows(everyone.select(1, 0)).argmax(0, true);
  const Tensor ids = of_rows(everyone.select(1, 1)).gather(0, winner).to(at::kLong);
  return (comm::traced(scores) ? ids + loss.sum().to(at::kLong) : ids).view_symint(shape);
}

// The top_k largest logits of all ranks, descending, and the number of others equal to the last.
// Each rank sends its `count` largest, and how many of its others equal the smallest of those: if
// that is the last of all, these are ties that no rank has received
std::pair<Tensor, Tensor> candidates(const Columns& columns, int64_t count, int64_t top_k) {
  const Tensor wide = columns.real.to(sum_dtype(columns.real));  // for the counts
  const int64_t local = std::min(count, width_of(wide));
  const Tensor largest =
      at::constant_pad_nd(std::get<0>(wide.topk(local, -1)), {0, count - local}, kNever);
  const Tensor last = largest.narrow(-1, count - 1, 1);
  const Tensor unsent = wide.eq(last).sum(-1, true) - largest.eq(last).sum(-1, true);
  const Tensor own = at::cat({largest, unsent.to(wide.scalar_type())}, -1).unsqueeze(0);
  const Tensor everyone = columns.gathered(own);
  const Tensor values = everyone.narrow(-1, 0, count);
  const Tensor ordered =
      std::get<0>(values.movedim(0, -2).flatten(-2).sort(-1, /*descending=*/true));
  const Tensor least = ordered.narrow(-1, top_k - 1, 1);
  const Tensor hidden =
      (everyone.narrow(-1, count, 1) * values.narrow(-1, count - 1, 1).eq(least)).sum(0);
  const Tensor others = ordered.narrow(-1, top_k, columns.p * count - top_k);
  return {ordered.narrow(-1, 0, top_k), hidden + others.eq(least).sum(-1, true)};
}

// The smallest logit [.., 1] that may be drawn; undefined if all may. A threshold, unlike a set of
// ids, needs no agreement about ties
Tensor least_logit(const Columns& columns, double temperature, int64_t top_k, double top_p) {
  const Tensor& real = columns.real;
  const int64_t full = columns.full;
  if (top_k >= full && top_p == 1) return {};
  Tensor ordered, ties;
  if (top_k >= full) {
    static const auto gather = TP_OP(gather_from_region);
    const Tensor equal = at::constant_pad_nd(real, {0, columns.widest - width_of(real)}, kNever);
    ordered = std::get<0>(gather.call(equal, columns.group, -1, Sizes()).sort(-1, true))
                  .narrow(-1, 0, full);
  } else {
    std::tie(ordered, ties) = candidates(columns, std::min(top_k, columns.widest), top_k);
  }
  const int64_t end = width_of(ordered) - 1;
  if (top_p == 1) return ordered.narrow(-1, end, 1);
  // Probabilities in descending order over all ranks: the same sums for every p
  const Tensor logits = ordered.to(at::kDouble);
  const Tensor mass = ((logits - logits.narrow(-1, 0, 1)) / temperature).exp();
  const Tensor sums = mass.cumsum(-1);
  // Of all ids that top_k lets pass: of those that tie with the k-th, too
  Tensor total = sums.narrow(-1, end, 1);
  if (ties.defined()) total = total + ties * mass.narrow(-1, end, 1);
  // The first id at which the sum reaches top_p
  return ordered.gather(-1, (sums < total * top_p).sum(-1, true).clamp_max(end));
}

}  // namespace

Tensor vocab_parallel_argmax(const Tensor& logits, const std::string& group, SymInt vocab_start,
                             SymInt vocab_local, SymInt vocab_size, Sizes sizes) {
  const at::NoGradGuard no_grad;
  const Columns columns(logits, group, vocab_start, vocab_local, vocab_size, sizes);
  return argmax_over_ranks(columns.real, columns);
}

Tensor vocab_parallel_sample(const Tensor& logits, const std::string& group, SymInt vocab_start,
                             SymInt vocab_local, SymInt vocab_size, double temperature,
                             std::optional<int64_t> top_k, std::optional<double> top_p,
                             Sizes sizes) {
  using Fill = void(Tensor&, const Tensor&, double, double, int64_t, int64_t, int64_t);
  static const auto fill = find_op<Fill>("tp_ext::_philox_uniform_");
  const at::NoGradGuard no_grad;
  const Columns columns(logits, group, vocab_start, vocab_local, vocab_size, sizes);
  const Tensor& real = columns.real;
  if (temperature == 0) return argmax_over_ranks(real, columns);
  // Before the columns are joined: with other widths on a rank they would not belong together
  if (columns.p > 1 && !top_k && top_p.value_or(1) < 1) {
    const Tensor numbers = at::empty({1, 2}, real.options().dtype(at::kDouble));
    numbers.select(1, 0).fill_(columns.width);
    numbers.select(1, 1).fill_(columns.full);
    columns.compare(columns.gathered(numbers));
  }
  const Tensor least =
      least_logit(columns, temperature, top_k.value_or(columns.full), top_p.value_or(1));
  // On every rank, which keeps their generators in step
  const Tensor seed = at::randint(0, int64_t{1} << 62, {}, real.options().dtype(at::kLong));
  Tensor noise = at::empty_symint(real.sym_sizes(), real.options().dtype(at::kDouble));
  if (noise.sym_numel() > 0) {
    fill.call(noise, seed, 0.0, 1.0, width_of(real), columns.full, columns.start);
    // Gumbel noise: the argmax of the sums is a draw from the softmax, which no rank has to
    // normalise
    noise.log_().neg_().log_().neg_();
  }
  Tensor scores = noise.add_(real.to(at::kDouble) / temperature);
  if (least.defined()) scores.masked_fill_(real.lt(least), kNever);
  return argmax_over_ranks(scores, columns);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<vocab_parallel_argmax>(m, "vocab_parallel_argmax");
  impl_composite<vocab_parallel_sample>(m, "vocab_parallel_sample");
}

}  // namespace tp_ext
