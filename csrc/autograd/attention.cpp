// Attention without a mask: y = softmax(scale q k^T) v, over the keys up to each query's own if
// causal. torch's, but on the CPU where a kernel of ours or another of torch's is faster:
//
//   few queries, nothing recorded, as in decoding   query_attention.h
//   fp32, where oneDNN multiplies faster            tiled_attention.h
//   half types, few keys                            that of fp32 (attention_tile.h)

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>

#include "autograd/attention_tile.h"
#include "autograd/function.h"
#include "check.h"
#include "operators.h"
#include "products.h"
#include "query_attention.h"

namespace tp_ext {
namespace {

Tile whole(const Tensor& q, const Tensor& k, bool causal) {
  Tile tile{};
  tile.queries = q.size(2), tile.keys = k.size(2), tile.diagonal = causal;
  return tile;
}

// Saves what torch's Function saves, in the type of q
struct TileAttention : Function<TileAttention> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        double scale, bool causal) {
    const Unrecorded unrecorded(q);
    TileOptions options;
    options.scale = scale;
    const auto [out, lse] = tile_forward({q, k, v}, whole(q, k, causal), options, 0, Tensor());
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["causal"] = causal;
    ctx->save_for_backward({q, k, v, out, lse});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("attention", grads);
    if (!grads[0].defined()) return gradients();
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    TileOptions options;
    options.scale = ctx->saved_data["scale"].toDouble();
    const auto tile = whole(q, k, ctx->saved_data["causal"].toBool());
    const auto [dq, dk, dv] =
        tile_backward(grads[0], {q, k, v}, {saved[3], saved[4]}, tile, options, 0, Tensor());
    const auto dtype = q.scalar_type();
    return gradients({dq.to(dtype), dk.to(dtype), dv.to(dtype)});
  }
};

// Shapes as of torch's fused kernels; torch's function says what is wrong with others
bool is_fused(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  return k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() && k.is_cpu() &&
         v.sizes() == k.sizes() && k.size(0) == q.size(0) && k.size(3) == q.size(3) &&
         q.numel() > 0 && k.numel() > 0 && q.size(1) % k.size(1) == 0 &&
         (!causal || q.size(2) == k.size(2));
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale,
                 bool causal) {
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v: shapes ", q.sym_sizes(),
                    ", ", k.sym_sizes(), ", ", v.sym_sizes(),
                    " must be of four dims: batch, heads, tokens, features");
  // torch's kernel reads past the end of a shorter v
  TORCH_CHECK_VALUE(v.sym_size(2) == k.sym_size(2), "v: ", v.sym_size(2), " tokens must be the ",
                    k.sym_size(2), " of k");
  const bool plain = !comm::traced(q) && !at::areAnyTensorSubclassLike({q, k, v}) && q.is_cpu();
  const auto factor = [&] { return scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))); };
  // Under autocast torch's function casts
  const bool cast = !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
  const bool recorded = cast || needs_graph(q) || needs_graph(k) || needs_graph(v);
  if (plain && !causal && !recorded && few_queries(q, k, v))
    return query_attention_cpu(q, k, v, factor());
  if (plain && is_fused(q, k, v, causal) &&
      (computed_in_fp32(q, k) || (!cast && !any_tangent(q, k, v) && products::attend(q, k, v))))
    return TileAttention::apply(q, k, v, factor(), causal);
  const bool grouped = q.sym_size(1) != k.sym_size(1);
  return at::scaled_dot_product_attention(q, k, v, std::nullopt, 0.0, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<attention>(m, "attention");
}

}  // namespace tp_ext
