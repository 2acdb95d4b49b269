// The loss of logits whose columns (the vocabulary) are sharded: the arguments and the steps that
// vocab_cross_entropy.cpp and linear_cross_entropy.cpp share. Formulas:
// kernels/vocab_cross_entropy.h.

#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/stack.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "args/vocab_cross_entropy.h"
#include "autograd/call.h"
#include "check.h"
#include "comm/collectives.h"
#include "comm/tree_sum.h"
#include "operators.h"

namespace tp_ext {

// The ranks' numbers of columns where the caller gave them; empty: as vocab_columns
using ColumnsOfRanks = std::vector<int64_t>;

inline ColumnsOfRanks columns_of_ranks(const Sizes& sizes, const SymInt& vocab_size,
                                       const std::string& group) {
  ColumnsOfRanks columns;
  if (sizes.has_value())
    for (const SymInt& size : split_full(vocab_size, comm::size(group), sizes).sizes)
      columns.push_back(size.guard_int(__FILE__, __LINE__));
  return columns;
}

// What the ranks compare: this one's number of columns, or a number of the list that it was given,
// which differs from rank to rank where the columns are not those of the list
inline int64_t compared_width(int64_t width, const ColumnsOfRanks& sizes,
                              const std::string& group) {
  constexpr int64_t kFactor = 1000003, kModulus = 2147483647;
  if (sizes.empty()) return width;
  const int64_t rank = comm::rank(group);
  if (sizes[static_cast<size_t>(rank)] != width) return kCeSizes + kModulus + rank;
  int64_t number = 0;
  for (const int64_t size : sizes) number = (number * kFactor + size + 1) % kModulus;
  return kCeSizes + number;
}

struct VocabLoss {
  std::string group;
  c10::SymInt vocab_start, vocab_local, vocab_size;
  bool vocab_size_given = true;
  int64_t ignore_index = -100;
  double label_smoothing = 0, z_loss = 0;
  // The ranks' numbers of blocks of tp_invariant, each with statistics of its own; empty: one part
  // per rank
  comm::BlocksOfRanks blocks = {};
  ColumnsOfRanks sizes = {};

  void check(const std::string& reduction) const {
    TORCH_CHECK_VALUE(reduction == "none" || reduction == "mean" || reduction == "sum",
                      "reduction: '", reduction, "' must be 'none', 'mean' or 'sum'");
    TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1,
                      "label_smoothing: ", label_smoothing, " must be in [0, 1]");
    TORCH_CHECK_VALUE(z_loss >= 0, "z_loss: ", z_loss, " must be at least 0");
  }

  auto fields() {
    return std::tie(group, vocab_start, vocab_local, vocab_size, ignore_index, label_smoothing,
                    z_loss);
  }

  // Four numbers of each row over the local columns. With several ranks an extra row holds each
  // rank's width and vocabulary: no rank can check those alone, so _vocab_ce_loss does, once all
  // rows are gathered.
  Tensor stats(const Tensor& logits, const Tensor& target) const {
    static const auto op = TP_OP(_vocab_ce_stats);
    if (!blocks.empty()) {  // [blocks of this rank, rows, 4]
      const auto own = comm::blocks_of(blocks, comm::rank(group));
      const auto part = [&](const SymInt& begin, const SymInt& length) {
        return op.call(logits.narrow_symint(-1, begin - vocab_start, length), target, begin, length,
                       vocab_size, ignore_index, false, true);
      };
      if (own.count == 0) return part(vocab_start, 0).unsqueeze(0).narrow(0, 0, 0);
      std::vector<Tensor> parts;
      for (int64_t b = own.first; b < own.first + own.count; ++b) {
        const auto begin = comm::block_start(vocab_size, b, own.number);
        parts.push_back(part(begin, comm::block_start(vocab_size, b + 1, own.number) - begin));
      }
      return at::stack(parts);
    }
    const bool compares = comm::size(group) > 1;
    const Tensor own = op.call(logits, target, vocab_start, vocab_local, vocab_size, ignore_index,
                               compares && sizes.empty(), vocab_size_given);
    if (!compares || sizes.empty()) return own;
    const int64_t width = logits.sym_size(-1).guard_int(__FILE__, __LINE__);
    std::array<double, 4> numbers{};
    put_shard_row(numbers.data(),
                  {compared_width(width, sizes, group), vocab_size.guard_int(__FILE__, __LINE__)});
    const Tensor shard = at::empty({1, 4}, own.options());
    for (size_t i = 0; i < numbers.size(); ++i)
      shard.select(1, static_cast<int64_t>(i)).fill_(numbers[i]);
    return at::cat({own, shard});
  }

  // The loss of each row, and its lse for backward, from the ranks' statistics
  std::tuple<Tensor, Tensor> rows(const Tensor& stats, const Tensor& target) const {
    static const auto op = TP_OP(_vocab_ce_loss);
    // Merged in the order of the parts, which are ranks or blocks
    const int64_t p = comm::size(group);
    const Tensor all =
        blocks.empty() ? comm::all_gather_stack(stats, group)
        : p == 1       ? stats
                       : comm::all_gather(stats, group, 0, Split{{blocks.begin(), blocks.end()}});
    return op.call(all, target, vocab_size, ignore_index, label_smoothing, z_loss);
  }

  // The gradient of the logits, given that of each row's loss
  Tensor backward(const Tensor& grad, const Tensor& logits, const Tensor& target,
                  const Tensor& lse) const {
    static const auto op = TP_OP(_vocab_ce_bwd);
    return op.call(grad, logits, target, lse, vocab_start, vocab_local, vocab_size, ignore_index,
                   label_smoothing, z_loss);
  }
  // The same in the place of the logits
  void backward_(const Tensor& grad, const Tensor& logits, const Tensor& target,
                 const Tensor& lse) const {
    static const auto op = TP_OP(_vocab_ce_bwd_);
    op.call(grad, logits, target, lse, vocab_start, vocab_local, vocab_size, ignore_index,
            label_smoothing, z_loss);
  }

  // The number of rows that the mean is over; 1 if there is none, so that the mean is the sum, 0
  Tensor counted_rows(const Tensor& target) const {
    return target.ne(ignore_index).sum().clamp_min(1);
  }
};

// Below the dispatcher's autograd layers `to` may return its argument, which operators must not
inline Tensor cast(const Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype ? x : x.to(dtype);
}

}  // namespace tp_ext
