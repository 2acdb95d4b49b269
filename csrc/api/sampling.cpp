// The choice of tokens from logits with a sharded vocabulary, as tp_ext/nn/sampling.py has it.

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "api/sharding.h"
#include "operators.h"
#include "tp_ext/functions.h"

namespace tp_ext {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

// This rank's columns: their number with padding, the id of the first, and the whole vocabulary
struct Columns {
  Tensor real;
  int64_t width, start, full;
};

Columns columns_of(const Tensor& logits, const ParallelGroup& group,
                   const std::optional<int64_t>& vocab_size) {
  TORCH_CHECK_TYPE(at::isFloatingType(logits.scalar_type()), "logits: dtype ", logits.scalar_type(),
                   " must be a floating point type");
  TORCH_CHECK_VALUE(logits.dim() > 0, "logits: a 0-d tensor must have a last dim, the vocabulary");
  const int64_t width = logits.size(-1);
  const auto vocab = nn::vocab_columns(width, vocab_size, group);
  return {logits.narrow(-1, 0, vocab.local), width, vocab.start, vocab.full};
}

Tensor gathered(const Tensor& x, const ParallelGroup& group) {
  return all_gather_region(x, group.name, 0, Sizes());
}

// Raises on every rank unless the ranks' widths and vocabularies, [p, 2], form one vocabulary: the
// operator that compares them for the loss is called with no rows
void check_vocabulary(const Tensor& ranks, int64_t full) {
  static const auto op = TP_OP(_vocab_ce_loss);
  const Tensor numbers = at::zeros({ranks.size(0), 1, 4}, ranks.options());
  numbers.select(1, 0).slice(-1, 1, 4, 2).copy_(ranks);
  op.call(numbers, at::empty({0}, ranks.options().dtype(at::kLong)), full, -100, 0.0, 0.0);
}

Tensor argmax_over_ranks(const Tensor& scores, const Columns& columns, const ParallelGroup& group) {
  if (group.size == 1) return scores.argmax(-1);
  int64_t rows = 1;
  for (const int64_t n : scores.sizes().slice(0, static_cast<size_t>(scores.dim() - 1))) rows *= n;
  const Tensor best = at::empty({2, rows + 1}, scores.options().dtype(at::kDouble));
  best[0].narrow(0, rows, 1).fill_(static_cast<double>(columns.width));
  best[1].narrow(0, rows, 1).fill_(static_cast<double>(columns.full));
  if (scores.size(-1) > 0) {
    const Tensor index = scores.argmax(-1, true);
    best[0].narrow(0, 0, rows).copy_(scores.gather(-1, index).flatten());
    best[1].narrow(0, 0, rows).copy_(index.flatten() + columns.start);
  } else {
    best[0].narrow(0, 0, rows).fill_(kNever);
    best[1].narrow(0, 0, rows).fill_(static_cast<double>(columns.start));
  }
  const Tensor everyone = gathered(best.unsqueeze(0), group);
  check_vocabulary(everyone.select(-1, rows), columns.full);
  const Tensor values = everyone.select(1, 0).narrow(-1, 0, rows);
  const Tensor ids = everyone.select(1, 1).narrow(-1, 0, rows);
  // Among equal scores the first rank, whose ids are lower
  const Tensor winner = values.argmax(0);
  auto shape = scores.sizes().vec();
  shape.pop_back();
  return ids.gather(0, winner.unsqueeze(0))[0].to(at::kLong).view(shape);
}

// The top_k largest logits of all ranks, descending, and the number of others equal to the last.
// Each rank sends its `count` largest, and how many of its others equal the smallest of those
std::pair<Tensor, Tensor> candidates(const Tensor& real, int64_t count, int64_t top_k,
                                     const ParallelGroup& group) {
  const Tensor wide = real.to(real.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  Tensor largest = std::get<0>(wide.topk(std::min(count, wide.size(-1)), -1));
  largest = at::constant_pad_nd(largest, {0, count - largest.size(-1)}, kNever);
  const Tensor last = largest.narrow(-1, count - 1, 1);
  const Tensor unsent = wide.eq(last).sum(-1, true) - largest.eq(last).sum(-1, true);
  const Tensor own = at::cat({largest, unsent.to(wide.scalar_type())}, -1).unsqueeze(0);
  const Tensor everyone = gathered(own, group);
  const Tensor values = everyone.narrow(-1, 0, count);
  const Tensor ordered =
      std::get<0>(values.movedim(0, -2).flatten(-2).sort(-1, /*descending=*/true));
  const Tensor least = ordered.narrow(-1, top_k - 1, 1);
  const Tensor hidden =
      (everyone.narrow(-1, count, 1) * values.narrow(-1, count - 1, 1).eq(least)).sum(0);
  const Tensor others = ordered.narrow(-1, top_k, ordered.size(-1) - top_k);
  return {ordered.narrow(-1, 0, top_k), hidden + others.eq(least).sum(-1, true)};
}

// The smallest logit that may be drawn; undefined if all may. A threshold needs no agreement about
// ties
Tensor least_logit(const Columns& columns, const ParallelGroup& group,
                   const SampleOptions& options) {
  const int64_t full = columns.full;
  const int64_t top_k = std::min(options.top_k.value_or(full), full);
  const bool whole_mass = !options.top_p || *options.top_p == 1;
  if (top_k == full && whole_mass) return {};
  const int64_t widest = std::max(columns.width, nn::split_sizes(full, group.size)[0].expect_int());
  Tensor ordered, ties = at::zeros({1}, columns.real.options().dtype(at::kDouble));
  if (top_k == full) {
    const Tensor equal =
        at::constant_pad_nd(columns.real, {0, widest - columns.real.size(-1)}, kNever);
    ordered = std::get<0>(gather_from_region(equal, group.name, -1, Sizes()).sort(-1, true))
                  .narrow(-1, 0, full);
  } else {
    std::tie(ordered, ties) = candidates(columns.real, std::min(top_k, widest), top_k, group);
  }
  if (whole_mass) return ordered.narrow(-1, ordered.size(-1) - 1, 1);
  // Probabilities in descending order over all ranks: the same sums for every p
  const Tensor mass =
      ((ordered.to(at::kDouble) - ordered.narrow(-1, 0, 1).to(at::kDouble)) / options.temperature)
          .exp();
  const Tensor sums = mass.cumsum(-1);
  const int64_t end = sums.size(-1) - 1;
  const Tensor total = sums.narrow(-1, end, 1) + ties * mass.narrow(-1, end, 1);
  const Tensor enough = (sums < total * *options.top_p).sum(-1, true).clamp_max(end);
  return ordered.gather(-1, enough);
}

}  // namespace

Tensor vocab_parallel_argmax(const Tensor& logits, const ParallelGroup& group,
                             const SampleOptions& options) {
  const at::NoGradGuard no_grad;
  const Columns columns = columns_of(logits, group, options.vocab_size);
  return argmax_over_ranks(columns.real, columns, group);
}

Tensor vocab_parallel_sample(const Tensor& logits, const ParallelGroup& group,
                             const SampleOptions& options) {
  using Fill = void(Tensor&, const Tensor&, double, double, int64_t, int64_t, int64_t);
  static const auto fill = find_op<Fill>("tp_ext::_philox_uniform_");
  const at::NoGradGuard no_grad;
  const Columns columns = columns_of(logits, group, options.vocab_size);
  const double temperature = options.temperature;
  TORCH_CHECK_VALUE(std::isfinite(temperature) && temperature >= 0, "temperature: ", temperature,
                    " must be finite and at least 0");
  TORCH_CHECK_VALUE(!options.top_k || *options.top_k >= 1, "top_k: ", options.top_k.value_or(0),
                    " must be at least 1");
  TORCH_CHECK_VALUE(!options.top_p || (*options.top_p > 0 && *options.top_p <= 1),
                    "top_p: ", options.top_p.value_or(0), " must be in (0, 1]");
  const Tensor& real = columns.real;
  if (temperature == 0) return argmax_over_ranks(real, columns, group);
  // Before the columns are joined: with other widths on a rank they would not belong together
  if (group.size > 1 && !options.top_k && options.top_p && *options.top_p < 1) {
    const Tensor numbers = at::empty({1, 2}, real.options().dtype(at::kDouble));
    numbers.select(1, 0).fill_(static_cast<double>(columns.width));
    numbers.select(1, 1).fill_(static_cast<double>(columns.full));
    check_vocabulary(gathered(numbers, group), columns.full);
  }
  const Tensor least = least_logit(columns, group, options);
  // Of each rank's own generator: the ranks choose one id together, whatever they draw
  const Tensor seed = nn::draw_seed(real.device(), {});
  Tensor noise = at::empty(real.sizes(), real.options().dtype(at::kDouble));
  if (noise.numel() > 0) {
    fill.call(noise, seed, 0.0, 1.0, real.size(-1), columns.full, columns.start);
    // Gumbel noise: the argmax of the sums is a draw from the softmax
    noise.log_().neg_().log_().neg_();
  }
  Tensor scores = noise.add_(real.to(at::kDouble) / temperature);
  if (least.defined()) scores.masked_fill_(real.lt(least), kNever);
  return argmax_over_ranks(scores, columns, group);
}

}  // namespace tp_ext
