// Rows of a parameter that neighbouring ranks hold replicas of (key and value heads when there are
// fewer heads than ranks). Every holder computes a partial of their gradient; the gradient is the
// sum over the holders.
//
//   copy_replicas_to      forward identity                      backward reduce_replicas_from
//   reduce_replicas_from  forward replicated rows summed over   backward copy_replicas_to
//                         their holders, other rows unchanged
//
// Rows [local_starts[i], + lengths[i]) are rows full_starts[i].. of a full tensor of full_size
// rows. One all-reduce of that tensor, 0 in the rows that this rank does not hold, sums all of them
// at once, needs no subgroup, and gives every holder the same bits, so that replicas never drift.

#include <ATen/ops/zeros.h>

#include "autograd/call.h"
#include "comm/collectives.h"
#include "operators.h"

namespace tp_ext {
namespace {

struct ReplicatedRows {
  std::string group;
  std::vector<int64_t> local_starts, lengths, full_starts;
  int64_t full_size = 0;

  auto fields() { return std::tie(group, local_starts, lengths, full_starts, full_size); }
};

Tensor copy_replicas_to(const Tensor& x, const ReplicatedRows& rows);
Tensor reduce_replicas_from(const Tensor& x, const ReplicatedRows& rows);

// [Note: copied KV heads need no subgroup]
Tensor sum_replicas(const Tensor& x, const ReplicatedRows& rows) {
  auto shape = x.sym_sizes().vec();
  shape[0] = rows.full_size;
  Tensor full = at::zeros_symint(shape, x.options());
  for (size_t i = 0; i < rows.lengths.size(); ++i)
    full.narrow(0, rows.full_starts[i], rows.lengths[i])
        .copy_(x.narrow(0, rows.local_starts[i], rows.lengths[i]));
  full = comm::all_reduce_fresh(full, rows.group);
  Tensor result = x.clone(at::MemoryFormat::Contiguous);
  for (size_t i = 0; i < rows.lengths.size(); ++i)
    result.narrow(0, rows.local_starts[i], rows.lengths[i])
        .copy_(full.narrow(0, rows.full_starts[i], rows.lengths[i]));
  return result;
}

struct CopyReplicas : Function<CopyReplicas> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const ReplicatedRows& rows) {
    put_call(ctx, rows);
    return x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({reduce_replicas_from(grads[0], get_call<ReplicatedRows>(ctx))});
  }
};

struct ReduceReplicas : Function<ReduceReplicas> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const ReplicatedRows& rows) {
    put_call(ctx, rows);
    return sum_replicas(x, rows);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({copy_replicas_to(grads[0], get_call<ReplicatedRows>(ctx))});
  }
};

template <typename Operator>
Tensor on_dual_replicas(const Operator& op, const Tensor& x, const ReplicatedRows& rows) {
  return on_dual(op, x, rows.group, at::IntArrayRef(rows.local_starts),
                 at::IntArrayRef(rows.lengths), at::IntArrayRef(rows.full_starts), rows.full_size);
}

Tensor copy_replicas_to(const Tensor& x, const ReplicatedRows& rows) {
  if (has_tangent(x)) return on_dual_replicas(TP_OP(copy_replicas_to_region), x, rows);
  return needs_graph(x) ? CopyReplicas::apply(x, rows) : x;
}

Tensor reduce_replicas_from(const Tensor& x, const ReplicatedRows& rows) {
  if (has_tangent(x)) return on_dual_replicas(TP_OP(reduce_replicas_from_region), x, rows);
  return needs_graph(x) ? ReduceReplicas::apply(x, rows) : sum_replicas(x, rows);
}

ReplicatedRows checked(const Tensor& x, const std::string& group, at::IntArrayRef local_starts,
                       at::IntArrayRef lengths, at::IntArrayRef full_starts, int64_t full_size) {
  TORCH_CHECK_VALUE(
      x.dim() > 0 && local_starts.size() == lengths.size() && full_starts.size() == lengths.size(),
      "lengths: ", lengths, " must have one entry for each of local_starts ", local_starts,
      " and full_starts ", full_starts);
  for (size_t i = 0; i < lengths.size(); ++i)
    TORCH_CHECK_VALUE(0 <= local_starts[i] && local_starts[i] + lengths[i] <= x.sym_size(0) &&
                          0 <= full_starts[i] && full_starts[i] + lengths[i] <= full_size,
                      "lengths: entry ", i, " of ", lengths[i], " rows must lie inside the ",
                      x.sym_size(0), " local and the ", full_size, " full rows");
  return {group, local_starts.vec(), lengths.vec(), full_starts.vec(), full_size};
}

}  // namespace

Tensor copy_replicas_to_region(const Tensor& x, const std::string& group,
                               at::IntArrayRef local_starts, at::IntArrayRef lengths,
                               at::IntArrayRef full_starts, int64_t full_size) {
  const auto rows = checked(x, group, local_starts, lengths, full_starts, full_size);
  return comm::size(group) == 1 ? x : copy_replicas_to(x, rows);
}

Tensor reduce_replicas_from_region(const Tensor& x, const std::string& group,
                                   at::IntArrayRef local_starts, at::IntArrayRef lengths,
                                   at::IntArrayRef full_starts, int64_t full_size) {
  const auto rows = checked(x, group, local_starts, lengths, full_starts, full_size);
  return comm::size(group) == 1 ? x : reduce_replicas_from(x, rows);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<copy_replicas_to_region>(m, "copy_replicas_to_region");
  impl_composite<reduce_replicas_from_region>(m, "reduce_replicas_from_region");
}

}  // namespace tp_ext
