// Regions in front of sharded work for several small replicated parameters at once, so that one
// all-reduce per dtype sums their gradients instead of one per parameter.
//
//   copy_to_region_coalesced  forward identity                       backward reduce_coalesced
//   reduce_coalesced          forward the sums, as one all-reduce    backward copy_to_.. of them
//
// Each tensor is summed whole (copy_to_region), or only in the rows that other ranks hold replicas
// of (copy_replicas_to_region, see kv_replicas.cpp). `replicas` gives, tensor by tensor: 0 for the
// whole tensor, or the number of row ranges, the rows of the full tensor, and (local_start, length,
// full_start) of each range.
//
// Backward runs once all gradients are computed. A tensor without a gradient (unused, or not
// needed) is left out; the graph decides which ones, the same on all ranks.

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include "autograd/function.h"
#include "comm/collectives.h"

namespace tp_ext {
namespace {

// `replicas` of each tensor; empty: the whole tensor
using Layout = std::vector<std::vector<int64_t>>;

struct RowRange {
  int64_t local_start, length, full_start;
};
RowRange replicated_rows(const std::vector<int64_t>& replicas, int64_t i) {
  return {replicas[2 + 3 * i], replicas[3 + 3 * i], replicas[4 + 3 * i]};
}
int64_t count(const std::vector<int64_t>& replicas) { return replicas.empty() ? 0 : replicas[0]; }

std::vector<int64_t> flattened(const Layout& layout) {
  std::vector<int64_t> flat;
  for (const auto& replicas : layout) {
    if (replicas.empty()) flat.push_back(0);
    flat.insert(flat.end(), replicas.begin(), replicas.end());
  }
  return flat;
}

Layout checked_layout(at::IntArrayRef flat, size_t tensors) {
  Layout layout;
  size_t i = 0;
  while (i < flat.size()) {
    const size_t end = flat[i] == 0 ? i + 1 : i + 2 + 3 * static_cast<size_t>(flat[i]);
    TORCH_CHECK_VALUE(flat[i] >= 0 && end <= flat.size(), "replicas: ", flat,
                      " must hold three numbers for each of the ", flat[i], " row ranges at ", i);
    layout.emplace_back(flat.begin() + i + (flat[i] == 0), flat.begin() + end);
    i = end;
  }
  if (flat.empty()) layout.resize(tensors);
  TORCH_CHECK_VALUE(layout.size() == tensors, "replicas: ", flat, " must describe each of the ",
                    tensors, " tensors");
  return layout;
}

// This rank's partial of the sum for x: x, or a full tensor that holds the rows of x, 0 elsewhere
Tensor partial(const Tensor& x, const std::vector<int64_t>& replicas) {
  if (replicas.empty()) return x.reshape({-1});
  auto shape = x.sym_sizes().vec();
  shape[0] = replicas[1];
  Tensor full = at::zeros_symint(shape, x.options());
  for (int64_t i = 0; i < count(replicas); ++i) {
    const auto [local_start, length, full_start] = replicated_rows(replicas, i);
    full.narrow(0, full_start, length).copy_(x.narrow(0, local_start, length));
  }
  return full.view({-1});
}

// The gradient of x, taken from its part of the sum; a copy, since an optimizer may keep it
Tensor summed(const Tensor& x, const std::vector<int64_t>& replicas, const Tensor& sum) {
  if (replicas.empty()) return sum.view_symint(x.sym_sizes()).clone();
  auto shape = x.sym_sizes().vec();
  shape[0] = replicas[1];
  const Tensor full = sum.view_symint(shape);
  Tensor result = x.clone(at::MemoryFormat::Contiguous);
  for (int64_t i = 0; i < count(replicas); ++i) {
    const auto [local_start, length, full_start] = replicated_rows(replicas, i);
    result.narrow(0, local_start, length).copy_(full.narrow(0, full_start, length));
  }
  return result;
}

// Every x summed over the ranks, with one all-reduce per dtype (and device)
variable_list sums(const variable_list& xs, const std::string& group, const Layout& layout) {
  variable_list results(xs.size());
  for (size_t first = 0; first < xs.size(); ++first) {
    if (results[first].defined()) continue;
    variable_list partials;
    std::vector<size_t> members;
    for (size_t i = first; i < xs.size(); ++i) {
      if (xs[i].scalar_type() != xs[first].scalar_type() || xs[i].device() != xs[first].device())
        continue;
      partials.push_back(partial(xs[i], layout[i]));
      members.push_back(i);
    }
    const Tensor sum = comm::all_reduce_fresh(at::cat(partials), group);
    SymInt start = 0;
    for (size_t k = 0; k < members.size(); ++k) {
      const auto length = partials[k].sym_numel();
      const size_t i = members[k];
      results[i] = summed(xs[i], layout[i], sum.narrow_symint(0, start, length));
      start = start + length;
    }
  }
  return results;
}

variable_list copy_coalesced(const variable_list& xs, const std::string& group,
                             const Layout& layout);
variable_list reduce_coalesced(const variable_list& xs, const std::string& group,
                               const Layout& layout);

bool any_needs_graph(const variable_list& xs) {
  for (const auto& x : xs)
    if (needs_graph(x)) return true;
  return false;
}

void remember(AutogradContext* ctx, const std::string& group, const Layout& layout) {
  ctx->saved_data["group"] = group;
  ctx->saved_data["replicas"] = flattened(layout);
  ctx->set_materialize_grads(false);
}

// The conjugate region, applied to the gradients that are defined and needed
template <auto region>
variable_list conjugate(AutogradContext* ctx, const variable_list& grads) {
  const auto layout = checked_layout(ctx->saved_data["replicas"].toIntVector(), grads.size());
  variable_list there;
  Layout theirs;
  std::vector<size_t> members;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined() || !ctx->needs_input_grad(i)) continue;
    there.push_back(grads[i]);
    theirs.push_back(layout[i]);
    members.push_back(i);
  }
  const auto results = region(there, ctx->saved_data["group"].toStringRef(), theirs);
  variable_list dxs(grads.size() + 2);  // none for group and layout
  for (size_t k = 0; k < members.size(); ++k) dxs[members[k]] = results[k];
  return dxs;
}

