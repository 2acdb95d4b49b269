// Pieces of a parameter of which neighbouring ranks hold copies (key and value heads when there are
// fewer than ranks). Every holder computes a part of their gradient; the sum over the holders is
// the whole one.
//
//   copy_pieces_to      forward identity                     backward reduce_pieces_from
//   reduce_pieces_from  forward each piece summed over its   backward copy_pieces_to
//                       copies, the rest as it is
//
// Rows [local_starts[i], + lengths[i]) are rows full_starts[i].. of a full tensor of full_size
// rows. One all-reduce of that tensor, zero where a rank has nothing to add, sums all pieces at
// once, needs no subgroup, and gives every holder the same bits, so that copies never drift.

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "autograd/differentiation.h"
#include "autograd/regions.h"
#include "comm/collectives.h"

namespace tp_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Pieces {
  std::vector<int64_t> local_starts, lengths, full_starts;
  int64_t full_size;
};

Tensor copy_pieces_to(const Tensor& x, const std::string& group, const Pieces& pieces);
Tensor reduce_pieces_from(const Tensor& x, const std::string& group, const Pieces& pieces);

Tensor sum_pieces(const Tensor& x, const std::string& group, const Pieces& pieces) {
  auto shape = x.sym_sizes().vec();
  shape[0] = pieces.full_size;
  Tensor full = at::zeros_symint(shape, x.options());
  for (size_t i = 0; i < pieces.lengths.size(); ++i)
    full.narrow(0, pieces.full_starts[i], pieces.lengths[i])
        .copy_(x.narrow(0, pieces.local_starts[i], pieces.lengths[i]));
  full = comm::all_reduce_fresh(full, group);
  Tensor result = x.clone(at::MemoryFormat::Contiguous);
  for (size_t i = 0; i < pieces.lengths.size(); ++i)
    result.narrow(0, pieces.local_starts[i], pieces.lengths[i])
        .copy_(full.narrow(0, pieces.full_starts[i], pieces.lengths[i]));
  return result;
}

void remember(AutogradContext* ctx, const std::string& group, const Pieces& pieces) {
  ctx->saved_data["group"] = group;
  ctx->saved_data["local_starts"] = pieces.local_starts;
  ctx->saved_data["lengths"] = pieces.lengths;
  ctx->saved_data["full_starts"] = pieces.full_starts;
  ctx->saved_data["full_size"] = pieces.full_size;
}

Pieces pieces_of(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  return {data["local_starts"].toIntVector(), data["lengths"].toIntVector(),
          data["full_starts"].toIntVector(), data["full_size"].toInt()};
}

struct CopyPieces : Function<CopyPieces> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group,
                        const Pieces& pieces) {
    remember(ctx, group, pieces);
    return x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {reduce_pieces_from(grads[0], ctx->saved_data["group"].toStringRef(), pieces_of(ctx)),
            Tensor(), Tensor()};
  }
};

struct ReducePieces : Function<ReducePieces> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& group,
                        const Pieces& pieces) {
    remember(ctx, group, pieces);
    return sum_pieces(x, group, pieces);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {copy_pieces_to(grads[0], ctx->saved_data["group"].toStringRef(), pieces_of(ctx)),
            Tensor(), Tensor()};
  }
};

Tensor on_dual_pieces(const char* op, const Tensor& x, const std::string& group,
                      const Pieces& pieces) {
  return on_dual<PiecesRegion>(op, x, group, at::IntArrayRef(pieces.local_starts),
                               at::IntArrayRef(pieces.lengths), at::IntArrayRef(pieces.full_starts),
                               pieces.full_size);
}

Tensor copy_pieces_to(const Tensor& x, const std::string& group, const Pieces& pieces) {
  if (has_tangent(x)) return on_dual_pieces("tp_ext::copy_pieces_to_region", x, group, pieces);
  return needs_graph(x) ? CopyPieces::apply(x, group, pieces) : x;
}

Tensor reduce_pieces_from(const Tensor& x, const std::string& group, const Pieces& pieces) {
  if (has_tangent(x)) return on_dual_pieces("tp_ext::reduce_pieces_from_region", x, group, pieces);
  return needs_graph(x) ? ReducePieces::apply(x, group, pieces) : sum_pieces(x, group, pieces);
}

Pieces checked(const Tensor& x, at::IntArrayRef local_starts, at::IntArrayRef lengths,
               at::IntArrayRef full_starts, int64_t full_size) {
  TORCH_CHECK_VALUE(
      x.dim() > 0 && local_starts.size() == lengths.size() && full_starts.size() == lengths.size(),
      "lengths: ", lengths, " must have one entry for each of local_starts ", local_starts,
      " and full_starts ", full_starts);
  for (size_t i = 0; i < lengths.size(); ++i)
    TORCH_CHECK_VALUE(0 <= local_starts[i] && local_starts[i] + lengths[i] <= x.sym_size(0) &&
                          0 <= full_starts[i] && full_starts[i] + lengths[i] <= full_size,
                      "lengths: piece ", i, " of ", lengths[i], " rows must lie inside the ",
                      x.sym_size(0), " local and the ", full_size, " full rows");
  return {local_starts.vec(), lengths.vec(), full_starts.vec(), full_size};
}

Tensor copy_pieces_to_region(const Tensor& x, const std::string& group,
                             at::IntArrayRef local_starts, at::IntArrayRef lengths,
                             at::IntArrayRef full_starts, int64_t full_size) {
  const auto pieces = checked(x, local_starts, lengths, full_starts, full_size);
  return comm::size(group) == 1 ? x : copy_pieces_to(x, group, pieces);
}

Tensor reduce_pieces_from_region(const Tensor& x, const std::string& group,
                                 at::IntArrayRef local_starts, at::IntArrayRef lengths,
                                 at::IntArrayRef full_starts, int64_t full_size) {
  const auto pieces = checked(x, local_starts, lengths, full_starts, full_size);
  return comm::size(group) == 1 ? x : reduce_pieces_from(x, group, pieces);
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CompositeImplicitAutograd, m) {
  impl_composite<copy_pieces_to_region>(m, "copy_pieces_to_region");
  impl_composite<reduce_pieces_from_region>(m, "reduce_pieces_from_region");
}

}  // namespace tp_ext
