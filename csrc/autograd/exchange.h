// What the ranks of a linear exchange, and what its backward knows. The activations at one end of a
// linear are cut along a dim over `group`, or whole on every rank:
//
//            gather          sum             backward of gather, of sum
//   whole    -               all-reduce      sum, gather
//   cut      concatenation   reduce-scatter  sum, gather

#pragma once

#include <ATen/ops/add.h>

#include <string>

#include "autograd/call.h"
#include "comm/collectives.h"
#include "operators.h"

namespace tp_ext {

struct Exchange {
  std::string group;
  Split split{};    // lengths of dim on the ranks; empty: whole
  int64_t dim = 0;  // or -1

  auto fields() { return std::tie(group, split, dim); }
  bool cut() const { return !split.sizes.empty(); }

  comm::Pending gather_async(const Tensor& x) const {
    if (!cut()) return comm::Pending(x, nullptr);
    return comm::all_gather_async(x, group, dim_of(x), split);
  }
  Tensor gather(const Tensor& x) const {
    return cut() ? comm::all_gather(x, group, dim_of(x), split) : x;
  }
  // Of a tensor that the caller has just made
  comm::Pending sum_async(const Tensor& fresh) const {
    if (!cut()) return comm::all_reduce_async(fresh, group);
    return comm::reduce_scatter_async(fresh, group, dim_of(fresh), split);
  }
  Tensor sum(const Tensor& fresh) const {
    if (!cut()) return comm::all_reduce_fresh(fresh, group);
    return comm::reduce_scatter_fresh(fresh, group, dim_of(fresh), split);
  }

  // The same as regions, for derivatives of derivatives. Through the dispatcher, since an input may
  // belong to a level of torch.func further out
  Tensor gather_region(const Tensor& x) const {
    if (!cut()) return TP_OP(copy_to_region).call(x, group);
    return TP_OP(all_gather_region).call(x, group, dim, c10::SymIntArrayRef(split.sizes));
  }
  Tensor sum_region(const Tensor& x) const {
    if (!cut()) return TP_OP(reduce_from_region).call(x, group);
    return TP_OP(reduce_scatter_region).call(x, group, dim, c10::SymIntArrayRef(split.sizes));
  }

 private:
  int64_t dim_of(const Tensor& x) const { return dim < 0 ? x.dim() - 1 : dim; }
};

// Saved by the forward of a linear (x, weight, bias): its call, and operands
template <typename Call>
struct SavedLinear : Call {
  Tensor x, weight;
  bool wants_x, wants_w, wants_b;

  static void put(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Call& call) {
    ctx->save_for_backward(operands(x, weight));
    put_call(ctx, call);
  }
  explicit SavedLinear(AutogradContext* ctx)
      : Call(get_call<Call>(ctx)),
        wants_x(ctx->needs_input_grad(0)),
        wants_w(ctx->needs_input_grad(1)),
        wants_b(this->has_bias && ctx->needs_input_grad(2)) {
    auto saved = ctx->get_saved_variables();
    x = std::move(saved[0]), weight = std::move(saved[1]);
  }
};

// To y, a tensor that the caller has just made
inline Tensor plus_bias(const Tensor& y, const OptionalTensor& bias) {
  if (!bias.has_value()) return y;
  return comm::traced(y) ? at::add(y, *bias) : y.add_(*bias);
}

// The shape of x with n features
inline std::vector<SymInt> with_features(const Tensor& x, const SymInt& n) {
  auto shape = x.sym_sizes().vec();
  shape.back() = n;
  return shape;
}

// The ranks' tokens of x [tokens, .., n] as rows
inline Split rows_of_ranks(const Tensor& x, Split tokens) {
  for (int64_t d = 1; d < x.dim() - 1; ++d)
    for (auto& n : tokens.sizes) n = n * x.sym_size(d);
  return tokens;
}

}  // namespace tp_ext
