// The regions: differentiable collectives in conjugate pairs. Each backward applies the conjugate
// region, as a differentiable operation, so that double backward works.
//
//   region          forward             backward
//   copy_to         identity            reduce_from
//   reduce_from     sum                 copy_to
//   scatter_to      local slice         gather_from
//   gather_from     concatenation       scatter_to
//   all_gather      concatenation       reduce_scatter
//   reduce_scatter  local slice of sum  all_gather
//   all_to_all      exchange            the inverse exchange
//
// All are linear: in forward mode the same region is applied to the tangent.
//
// The right one of the two gathers depends on the consumer of the result: replicated work (every
// rank computes the same gradient: take this rank's slice of it) or sharded work (gradients are
// partials: sum them).

#include "autograd/function.h"
#include "check.h"
#include "comm/collectives.h"
#include "operators.h"

namespace tp_ext {

namespace {

// Arguments of a region that backward needs again
void remember(AutogradContext* ctx, const std::string& group) { ctx->saved_data["group"] = group; }
void remember(AutogradContext* ctx, const std::string& group, int64_t dim, const Split& split) {
  remember(ctx, group);
  ctx->saved_data["dim"] = dim;
  ctx->saved_data["sizes"] = c10::SymIntArrayRef(split.sizes);
}
std::string group_of(AutogradContext* ctx) { return ctx->saved_data["group"].toStringRef(); }
int64_t dim_of(AutogradContext* ctx) { return ctx->saved_data["dim"].toInt(); }
std::vector<SymInt> sizes_of(AutogradContext* ctx, const char* name = "sizes") {
  return ctx->saved_data[name].toSymIntVector();
}

struct CopyTo : Function<CopyTo> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group) {
    remember(ctx, group);
    return x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({reduce_from_region(grads[0], group_of(ctx))});
  }
};

struct ReduceFrom : Function<ReduceFrom> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group) {
    remember(ctx, group);
    return comm::all_reduce(x, group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({copy_to_region(grads[0], group_of(ctx))});
  }
};

// This rank's slice of dim, a copy: a view would keep the full tensor alive and alias the input
Tensor slice(const Tensor& x, const std::string& group, int64_t dim, const Split& split) {
  comm::check_place(group);  // no collective runs here that would check it
  const int64_t rank = comm::rank(group);
  return x.narrow_symint(dim, split.start(rank), split.sizes[rank])
      .clone(at::MemoryFormat::Contiguous);
}

struct ScatterTo : Function<ScatterTo> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group,
                        int64_t dim, const Split& split) {
    remember(ctx, group, dim, split);
    return slice(x, group, dim, split);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({gather_from_region(grads[0], group_of(ctx), dim_of(ctx), sizes_of(ctx))});
  }
};

struct GatherFrom : Function<GatherFrom> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group,
                        int64_t dim, const Split& split) {
    remember(ctx, group, dim, split);
    return comm::all_gather(x, group, dim, split);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({scatter_to_region(grads[0], group_of(ctx), dim_of(ctx), sizes_of(ctx))});
  }
};

struct AllGather : Function<AllGather> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group,
                        int64_t dim, const Split& split) {
    remember(ctx, group, dim, split);
    return comm::all_gather(x, group, dim, split);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({reduce_scatter_region(grads[0], group_of(ctx), dim_of(ctx), sizes_of(ctx))});
  }
};

struct ReduceScatter : Function<ReduceScatter> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group,
                        int64_t dim, const Split& split) {
    remember(ctx, group, dim, split);
    return comm::reduce_scatter(x, group, dim, split);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({all_gather_region(grads[0], group_of(ctx), dim_of(ctx), sizes_of(ctx))});
  }
};

struct AllToAll : Function<AllToAll> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group,
                        int64_t split_dim, int64_t concat_dim, const Split& split,
                        const Split& concat) {
    remember(ctx, group, split_dim, split);
    ctx->saved_data["concat_dim"] = concat_dim;
    ctx->saved_data["concat_sizes"] = c10::SymIntArrayRef(concat.sizes);
    return comm::all_to_all(x, group, split_dim, concat_dim, split, concat);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto split = sizes_of(ctx), concat = sizes_of(ctx, "concat_sizes");
    return gradients(
        {all_to_all_region(grads[0], group_of(ctx), ctx->saved_data["concat_dim"].toInt(),
                           dim_of(ctx), concat, split)});
  }
};

}  // namespace