// [Note: small sums are coalesced where parameters enter the block]
struct CopyCoalesced : Function<CopyCoalesced> {
  static variable_list forward(AutogradContext* ctx, at::TensorList xs, const std::string& group,
                               const Layout& layout) {
    remember(ctx, group, layout);
    return xs.vec();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return conjugate<reduce_coalesced>(ctx, grads);
  }
};

struct ReduceCoalesced : Function<ReduceCoalesced> {
  static variable_list forward(AutogradContext* ctx, at::TensorList xs, const std::string& group,
                               const Layout& layout) {
    remember(ctx, group, layout);
    return sums(xs.vec(), group, layout);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return conjugate<copy_coalesced>(ctx, grads);
  }
};

// Applies a region to the primals, and to the tangents that are defined
template <typename Region>
variable_list on_duals(const variable_list& xs, const Layout& layout, const Region& region) {
  variable_list primals, tangents;
  Layout theirs;
  for (size_t i = 0; i < xs.size(); ++i) {
    primals.push_back(primal_of(xs[i]));
    if (!has_tangent(xs[i])) continue;
    tangents.push_back(tangent_of(xs[i]));
    theirs.push_back(layout[i]);
  }
  auto results = region(primals, layout);
  const auto result_tangents = region(tangents, theirs);
  for (size_t i = 0, k = 0; i < xs.size(); ++i)
    if (has_tangent(xs[i])) results[i] = make_dual(results[i], result_tangents[k++]);
  return results;
}

bool any_has_tangent(const variable_list& xs) {
  for (const auto& x : xs)
    if (has_tangent(x)) return true;
  return false;
}

variable_list copy_coalesced(const variable_list& xs, const std::string& group,
                             const Layout& layout) {
  if (any_has_tangent(xs))
    return on_duals(xs, layout, [&](const variable_list& some, const Layout& theirs) {
      return copy_coalesced(some, group, theirs);
    });
  return any_needs_graph(xs) ? CopyCoalesced::apply(at::TensorList(xs), group, layout) : xs;
}

variable_list reduce_coalesced(const variable_list& xs, const std::string& group,
                               const Layout& layout) {
  if (any_has_tangent(xs))
    return on_duals(xs, layout, [&](const variable_list& some, const Layout& theirs) {
      return reduce_coalesced(some, group, theirs);
    });
  return any_needs_graph(xs) ? ReduceCoalesced::apply(at::TensorList(xs), group, layout)
                             : sums(xs, group, layout);
}

variable_list copy_to_region_coalesced(at::TensorList xs, const std::string& group,
                                       at::IntArrayRef replicas) {
  // There coalesce_gradients lets each layer sum its own parameters
  for (const auto& x : xs)
    TORCH_CHECK_NOT_IMPLEMENTED(!x.key_set().has(c10::DispatchKey::FuncTorchGradWrapper),
                                "tp_ext: copy_to_region_coalesced does not work under the "
                                "transforms of torch.func; copy_to_region does");
  const auto layout = checked_layout(replicas, xs.size());
  for (size_t k = 0; k < xs.size(); ++k) {
    for (int64_t i = 0; i < count(layout[k]); ++i) {
      const auto [local_start, length, full_start] = replicated_rows(layout[k], i);
      TORCH_CHECK_VALUE(xs[k].dim() > 0 && 0 <= length && 0 <= local_start &&
                            local_start + length <= xs[k].sym_size(0) && 0 <= full_start &&
                            full_start + length <= layout[k][1],
                        "replicas: ", length, " rows at ", local_start, " and ", full_start,
                        " must lie inside tensor ", k, " of shape ", xs[k].sym_sizes(), " and its ",
                        layout[k][1], " full rows");
    }
  }
  return comm::size(group) == 1 ? xs.vec() : copy_coalesced(xs.vec(), group, layout);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  m.impl("copy_to_region_coalesced", copy_to_region_coalesced);
}

}  // namespace tp_ext
