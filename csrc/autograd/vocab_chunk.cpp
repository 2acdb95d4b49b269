#include "autograd/vocab_chunk.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "autograd/main_grad.h"
#include "operators.h"

namespace tp_ext {

using at::Tensor;

namespace {

// An odd number of cache lines from row to row: a vocabulary is often a power of two, and rows that
// far apart compete for the same lines of a cache
int64_t stride_of(const Tensor& weight) {
  const int64_t line = 64 / weight.element_size();
  return (weight.size(0) + line - 1) / line / 2 * 2 * line + line;
}

}  // namespace

Tensor LogitsBuffer::logits(const Tensor& x) {
  if (traced_) return at::linear(x, weight_, bias_);
  const int64_t rows = x.size(0), columns = weight_.size(0);
  if (!memory_.defined() || memory_.size(0) < rows) {
    memory_ = Tensor();  // before the new one is allocated
    memory_ = x.new_empty({rows, stride_of(weight_)});
  }
  Tensor logits = memory_.narrow(0, 0, rows).narrow(1, 0, columns);
  static const auto op = TP_OP(_vocab_chunk_logits_);
  op.call(logits, x, weight_, bias_);
  return logits;
}

Tensor input_grad(const Tensor& dlogits, const Tensor& weight, bool traced) {
  static const auto op = TP_OP(_vocab_chunk_input_grad);
  return traced ? at::mm(dlogits, weight) : op.call(dlogits, weight);
}

void sum_weight_grad(Tensor& dw, const Tensor& dlogits, const Tensor& x, bool traced) {
  const auto dtype = sum_dtype(x);
  const Tensor factor = dlogits.t();
  if (traced) {
    const Tensor part = at::mm(factor, x).to(dtype);
    dw = dw.defined() ? at::add(dw, part) : part;
  } else if (x.is_cpu() || dtype == x.scalar_type()) {
    static const auto op = TP_OP(_vocab_chunk_weight_grad_);
    const bool add = dw.defined();
    if (!add) dw = at::empty({dlogits.size(1), x.size(1)}, x.options().dtype(dtype));
    op.call(dw, dlogits, x, add);
  } else {
    if (!dw.defined()) dw = at::zeros({dlogits.size(1), x.size(1)}, x.options().dtype(dtype));
    add_weight_grad(dw, dlogits, x);
  }
}

}  // namespace tp_ext
