// Attention of the rows of q to the keys and values of a cache, without a mask: y = softmax(scale q
// k^T) v. A kernel of our own for a few rows on the CPU where nothing is recorded, as in decoding;
// else torch's.

#include "query_attention.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>

#include "autograd/function.h"
#include "check.h"
#include "operators.h"

namespace tp_ext {

Tensor query_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                       std::optional<double> scale) {
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v: shapes ", q.sym_sizes(),
                    ", ", k.sym_sizes(), ", ", v.sym_sizes(),
                    " must be of four dims: batch, heads, tokens, features");
  // Under autocast torch's function casts
  const bool recorded = comm::traced(q) || at::areAnyTensorSubclassLike({q, k, v}) ||
                        needs_graph(q) || needs_graph(k) || needs_graph(v) ||
                        !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
  if (recorded || !q.is_cpu() || !few_queries(q, k, v))
    return at::scaled_dot_product_attention(q, k, v, std::nullopt, 0.0, false, scale);
  TORCH_CHECK_VALUE(k.size(0) == q.size(0) && k.size(1) == q.size(1), "k: shape ", k.sizes(),
                    " must begin as that of q, ", q.sizes());
  TORCH_CHECK_VALUE(v.sizes().slice(0, 3) == k.sizes().slice(0, 3), "v: shape ", v.sizes(),
                    " must begin as that of k, ", k.sizes());
  return query_attention_cpu(q, k, v,
                             scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))));
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<query_attention>(m, "query_attention");
}

}  // namespace tp_ext
