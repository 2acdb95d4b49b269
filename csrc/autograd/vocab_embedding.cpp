// Embedding whose rows (the vocabulary) are sharded. weight [rows, h] holds the rows from
// vocab_start on; the first vocab_local of them are real, the rest padding.
//
//   forward   this rank's rows, zeros for ids of other ranks; sum over ranks: [*ids.shape, h]
//             under sequence parallelism (SP) reduce-scatter: this rank's slice of [tokens, h]
//   backward  the conjugate region, then the gradient rows of each id summed into the local weight
//
// Saved: ids. The sum has a fixed order: the same bits on every run. Linear in weight: in forward
// mode the tangent is the embedding with the tangent of weight.

#include "autograd/function.h"
#include "check.h"
#include "operators.h"

namespace tp_ext {
namespace {

Tensor lookup(const Tensor& weight, const Tensor& ids, const SymInt& vocab_start,
              const SymInt& vocab_local, const SymInt& vocab_size) {
  static const auto op = TP_OP(_vocab_embedding_fwd);
  return op.call(weight, ids, vocab_start, vocab_local, vocab_size);
}

struct Lookup : Function<Lookup> {
  static Tensor forward(AutogradContext* ctx, const Tensor& weight, const Tensor& ids,
                        const SymInt& vocab_start, const SymInt& vocab_local,
                        const SymInt& vocab_size) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({ids});
    ctx->saved_data["num_rows"] = weight.sym_size(0);
    ctx->saved_data["vocab_start"] = vocab_start;
    ctx->saved_data["vocab_local"] = vocab_local;
    return lookup(weight, ids, vocab_start, vocab_local, vocab_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("vocab_parallel_embedding", grads);
    static const auto op = TP_OP(_vocab_embedding_bwd);
    auto& data = ctx->saved_data;
    return gradients({op.call(grads[0], ctx->get_saved_variables()[0], data["num_rows"].toSymInt(),
                              data["vocab_start"].toSymInt(), data["vocab_local"].toSymInt())});
  }
};

}  // namespace

Tensor vocab_parallel_embedding(const Tensor& ids, const Tensor& weight, const std::string& group,
                                SymInt vocab_start, SymInt vocab_local, SymInt vocab_size,
                                bool sequence_parallel, Sizes sizes) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: shape ", weight.sym_sizes(),
                    " must be [rows, hidden]");
  if (has_tangent(weight)) {
    const auto embed = [&](const Tensor& w) {
      static const auto op = TP_OP(vocab_parallel_embedding);
      return op.call(ids, w, group, vocab_start, vocab_local, vocab_size, sequence_parallel, sizes);
    };
    const Tensor y = embed(primal_of(weight));
    return make_dual(y, embed(tangent_of(weight)));
  }
  const Tensor y = needs_graph(weight)
                       ? Lookup::apply(weight, ids, vocab_start, vocab_local, vocab_size)
                       : lookup(weight, ids, vocab_start, vocab_local, vocab_size);
  if (!sequence_parallel) return reduce_from_region(y, group);
  return reduce_scatter_region(y.view_symint({ids.sym_numel(), weight.sym_size(1)}), group, 0,
                               sizes);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<vocab_parallel_embedding>(m, "vocab_parallel_embedding");
}

}  // namespace tp_ext
