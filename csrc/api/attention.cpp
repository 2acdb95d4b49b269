// The attention layer: heads of this rank between two linears.

#include "api/sharding.h"
#include "operators.h"
#include "tp_ext/nn.h"

namespace tp_ext::nn {
namespace {

// Cosine and sine of positions 0, 1, .., a row each
std::tuple<Tensor, Tensor> rope_tables(int64_t seq, int64_t head_dim, double base,
                                       const Tensor& like) {
  using Frequencies = std::optional<at::ArrayRef<double>>;
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, int64_t, double, at::ScalarType,
                                               Frequencies, double);
  static const auto op = find_op<Signature>("tp_ext::_rope_tables");
  const Tensor positions = at::arange(seq, like.options().dtype(at::kLong).requires_grad(false));
  return op.call(positions, head_dim, base, sum_dtype(like), std::nullopt, 1.0);
}

}  // namespace

ParallelAttentionImpl::ParallelAttentionImpl(ParallelAttentionOptions options_)
    : Module("ParallelAttention"), options(std::move(options_)) {
  const int64_t hidden = options.hidden_size(), heads = options.num_heads();
  TORCH_CHECK_VALUE(hidden >= 1 && heads >= 1, "num_heads: ", heads, " and hidden_size ", hidden,
                    " must be at least 1");
  TORCH_CHECK_VALUE(options.head_dim() || hidden % heads == 0, "hidden_size: ", hidden,
                    " must be a multiple of num_heads = ", heads, ", or head_dim be given");
  head_dim_ = options.head_dim().value_or(hidden / heads);
  TORCH_CHECK_VALUE(head_dim_ >= 1, "head_dim: ", head_dim_, " must be at least 1");
  TORCH_CHECK_VALUE(!options.rope() || (head_dim_ % 2 == 0 && *options.rope() > 0),
                    "rope: ", options.rope().value_or(0),
                    " must be positive, and head_dim = ", head_dim_, " even");
  const ParallelGroup& group = options.group();
  const auto [q, kv] =
      head_parts(heads, options.num_kv_heads().value_or(heads), head_dim_, group.size);
  const auto local = [&](const Part& part) {
    const auto [start, stop] = span(part, group);
    return (stop - start) / head_dim_;
  };
  heads_local_ = local(q);
  kv_heads_local_ = local(kv);
  qkv = register_module(
      "qkv", ColumnParallelLinear(ColumnParallelLinearOptions(hidden, q.size + 2 * kv.size)
                                      .bias(options.qkv_bias().value_or(options.bias()))
                                      .parts({q, kv, kv})
                                      .init(options.init())
                                      .group(group)
                                      .sequence_parallel(options.sequence_parallel())
                                      .dtype(options.dtype())
                                      .device(options.device())));
  out = register_module("out",
                        RowParallelLinear(RowParallelLinearOptions(q.size, hidden)
                                              .bias(options.out_bias().value_or(options.bias()))
                                              .parts({q})
                                              .init(options.init())
                                              .group(group)
                                              .sequence_parallel(options.sequence_parallel())
                                              .dtype(options.dtype())
                                              .device(options.device())));
}

Tensor ParallelAttentionImpl::forward(const Tensor& x, const AttentionArguments& arguments) {
  static const auto rotate = TP_OP(rope);
  static const auto attend = TP_OP(attention);
  const bool sharded = options.sequence_parallel();
  TORCH_CHECK_VALUE(
      (x.dim() == 3 && !sharded && !arguments.batch_size) || (x.dim() == 2 && arguments.batch_size),
      "x: shape ", x.sizes(), " must be ",
      sharded ? "[tokens_local, hidden] under sequence_parallel"
              : "[batch, seq, hidden], or [tokens, hidden]",
      ", the 2-D one with batch_size");
  int64_t tokens = x.dim() == 3 ? x.size(0) * x.size(1) : x.size(0);
  if (sharded) tokens = arguments.total_tokens.value_or(tokens * options.group().size);
  const int64_t batch = x.dim() == 3 ? x.size(0) : *arguments.batch_size;
  TORCH_CHECK_VALUE(batch >= 1 || x.dim() == 3, "batch_size: ", batch, " must be at least 1");
  TORCH_CHECK_VALUE(x.dim() == 3 || tokens % batch == 0, "batch_size: ", batch,
                    " must divide the number of tokens, ", tokens);
  const int64_t seq = x.dim() == 3 ? x.size(1) : tokens / batch;

  const Tensor projected = qkv->forward(x, arguments.total_tokens);
  const int64_t nq = heads_local_, nkv = kv_heads_local_;
  const Tensor heads = projected.reshape({batch, seq, nq + 2 * nkv, head_dim_});
  Tensor q, k, v;
  if (options.rope()) {  // q and k are adjacent: one call rotates both
    const auto parts = heads.split_with_sizes({nq + nkv, nkv}, -2);
    // As a view it would keep the q and k that are rotated here until backward
    v = projected.requires_grad() ? parts[1].contiguous() : parts[1];
    const auto [cos, sin] = rope_tables(seq, head_dim_, *options.rope(), projected);
    const Tensor rotated = rotate.call(parts[0], cos, sin, false, std::nullopt);
    const auto both = rotated.split_with_sizes({nq, nkv}, -2);
    q = both[0], k = both[1];
  } else {
    const auto parts = heads.split_with_sizes({nq, nkv, nkv}, -2);
    q = parts[0], k = parts[1], v = parts[2];
  }
  const Tensor y = attend.call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                               options.scale(), options.causal());
  auto shape = projected.sizes().vec();
  shape.back() = nq * head_dim_;
  return out->forward(y.transpose(1, 2).reshape(shape), arguments.total_tokens);
}

}  // namespace tp_ext::nn
