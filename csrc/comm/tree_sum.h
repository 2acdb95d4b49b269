// The sum over blocks as one binary tree, whatever the number of ranks [Note: one tree of blocks].
//
//   level 0   the results of the blocks, in their order
//   level l   neighbours of level l - 1 are added; an odd last node moves up as it is
//
// Node i of level l is the sum of the blocks [i 2^l, (i + 1) 2^l). A rank holds consecutive blocks
// and adds up what is complete there; then the ranks exchange nodes by an all-to-all, each
// finishes the tree for its slice of the elements, and an all-gather, if all need the sum, ends it.
// tp_shm adds the nodes itself where each rank has one and the ranks are a tree of their own.
// Nodes are added and sent in fp32 (fp64 for fp64); the root is rounded once.

#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/collectives.h"

namespace tp_ext::comm {

// The numbers of blocks of the ranks, which the caller has cut
using BlocksOfRanks = std::vector<int64_t>;

// The blocks of a rank: [first, first + count) of `number`
struct Blocks {
  BlocksOfRanks of_ranks;
  int64_t number, first, count;
};
Blocks blocks_of(BlocksOfRanks of_ranks, int64_t rank);

// Where block b of n units begins: ceil(b n / number)
c10::SymInt block_start(const c10::SymInt& n, int64_t b, int64_t number);

// The lengths of the ranks' shards of n units
Split block_split(const c10::SymInt& n, const BlocksOfRanks& of_ranks);

at::ScalarType node_dtype(const at::Tensor& leaf);

class TreeSum {
 public:
  // none: the stack of no results, [0, ..], of a rank without a block
  TreeSum(const Blocks& blocks, at::Tensor none)
      : blocks_(blocks), none_(std::move(none)), next_(blocks.first) {}

  // The result of the next block; takes ownership of `leaf`, which the caller has just allocated
  void add(const at::Tensor& leaf);

  // The sum over all blocks, on every rank or as this rank's slice of dim 0, in `dtype`
  at::Tensor all_reduce(const std::string& group, at::ScalarType dtype) &&;
  at::Tensor reduce_scatter(const std::string& group, const Split& split, at::ScalarType dtype) &&;

  // The same without waiting for the exchange
  class Pending {
   public:
    Pending(comm::Pending nodes, std::function<at::Tensor(const at::Tensor&)> finish)
        : nodes_(std::move(nodes)), finish_(std::move(finish)) {}
    at::Tensor wait() { return finish_(nodes_.wait()); }

   private:
    comm::Pending nodes_;
    std::function<at::Tensor(const at::Tensor&)> finish_;
  };
  Pending all_reduce_async(const std::string& group, at::ScalarType dtype) &&;

  // The sum over all blocks from the complete nodes of this rank, [nodes, ..]: on every rank, or
  // this rank's slice of dim 0. fresh: the caller has just allocated them.
  static Pending of_nodes(const at::Tensor& nodes, const BlocksOfRanks& of_ranks,
                          const std::string& group, at::ScalarType dtype, bool fresh = false);
  static Pending of_nodes(const at::Tensor& nodes, const BlocksOfRanks& of_ranks,
                          const std::string& group, const Split& split, at::ScalarType dtype);
  Pending reduce_scatter_async(const std::string& group, const Split& split,
                               at::ScalarType dtype) &&;

 private:
  struct Node {
    int64_t level, index;
    at::Tensor value;
  };
  void push(Node node);
  at::Tensor root() const;
  // All complete nodes of this rank, stacked; and the sum from those of all ranks
  at::Tensor stacked() const;
  static at::Tensor total(const at::Tensor& nodes, const BlocksOfRanks& of_ranks,
                          at::ScalarType dtype);
  static Split nodes_of_ranks(const BlocksOfRanks& of_ranks);
  static void check_nodes(const at::Tensor& nodes, const BlocksOfRanks& of_ranks,
                          const std::string& group);

  Blocks blocks_;
  at::Tensor none_;
  int64_t next_;
  std::vector<Node> nodes_;
};

}  // namespace tp_ext::comm
