// The tensor-parallel linears of tp_ext.tp_invariant: the same bits for every number of ranks. As
// linear.cpp, but
//
//   - a product that the sharded dim enters is computed block by block, so that its shape does not
//     depend on the number of ranks, each on one thread;
//   - a sum over the ranks is the tree over the blocks (comm/tree_sum.h), also on one rank;
//   - a row of y does not depend on the number of rows [Note: rows that depend on themselves].
//
// With b a block, [seg] its columns or rows on this rank (one segment per part: q, k, v), T the
// tree, and [..] what sequence parallelism adds:
//
//        column                                     row
//   y    y[seg] = [gather x] w[seg]^T + b[seg]      T over b of x[seg] w[seg]^T, [local rows], + b
//   dx   T over b of dy[seg] w[seg], [local rows]   dx[seg] = [gather dy] w[seg]
//   dw   dw[seg] = dy[seg]^T [gather x]             dw[seg] = [gather dy]^T x[seg]
//   db   sum over rows of dy                        T over blocks of tokens of dy
//
// Column backward: the exchange of dx overlaps the products of dw. Saved: as linear.cpp.

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "autograd/autocast.h"
#include "autograd/blocks.h"
#include "autograd/exchange.h"
#include "autograd/linear_checks.h"
#include "autograd/linear_overlap.h"
#include "operators.h"

namespace tp_ext {
namespace {

constexpr const char* kBlockLinear = "a linear built in tp_ext.tp_invariant";

struct BlockCall {
  Exchange tokens;  // cut under SP
  comm::BlocksOfRanks blocks;
  std::vector<int64_t> flat;  // segments
  bool has_bias = false;

  auto fields() { return std::tuple_cat(tokens.fields(), std::tie(blocks, flat, has_bias)); }
};
using SavedBlocks = SavedLinear<BlockCall>;

Tensor row_major_rows(const Tensor& x) { return row_major(as_rows(x)); }

Tensor columns(const Tensor& x, const Segment& s) { return x.narrow(1, s.start, s.length); }

// A matrix whose slices along dim are made by `multiply(segment, out)`, which writes to `out`, or
// returns a new tensor where `out` is undefined
template <typename F>
Tensor by_segments(const Tensor& like, at::IntArrayRef shape, int64_t dim,
                   const std::vector<Segment>& segments, const F& multiply) {
  const auto n = static_cast<int64_t>(segments.size());
  if (comm::traced(like) && n > 0) {  // recorded tensors must not be written
    std::vector<Tensor> slices;
    for (const auto& s : segments) slices.push_back(multiply(s, Tensor()));
    return at::cat(slices, dim);
  }
  const Tensor result = at::empty(shape, like.options());
  for_each_block(like, n, [&](int64_t i) {
    if (segments[i].length == 0) return;
    multiply(segments[i], result.narrow(dim, segments[i].start, segments[i].length));
  });
  return result;
}

Tensor product(const Tensor& a, const Tensor& b, Tensor out) {
  return out.defined() ? at::mm_out(out, a, b) : at::mm(a, b);
}

// x with zero rows up to whole groups of them, and the result without them. Traced calls do
// without: the number of rows may be symbolic
Tensor in_whole_rows(const Tensor& x) {
  if (comm::traced(x)) return x;
  const int64_t extra = whole_rows(x.size(0)) - x.size(0);
  return extra == 0 ? x : at::constant_pad_nd(x, {0, 0, 0, extra});
}
Tensor without_extra(const Tensor& y, const Tensor& rows) {
  return y.sym_size(0) == rows.sym_size(0) ? y : y.narrow_symint(0, 0, rows.sym_size(0));
}

// The tree over multiply(segment), [rows of `like`, columns], of the segments of each block
template <typename F>
comm::TreeSum tree_of_products(const Tensor& like, const SymInt& columns, const BlockCall& call,
                               const F& multiply) {
  const auto segments = segments_of(call.flat);
  const auto blocks = own_blocks(call.blocks, call.tokens.group);
  const Tensor none = like.new_empty_symint({0, like.sym_size(0), columns});
  return sum_of_blocks(like, blocks, none, [&](int64_t i) {
    Tensor leaf;
    // Of several parts the products are added in the dtype of the nodes
    for (const auto& s : segments) {
      if (s.block != blocks.first + i || s.length == 0) continue;
      const Tensor term = multiply(s);
      leaf =
          leaf.defined() ? leaf.to(comm::node_dtype(leaf)) + term.to(comm::node_dtype(term)) : term;
    }
    if (!leaf.defined()) return at::zeros_symint({like.sym_size(0), columns}, like.options());
    return leaf;
  });
}

struct BlockColumnLinear : Function<BlockColumnLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const BlockCall& call) {
    SavedBlocks::put(ctx, x, weight, call);
    const Unrecorded guard(x);
    const Tensor full = call.tokens.gather(x);
    const Tensor tokens = row_major_rows(full), rows = in_whole_rows(tokens);
    const Tensor y =
        by_segments(rows, {rows.size(0), weight.size(0)}, 1, segments_of(call.flat),
                    [&](const Segment& s, Tensor out) {
                      const Tensor w = weight.narrow(0, s.start, s.length).t();
                      if (!bias.has_value()) return product(rows, w, std::move(out));
                      const Tensor b = bias->narrow(0, s.start, s.length);
                      return out.defined() ? at::addmm_out(out, b, rows, w) : at::addmm(b, rows, w);
                    });
    return without_extra(y, tokens).view_symint(with_features(full, weight.sym_size(0)));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kBlockLinear, grads);
    const SavedBlocks s(ctx);
    const Unrecorded guard(grads[0]);
    const Tensor& dy = grads[0];
    const Tensor rows = row_major_rows(dy);
    const auto segments = segments_of(s.flat);
    std::optional<comm::Pending> x_full;
    std::optional<comm::TreeSum::Pending> dx;
    if (s.wants_w) x_full.emplace(s.tokens.gather_async(s.x));
    if (s.wants_x) {
      auto tree = tree_of_products(rows, s.weight.sym_size(1), s, [&](const Segment& segment) {
        return at::mm(columns(rows, segment), s.weight.narrow(0, segment.start, segment.length));
      });
      dx.emplace(s.tokens.cut()
                     ? std::move(tree).reduce_scatter_async(
                           s.tokens.group, rows_of_ranks(dy, s.tokens.split), dy.scalar_type())
                     : std::move(tree).all_reduce_async(s.tokens.group, dy.scalar_type()));
    }
    // After issuing the exchange, which they overlap
    const Tensor db = s.wants_b ? column_sums(rows, segments).to(dy.scalar_type()) : Tensor();
    Tensor dw;
    if (s.wants_w) {
      const Tensor x = row_major_rows(x_full->wait());
      dw = by_segments(rows, {rows.size(1), x.size(1)}, 0, segments,
                       [&](const Segment& segment, Tensor out) {
                         return product(columns(rows, segment).t(), x, std::move(out));
                       });
    }
    Tensor grad;
    if (dx) {
      auto shape = with_features(dy, s.weight.sym_size(1));
      if (s.tokens.cut()) shape[0] = s.tokens.split.sizes[comm::rank(s.tokens.group)];
      grad = dx->wait().view_symint(shape);
    }
    return gradients({grad, dw, db});
  }
};