Tensor copy_to_region(const Tensor& x, const std::string& group) {
  if (comm::size(group) == 1 || !needs_graph(x)) return x;
  if (has_tangent(x)) return on_dual(TP_OP(copy_to_region), x, group);
  return CopyTo::apply(x, group);
}

Tensor reduce_from_region(const Tensor& x, const std::string& group) {
  if (comm::size(group) == 1) return x;
  if (has_tangent(x)) return on_dual(TP_OP(reduce_from_region), x, group);
  return needs_graph(x) ? ReduceFrom::apply(x, group) : comm::all_reduce(x, group);
}

Tensor scatter_to_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes) {
  dim = check_dim(dim, x.dim(), "dim");
  const auto split = split_full(x.sym_size(dim), comm::size(group), sizes);
  if (split.sizes.size() == 1) return x;
  if (has_tangent(x)) return on_dual(TP_OP(scatter_to_region), x, group, dim, sizes);
  return needs_graph(x) ? ScatterTo::apply(x, group, dim, split) : slice(x, group, dim, split);
}

Tensor gather_from_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes) {
  dim = check_dim(dim, x.dim(), "dim");
  const auto split = split_local(x.sym_size(dim), comm::rank(group), comm::size(group), sizes);
  if (split.sizes.size() == 1) return x;
  if (has_tangent(x)) return on_dual(TP_OP(gather_from_region), x, group, dim, sizes);
  return needs_graph(x) ? GatherFrom::apply(x, group, dim, split)
                        : comm::all_gather(x, group, dim, split);
}

Tensor all_gather_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes) {
  dim = check_dim(dim, x.dim(), "dim");
  const auto split = split_local(x.sym_size(dim), comm::rank(group), comm::size(group), sizes);
  if (split.sizes.size() == 1) return x;
  if (has_tangent(x)) return on_dual(TP_OP(all_gather_region), x, group, dim, sizes);
  return needs_graph(x) ? AllGather::apply(x, group, dim, split)
                        : comm::all_gather(x, group, dim, split);
}

Tensor reduce_scatter_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes) {
  dim = check_dim(dim, x.dim(), "dim");
  const auto split = split_full(x.sym_size(dim), comm::size(group), sizes);
  if (split.sizes.size() == 1) return x;
  if (has_tangent(x)) return on_dual(TP_OP(reduce_scatter_region), x, group, dim, sizes);
  return needs_graph(x) ? ReduceScatter::apply(x, group, dim, split)
                        : comm::reduce_scatter(x, group, dim, split);
}

Tensor all_to_all_region(const Tensor& x, const std::string& group, int64_t split_dim,
                         int64_t concat_dim, Sizes split_sizes, Sizes concat_sizes) {
  split_dim = check_dim(split_dim, x.dim(), "split_dim");
  concat_dim = check_dim(concat_dim, x.dim(), "concat_dim");
  const int64_t p = comm::size(group), rank = comm::rank(group);
  const auto split = split_full(x.sym_size(split_dim), p, split_sizes, "split_sizes");
  // With one dim, a rank keeps its slice of it; with two, all of the dim that it concatenates
  const auto own = split_dim == concat_dim ? split.sizes[rank] : x.sym_size(concat_dim);
  const auto concat = split_local(own, rank, p, concat_sizes, "concat_sizes");
  if (p == 1) return x;
  if (has_tangent(x))
    return on_dual(TP_OP(all_to_all_region), x, group, split_dim, concat_dim, split_sizes,
                   concat_sizes);
  return needs_graph(x) ? AllToAll::apply(x, group, split_dim, concat_dim, split, concat)
                        : comm::all_to_all(x, group, split_dim, concat_dim, split, concat);
}

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<copy_to_region>(m, "copy_to_region");
  impl_composite<reduce_from_region>(m, "reduce_from_region");
  impl_composite<scatter_to_region>(m, "scatter_to_region");
  impl_composite<gather_from_region>(m, "gather_from_region");
  impl_composite<all_gather_region>(m, "all_gather_region");
  impl_composite<reduce_scatter_region>(m, "reduce_scatter_region");
  impl_composite<all_to_all_region>(m, "all_to_all_region");
}

}  // namespace tp_ext
