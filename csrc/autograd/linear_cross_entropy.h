// linear_cross_entropy chunk by chunk: its arguments, the logits of a chunk, values that come by
// chunks, and the two ways to the gradients.
//
// [Note: the loss without logits computes gradients in forward]

#pragma once

#include <ATen/ops/cat.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/function.h"
#include "autograd/token_chunks.h"
#include "autograd/vocab_chunk.h"
#include "autograd/vocab_loss.h"

namespace tp_ext {

struct LinearLoss : VocabLoss {
  std::string reduction{};
  bool entropy = false;
  Split rows_of_ranks{};  // under SP; else empty
  int64_t chunks = 1;
  OptionalTensor main_grad{};
  at::ScalarType loss_dtype = at::kFloat;

  bool sequence_parallel() const { return !rows_of_ranks.sizes.empty(); }

  auto fields() {
    return std::tuple_cat(VocabLoss::fields(), std::tie(entropy, rows_of_ranks, chunks, main_grad));
  }
};

// Values of rows that come chunk by chunk, in the order of all rows
class Collected {
 public:
  Collected(c10::SymInt rows, bool traced) : rows_(std::move(rows)), traced_(traced) {}

  void put(const Tensor& part, const TokenChunk& chunk) {
    if (traced_) return parts_.push_back(part);  // in order: one range a chunk
    if (parts_.empty()) {
      auto shape = part.sym_sizes().vec();
      shape[0] = rows_;
      parts_.push_back(part.new_empty_symint(shape));
    }
    for (size_t k = 0; k < chunk.full.size(); ++k)
      tokens_of(parts_[0], chunk.full[k]).copy_(tokens_of(part, chunk.gathered[k]));
  }
  Tensor all() const { return traced_ ? at::cat(parts_) : parts_[0]; }

 private:
  c10::SymInt rows_;
  bool traced_;
  std::vector<Tensor> parts_;
};

inline Tensor rows_in(const Tensor& all, const TokenChunk& chunk) {
  if (chunk.full.size() == 1) return tokens_of(all, chunk.full[0]);
  std::vector<Tensor> parts;
  for (const auto& range : chunk.full) parts.push_back(tokens_of(all, range));
  return at::cat(parts);
}

// The chunks of x [rows, in], this rank's rows under SP, and their logits
class LogitsChunks {
 public:
  LogitsChunks(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
               const LinearLoss& call)
      : traced(comm::traced(x)), call_(call), x_(x), weight_(weight), bias_(bias) {
    lengths_ = call.sequence_parallel() && !traced ? call.rows_of_ranks.sizes : std::vector{rows()};
    if (call.sequence_parallel() && traced)
      x_ = comm::all_gather(x, call.group, 0, call.rows_of_ranks);
  }

  const bool traced;

  c10::SymInt rows() const {
    return call_.sequence_parallel() ? call_.rows_of_ranks.total() : x_.sym_size(0);
  }

  // body(chunk, x, logits) for each; body may write to logits unless the call is traced
  template <typename Body>
  void each(const Body& body) {
    const bool gathers = lengths_.size() > 1;
    std::optional<comm::Pending> coming;
    const auto issue = [&](int64_t i) {
      if (!gathers || i >= call_.chunks) return;
      const Tensor own =
          tokens_of(x_, chunk_of(lengths_[comm::rank(call_.group)], i, call_.chunks));
      coming.emplace(comm::all_gather_async(own, call_.group, 0,
                                            TokenChunk(lengths_, i, call_.chunks).tokens));
    };
    LogitsBuffer buffer(weight_, bias_, traced);
    issue(0);
    for (int64_t i = 0; i < call_.chunks; ++i) {
      const TokenChunk chunk(lengths_, i, call_.chunks);
      const Tensor x = gathers ? coming->wait() : tokens_of(x_, chunk.full[0]);
      issue(i + 1);
      body(chunk, x, buffer.logits(x));
    }
  }

 private:
  const LinearLoss& call_;
  Tensor x_, weight_;
  OptionalTensor bias_;
  std::vector<c10::SymInt> lengths_;
};

// The mean or the sum of the losses of x [rows, in]: forward computes the gradients, backward
// scales them (linear_cross_entropy_mean.cpp)
Tensor mean_loss(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const Tensor& target, const LinearLoss& call);

// The loss of each row and, undefined if not asked for, its entropy; `graph`: backward computes the
// logits again (linear_cross_entropy_rows.cpp)
std::pair<Tensor, Tensor> row_losses(const Tensor& x, const Tensor& weight,
                                     const OptionalTensor& bias, const Tensor& target,
                                     const LinearLoss& call, bool graph);

}  // namespace tp_ext
