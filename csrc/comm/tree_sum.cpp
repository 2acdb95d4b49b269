#include "comm/tree_sum.h"

#include <ATen/ops/add.h>
#include <ATen/ops/stack.h>

#include <numeric>

#include "comm/pack.h"
#include "operators.h"

namespace tp_ext::comm {

using at::Tensor;
using c10::SymInt;

Blocks blocks_of(BlocksOfRanks of_ranks, int64_t rank) {
  TORCH_CHECK_VALUE(rank < static_cast<int64_t>(of_ranks.size()),
                    "blocks: ", at::IntArrayRef(of_ranks),
                    " must be the number of blocks of each rank");
  const auto begin = of_ranks.begin(), end = of_ranks.end();
  const int64_t first = std::accumulate(begin, begin + rank, int64_t{0}),
                number = std::accumulate(begin, end, int64_t{0}), count = of_ranks[rank];
  return {std::move(of_ranks), number, first, count};
}

SymInt block_start(const SymInt& n, int64_t b, int64_t number) {
  return (n * b + (number - 1)) / number;
}

Split block_split(const SymInt& n, const BlocksOfRanks& of_ranks) {
  const int64_t number = std::accumulate(of_ranks.begin(), of_ranks.end(), int64_t{0});
  Split split;
  int64_t first = 0;
  for (const int64_t count : of_ranks) {
    split.sizes.push_back(block_start(n, first + count, number) - block_start(n, first, number));
    first += count;
  }
  return split;
}

at::ScalarType node_dtype(const Tensor& leaf) {
  return leaf.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void TreeSum::add(const Tensor& leaf) { push({0, next_++, leaf.to(node_dtype(leaf))}); }

namespace {

// Adds a node to those that are complete, in the order of their blocks: while it is the right
// neighbour of the last one, join(last, node) makes one of both; an odd last node of a level moves
// up as it is. What is left waits for a neighbour on another rank or to come, or is the root.
template <typename Node, typename Join>
void add_node(std::vector<Node>& nodes, Node node, int64_t number, const Join& join) {
  for (;;) {
    if (node.index % 2 == 1) {
      if (nodes.empty() || nodes.back().level != node.level || nodes.back().index != node.index - 1)
        break;
      join(nodes.back(), node);
      nodes.pop_back();
    } else if (node.index == 0 || ((node.index + 1) << node.level) < number) {
      break;
    }
    ++node.level;
    node.index /= 2;
  }
  nodes.push_back(std::move(node));
}

struct Place {
  int64_t level, index;
};

// The nodes that are complete on a rank
std::vector<Place> complete(const Blocks& blocks) {
  std::vector<Place> places;
  for (int64_t b = blocks.first; b < blocks.first + blocks.count; ++b)
    add_node(places, Place{0, b}, blocks.number, [](const Place&, const Place&) {});
  return places;
}

// Whether tp_shm's tree over the ranks is that of the blocks: each rank has one node, and nodes
// meet in the order of a tree with a leaf for each rank
bool is_tree_of_ranks(const BlocksOfRanks& of_ranks) {
  std::vector<Place> nodes, ranks;
  int64_t joins = 0, joins_of_ranks = 0;
  const auto p = static_cast<int64_t>(of_ranks.size());
  for (int64_t rank = 0; rank < p; ++rank) {
    const auto blocks = blocks_of(of_ranks, rank);
    const auto own = complete(blocks);
    if (own.size() != 1) return false;
    add_node(nodes, own[0], blocks.number, [&](const Place&, const Place&) { ++joins; });
    add_node(ranks, Place{0, rank}, p, [&](const Place&, const Place&) { ++joins_of_ranks; });
    if (joins != joins_of_ranks) return false;
  }
  return true;
}

}  // namespace

void TreeSum::push(Node node) {
  add_node(nodes_, std::move(node), blocks_.number, [](const Node& left, Node& right) {
    // A tensor that a dispatch mode has recorded must not be written
    Tensor sum = left.value;
    right.value = traced(sum) ? at::add(sum, right.value) : sum.add_(right.value);
  });
}

Tensor TreeSum::root() const {
  TORCH_INTERNAL_ASSERT(nodes_.size() == 1 && next_ == blocks_.number, "tree_sum: ", nodes_.size(),
                        " nodes after block ", next_, " of ", blocks_.number);
  return nodes_[0].value;
}

Tensor TreeSum::stacked() const {
  TORCH_INTERNAL_ASSERT(next_ == blocks_.first + blocks_.count);
  if (nodes_.empty()) return none_.to(node_dtype(none_));
  if (nodes_.size() == 1) return nodes_[0].value.unsqueeze(0);
  std::vector<Tensor> values;
  for (const auto& node : nodes_) values.push_back(node.value);
  return at::stack(values);
}

Split TreeSum::nodes_of_ranks(const BlocksOfRanks& of_ranks) {
  Split split;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank)
    split.sizes.emplace_back(static_cast<int64_t>(complete(blocks_of(of_ranks, rank)).size()));
  return split;
}

Tensor TreeSum::total(const Tensor& nodes, const BlocksOfRanks& of_ranks, at::ScalarType dtype) {
  std::vector<Place> waiting;
  std::vector<int64_t> joins;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto blocks = blocks_of(of_ranks, rank);
    for (const Place& place : complete(blocks)) {
      joins.push_back(0);
      add_node(waiting, place, blocks.number, [&](const Place&, const Place&) { ++joins.back(); });
    }
  }
  static const auto op = TP_OP(_tree_total);
  return op.call(nodes, joins, dtype);
}

