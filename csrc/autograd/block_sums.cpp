// What layers of tp_ext.tp_invariant are composed of besides linears.
//
//   block_copies   y_b = x for each block b of this rank; dx = the tree over all blocks of dy_b. A
//                  parameter that is used once per block of tokens, keys that are used once per
//                  block of query heads.
//   block_bmm      y_i = a_i b_i, each product on one thread
//   block_softmax  of the last dim of each x_i, on one thread: the order of torch's backward
//                  depends on the number of threads

#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include "autograd/autocast.h"
#include "autograd/blocks.h"
#include "autograd/function.h"
#include "check.h"
#include "operators.h"

namespace tp_ext {
namespace {

struct BlockCopies : Function<BlockCopies> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const std::string& group,
                               at::IntArrayRef blocks) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["blocks"] = blocks;
    const Unrecorded guard(x);
    variable_list copies;
    // A rank without a block gets one, too, whose backward meets the others
    for (int64_t i = std::max<int64_t>(own_blocks(blocks, group).count, 1); i > 0; --i)
      copies.push_back(x.view_as(x));
    return copies;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("block_copies", grads);
    const auto group = ctx->saved_data["group"].toStringRef();
    const auto defined =
        std::find_if(grads.begin(), grads.end(), [](const Tensor& t) { return t.defined(); });
    TORCH_INTERNAL_ASSERT(defined != grads.end());
    const Unrecorded guard(*defined);
    const auto blocks = own_blocks(ctx->saved_data["blocks"].toIntVector(), group);
    comm::TreeSum tree(blocks, defined->unsqueeze(0).narrow(0, 0, 0));
    const auto wide = comm::node_dtype(*defined);
    for (int64_t i = 0; i < blocks.count; ++i)  // a copy, since autograd may still use it
      tree.add(grads[i].defined() ? grads[i].to(wide, false, true) : at::zeros_like(*defined));
    return gradients({std::move(tree).all_reduce(group, defined->scalar_type())});
  }
};

struct BlockSum : Function<BlockSum> {
  static Tensor forward(AutogradContext* ctx, const Tensor& nodes, const std::string& group,
                        at::IntArrayRef blocks, bool scatter) {
    ctx->saved_data["shape"] = nodes.sizes();
    ctx->saved_data["scattered_over"] = scatter ? group : std::string();
    const Unrecorded guard(nodes);
    const auto dtype = nodes.scalar_type();
    return (scatter ? comm::TreeSum::of_nodes(nodes, blocks.vec(), group,
                                              slices(nodes.size(1), group), dtype)
                    : comm::TreeSum::of_nodes(nodes, blocks.vec(), group, dtype))
        .wait();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto shape = ctx->saved_data["shape"].toIntVector();
    const auto group = ctx->saved_data["scattered_over"].toStringRef();
    const Unrecorded guard(grads[0]);
    const Tensor dy = comm::size(group) == 1
                          ? grads[0]
                          : comm::all_gather(grads[0], group, 0, slices(shape[1], group));
    return gradients({dy.unsqueeze(0).expand(shape)});
  }

  static Split slices(int64_t n, const std::string& group) {
    return tensor_split(n, comm::size(group));
  }
};

// f(i) for each i, stacked
template <typename F>
Tensor each_of(const Tensor& x, const F& f) {
  std::vector<Tensor> all(x.size(0));
  for_each_block(x, x.size(0), [&](int64_t i) { all[i] = f(i); });
  return all.empty() ? at::empty(x.sizes(), x.options()) : at::stack(all);
}

Tensor products(const Tensor& a, const Tensor& b) {
  if (comm::traced(a))
    return each_of(a, [&](int64_t i) { return at::mm(a.select(0, i), b.select(0, i)); });
  const Tensor y = at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
  for_each_block(a, a.size(0), [&](int64_t i) {
    Tensor out = y.select(0, i);
    at::mm_out(out, a.select(0, i), b.select(0, i));
  });
  return y;
}

struct BlockBmm : Function<BlockBmm> {
  static Tensor forward(AutogradContext* ctx, const Tensor& left, const Tensor& right) {
    const Unrecorded guard(left);
    const Tensor a = row_major(left), b = row_major(right);
    ctx->save_for_backward({a, b});
    return products(a, b);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("block_bmm", grads);
    const auto saved = ctx->get_saved_variables();
    const Unrecorded guard(grads[0]);
    const Tensor dy = row_major(grads[0]);
    const auto transposed = [](const Tensor& x) { return x.transpose(1, 2); };
    return gradients({ctx->needs_input_grad(0) ? products(dy, transposed(saved[1])) : Tensor(),
                      ctx->needs_input_grad(1) ? products(transposed(saved[0]), dy) : Tensor()});
  }
};

struct BlockSoftmax : Function<BlockSoftmax> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, bool blind) {
    const Unrecorded guard(x);
    const Tensor y = each_of(x, [&](int64_t i) {
      const Tensor rows = x.select(0, i);
      return blind ? at::_safe_softmax(rows, -1, std::nullopt) : at::_softmax(rows, -1, false);
    });
    ctx->save_for_backward({y});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward("block_softmax", grads);
    const auto saved = ctx->get_saved_variables();
    const Tensor& y = saved[0];
    const Unrecorded guard(grads[0]);
    return gradients({each_of(y, [&](int64_t i) {
      return at::_softmax_backward_data(grads[0].select(0, i), y.select(0, i), -1, y.scalar_type());
    })});
  }
};

}  // namespace

std::vector<Tensor> block_copies(const Tensor& x, const std::string& group,
                                 at::IntArrayRef blocks) {
  refuse_forward_mode("block_copies", x);
  own_blocks(blocks, group);  // its check
  return BlockCopies::apply(x, group, blocks);
}

Tensor block_sum(const Tensor& nodes, const std::string& group, at::IntArrayRef blocks,
                 bool scatter) {
  refuse_forward_mode("block_sum", nodes);
  own_blocks(blocks, group);  // its check
  TORCH_CHECK_VALUE(nodes.dim() > (scatter ? 1 : 0), "nodes: shape ", nodes.sizes(),
                    " must be [nodes, ..], with a dim to scatter");
  return BlockSum::apply(nodes, group, blocks, scatter);
}

Tensor block_bmm(const Tensor& a, const Tensor& b) {
  refuse_forward_mode("block_bmm", a, b);
  TORCH_CHECK_VALUE(
      a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0) && a.size(2) == b.size(1), "b: shape ",
      b.sizes(), " must be [n, k, columns] for a of shape ", a.sizes(), ", [n, rows, k]");
  check_same_dtype(b, "b", a, "a");
  return BlockBmm::apply(a, b);
}

Tensor block_softmax(const Tensor& x, bool blind) {
  refuse_forward_mode("block_softmax", x);
  check_floating(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 3, "x: shape ", x.sizes(), " must have 3 dims, [n, rows, columns]");
  return BlockSoftmax::apply(x, blind);
}

TORCH_LIBRARY_FRAGMENT(tp_ext, m) {
  impl_composite<block_copies>(m, "block_copies");
  impl_composite<block_sum>(m, "block_sum");
  impl_composite<block_softmax>(m, "block_softmax");
  autocast_to_low_precision<block_bmm, 0, 1>(m, "block_bmm");
}

}  // namespace tp_ext
