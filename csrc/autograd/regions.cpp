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

#include "autograd/exchange.h"
#include "check.h"

namespace tp_ext {

namespace {

struct CopyTo : Function<CopyTo> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group) {
    ctx->saved_data["group"] = group;
    return x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({reduce_from_region(grads[0], ctx->saved_data["group"].toStringRef())});
  }
};

struct ReduceFrom : Function<ReduceFrom> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group) {
    ctx->saved_data["group"] = group;
    return comm::all_reduce(x, group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return gradients({copy_to_region(grads[0], ctx->saved_data["group"].toStringRef())});
  }
};

// This rank's slice of dim, a copy: a view would keep the full tensor alive and alias the input
Tensor slice(const Tensor& x, const std::string& group, int64_t dim, const Split& split) {
  comm::check_place(group);  // no collective runs here that would check it
  const int64_t rank = comm::rank(group);
  return x.narrow_symint(dim, split.start(rank), split.sizes[rank])
      .clone(at::MemoryFormat::Contiguous);
}

// A region of a tensor that is cut along a dim, by a function of comm/
template <auto forward_of, auto conjugate>
struct CutRegion : Function<CutRegion<forward_of, conjugate>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Exchange& of) {
    put_call(ctx, of);
    return forward_of(x, of.group, of.dim, of.split);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [group, split, dim] = get_call<Exchange>(ctx);
    return gradients({conjugate(grads[0], group, dim, split.sizes)});
  }
};

// `whole`: x is, and the result is cut
template <auto forward_of, auto conjugate, typename Find>
Tensor cut_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes, bool whole,
                  const Find& find_operator) {
  dim = check_dim(dim, x.dim(), "dim");
  const auto n = x.sym_size(dim);
  const int64_t p = comm::size(group);
  const auto split = whole ? split_full(n, p, sizes) : split_local(n, comm::rank(group), p, sizes);
  if (p == 1) return x;
  if (has_tangent(x)) return on_dual(find_operator(), x, group, dim, sizes);
  return needs_graph(x) ? CutRegion<forward_of, conjugate>::apply(x, Exchange{group, split, dim})
                        : forward_of(x, group, dim, split);
}

struct AllToAllDims {
  std::string group;
  int64_t split_dim = 0, concat_dim = 0;
  Split split, concat;

  auto fields() { return std::tie(group, split_dim, concat_dim, split, concat); }
};

struct AllToAll : Function<AllToAll> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const AllToAllDims& c) {
    put_call(ctx, c);
    return comm::all_to_all(x, c.group, c.split_dim, c.concat_dim, c.split, c.concat);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto c = get_call<AllToAllDims>(ctx);
    return gradients({all_to_all_region(grads[0], c.group, c.concat_dim, c.split_dim,
                                        c.concat.sizes, c.split.sizes)});
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
  return cut_region<slice, gather_from_region>(x, group, dim, sizes, true,
                                               [] { return TP_OP(scatter_to_region); });
}
Tensor gather_from_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes) {
  return cut_region<comm::all_gather, scatter_to_region>(x, group, dim, sizes, false,
                                                         [] { return TP_OP(gather_from_region); });
}
Tensor all_gather_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes) {
  return cut_region<comm::all_gather, reduce_scatter_region>(
      x, group, dim, sizes, false, [] { return TP_OP(all_gather_region); });
}
Tensor reduce_scatter_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes) {
  return cut_region<comm::reduce_scatter, all_gather_region>(
      x, group, dim, sizes, true, [] { return TP_OP(reduce_scatter_region); });
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
  return needs_graph(x)
             ? AllToAll::apply(x, AllToAllDims{group, split_dim, concat_dim, split, concat})
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