TreeSum::Pending TreeSum::reduce_scatter_async(const std::string& group, const Split& split,
                                               at::ScalarType dtype) && {
  return of_nodes(size(group) == 1 ? root().unsqueeze(0) : stacked(), blocks_.of_ranks, group,
                  split, dtype);
}

TreeSum::Pending TreeSum::all_reduce_async(const std::string& group, at::ScalarType dtype) && {
  return of_nodes(size(group) == 1 ? root().unsqueeze(0) : stacked(), blocks_.of_ranks, group,
                  dtype, true);
}

void TreeSum::check_nodes(const Tensor& nodes, const BlocksOfRanks& of_ranks,
                          const std::string& group) {
  const auto own = static_cast<int64_t>(complete(blocks_of(of_ranks, rank(group))).size());
  TORCH_CHECK_VALUE(nodes.size(0) == own, "nodes: ", nodes.size(0), " must be the ", own,
                    " complete nodes of this rank's blocks");
}

TreeSum::Pending TreeSum::of_nodes(const Tensor& nodes, const BlocksOfRanks& of_ranks,
                                   const std::string& group, const Split& split,
                                   at::ScalarType dtype) {
  check_nodes(nodes, of_ranks, group);
  const int64_t p = size(group);
  if (p == 1)
    return {comm::Pending(nodes.select(0, 0), nullptr),
            [dtype](const Tensor& sum) { return sum.to(dtype); }};
  if (adds_in_a_tree(nodes, group) && is_tree_of_ranks(of_ranks))
    return {comm::reduce_scatter_async(nodes.select(0, 0), group, 0, split, Order::kTree),
            [dtype](const Tensor& sum) { return sum.to(dtype); }};
  return {all_to_all_async(nodes, group, 1, 0, split, nodes_of_ranks(of_ranks)),
          [of_ranks, dtype](const Tensor& nodes) { return total(nodes, of_ranks, dtype); }};
}

TreeSum::Pending TreeSum::of_nodes(const Tensor& nodes, const BlocksOfRanks& of_ranks,
                                   const std::string& group, at::ScalarType dtype, bool fresh) {
  check_nodes(nodes, of_ranks, group);
  const int64_t p = size(group);
  if (p == 1)
    return {comm::Pending(nodes.select(0, 0), nullptr),
            [dtype](const Tensor& sum) { return sum.to(dtype); }};
  const bool by_backend = adds_in_a_tree(nodes, group) && is_tree_of_ranks(of_ranks);
  if (by_backend && dtype == nodes.scalar_type()) {
    const Tensor node = nodes.select(0, 0);
    return {comm::all_reduce_async(fresh ? node : fresh_contiguous(node), group, Order::kTree),
            [](const Tensor& sum) { return sum; }};
  }
  const auto shape = nodes.sym_sizes().slice(1).vec();
  SymInt length = 1;  // not -1: a rank may have no nodes
  for (const auto& n : shape) length = length * n;
  const Tensor flat = nodes.reshape_symint({nodes.sym_size(0), length});
  const Split split = tensor_split(flat.sym_size(1), p);
  const auto gathered = [group, split, shape](const Tensor& slice) {
    return all_gather(slice, group, 0, split).view_symint(shape);
  };
  if (by_backend)
    return {comm::reduce_scatter_async(flat.select(0, 0), group, 0, split, Order::kTree),
            [dtype, gathered](const Tensor& slice) { return gathered(slice.to(dtype)); }};
  return {all_to_all_async(flat, group, 1, 0, split, nodes_of_ranks(of_ranks)),
          [of_ranks, dtype, gathered](const Tensor& nodes) {
            return gathered(total(nodes, of_ranks, dtype));
          }};
}

Tensor TreeSum::all_reduce(const std::string& group, at::ScalarType dtype) && {
  return std::move(*this).all_reduce_async(group, dtype).wait();
}
Tensor TreeSum::reduce_scatter(const std::string& group, const Split& split,
                               at::ScalarType dtype) && {
  return std::move(*this).reduce_scatter_async(group, split, dtype).wait();
}

}  // namespace tp_ext::comm