struct BlockRowLinear : Function<BlockRowLinear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const BlockCall& call) {
    SavedBlocks::put(ctx, x, weight, call);
    const Unrecorded guard(x);
    const Tensor tokens = row_major_rows(x), rows = in_whole_rows(tokens);
    auto tree = tree_of_products(tokens, weight.sym_size(0), call, [&](const Segment& s) {
      return without_extra(at::mm(columns(rows, s), columns(weight, s).t()), tokens);
    });
    auto shape = with_features(x, weight.sym_size(0));
    if (call.tokens.cut()) shape[0] = call.tokens.split.sizes[comm::rank(call.tokens.group)];
    const Tensor sum =
        call.tokens.cut()
            ? std::move(tree).reduce_scatter(call.tokens.group, rows_of_ranks(x, call.tokens.split),
                                             x.scalar_type())
            : std::move(tree).all_reduce(call.tokens.group, x.scalar_type());
    return plus_bias(sum.view_symint(shape), bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kBlockLinear, grads);
    const SavedBlocks s(ctx);
    const Unrecorded guard(grads[0]);
    const auto segments = segments_of(s.flat);
    std::optional<comm::Pending> dy_full;
    if (s.wants_x || s.wants_w) dy_full.emplace(s.tokens.gather_async(grads[0]));
    Tensor db;
    if (s.wants_b) {
      const Tensor& own = grads[0];
      const int64_t number = std::accumulate(s.blocks.begin(), s.blocks.end(), int64_t{0});
      const auto blocks =
          s.tokens.cut() ? own_blocks(s.blocks, s.tokens.group) : comm::blocks_of({number}, 0);
      auto tree =
          token_sums(own, blocks, s.tokens.cut() ? s.tokens.split.total() : own.sym_size(0));
      db = std::move(tree).all_reduce(s.tokens.cut() ? s.tokens.group : "", own.scalar_type());
    }
    const Tensor dy = dy_full ? dy_full->wait() : grads[0];
    const Tensor rows = row_major_rows(dy);
    Tensor dx, dw;
    if (s.wants_x) {
      const int64_t width = s.weight.size(1);
      dx = by_segments(rows, {rows.size(0), width}, 1, segments,
                       [&](const Segment& segment, Tensor out) {
                         return product(rows, columns(s.weight, segment), std::move(out));
                       })
               .view_symint(with_features(dy, width));
    }
    if (s.wants_w) {
      const Tensor x = row_major_rows(s.x), transposed = rows.t();
      dw = by_segments(rows, {rows.size(1), x.size(1)}, 1, segments,
                       [&](const Segment& segment, Tensor out) {
                         return product(transposed, columns(x, segment), std::move(out));
                       });
    }
    return gradients({dx, dw, db});
  }
};

}  // namespace

Tensor block_column_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const std::string& group, bool sequence_parallel, Sizes sizes,
                           at::IntArrayRef blocks, at::IntArrayRef segments) {
  refuse_forward_mode(kBlockLinear, x, weight, bias);
  check_linear(x, weight, bias, std::nullopt, 1);
  const int64_t p = comm::size(group);
  BlockCall call{{group}, blocks.vec(), segments.vec(), bias.has_value()};
  if (sequence_parallel && p > 1)
    call.tokens.split = split_local(tokens_of(x), comm::rank(group), p, sizes);
  return BlockColumnLinear::apply(x, weight, bias, call);
}

Tensor block_row_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        const std::string& group, bool sequence_parallel, at::IntArrayRef blocks,
                        at::IntArrayRef segments) {
  refuse_forward_mode(kBlockLinear, x, weight, bias);
  check_linear(x, weight, bias, std::nullopt, 1, true);
  const int64_t p = comm::size(group);
  BlockCall call{{group}, blocks.vec(), segments.vec(), bias.has_value()};
  if (sequence_parallel && p > 1) call.tokens.split = comm::block_split(tokens_of(x), call.blocks);
  return BlockRowLinear::apply(x, weight, bias, call);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  autocast_to_low_precision<block_column_linear, 0, 1, 2>(m, "block_column_linear");
  autocast_to_low_precision<block_row_linear, 0, 1, 2>(m, "block_row_linear");
}

}  // namespace tp_ext
