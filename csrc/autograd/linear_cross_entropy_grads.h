// The gradients of linear_cross_entropy, chunk by chunk of tokens.

#pragma once

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>

#include <optional>
#include <vector>

#include "autograd/linear_cross_entropy.h"
#include "autograd/main_grad.h"

namespace tp_ext {

// The gradients of x, weight and bias as sums over chunks; the sum over ranks of a chunk's dx
// overlaps the GEMM of its dw and the next logits
class LinearLossGrads {
 public:
  Tensor dx, dw, db;

  LinearLossGrads(const Tensor& x, const Tensor& weight, const LinearLoss& call, bool traced,
                  bool wants_x, bool wants_w, bool wants_b, const OptionalTensor& main_grad)
      : call_(call),
        x_(x),
        weight_(weight),
        traced_(traced),
        wants_x_(wants_x),
        wants_w_(wants_w),
        wants_b_(wants_b),
        main_grad_(main_grad) {}

  void add(const TokenChunk& chunk, const Tensor& x, const Tensor& dlogits) {
    if (pending_) take();  // before input_grad takes memory
    if (wants_x_) add_x(chunk, input_grad(dlogits, weight_, traced_));
    if (wants_w_) {
      if (main_grad_.has_value())
        add_weight_grad(*main_grad_, dlogits, x);
      else
        sum_weight_grad(dw, dlogits, x, traced_);
    }
    if (wants_b_) {
      const Tensor part = dlogits.sum(0, false, sum_dtype(dlogits));
      db = db.defined() ? at::add(db, part) : part;
    }
  }

  void finish() {
    if (pending_) take();
    if (!traced_ || !wants_x_) return;
    dx = at::cat(parts_);
    dx = call_.sequence_parallel() ? comm::reduce_scatter(dx, call_.group, 0, call_.rows_of_ranks)
                                   : comm::all_reduce_fresh(dx, call_.group);
  }

 private:
  void add_x(const TokenChunk& chunk, const Tensor& part) {
    if (traced_) return parts_.push_back(part);
    pending_.emplace(call_.sequence_parallel()
                         ? comm::reduce_scatter_async(part, call_.group, 0, chunk.tokens)
                         : comm::all_reduce_async(part, call_.group));
    to_ =
        call_.sequence_parallel() ? chunk_of(x_.sym_size(0), taken_, call_.chunks) : chunk.full[0];
    ++taken_;
  }
  void take() {
    const Tensor part = pending_->wait();
    pending_.reset();
    if (!dx.defined()) dx = x_.new_empty_symint(x_.sym_sizes());
    tokens_of(dx, to_).copy_(part);
  }

  const LinearLoss& call_;
  const Tensor &x_, &weight_;
  const bool traced_, wants_x_, wants_w_, wants_b_;
  const OptionalTensor main_grad_;
  std::vector<Tensor> parts_;
  std::optional<comm::Pending> pending_;
  Range to_;
  int64_t taken_ = 0;
};

}  // namespace tp_ext
