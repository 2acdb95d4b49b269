// A model as a list of operators, and the layout that it is trained in.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tp_ext::planner {

enum class OpKind : uint8_t {
  Column,      // a linear whose outputs are sharded over tp
  Row,         // one whose inputs are
  Replicated,  // one that every rank computes for its tokens
  Attention,
  Pointwise,  // memory-bound: norms, activations, residuals, rotary embedding
  Dispatch,   // tokens to the ranks of their experts, and back
  Embedding,
  Loss
};

// Elements and bytes are of one token
struct Op {
  OpKind kind = OpKind::Pointwise;
  double inputs = 0, outputs = 0;  // features of the whole model
  int64_t units = 1;               // of the sharded features, that are not cut
  bool bias = false;
  int64_t heads = 0, kv_heads = 0;
  double key_features = 0, value_features = 0;
  bool fused = true, causal = true;
  double moved_forward = 0, moved_backward = 0;  // elements read and written
  double saved = 0, saved_bytes = 0;  // for backward: elements of the dtype, and bytes of others
  bool sharded = false;               // features over tp; else tokens, under sequence parallelism
  int64_t vectors = 0;                // replicated parameters of `inputs` elements
  int64_t experts = 0, top_k = 0;     // of an operator of experts: each token in top_k copies
  bool low_precision = true;          // computed in the dtype of the blocks
};

struct BlockOps {
  int64_t layers = 0;
  std::vector<Op> ops;
};

struct Workload {
  double hidden = 0;
  int64_t seq = 0, heads = 0, kv_heads = 0, experts = 0, layers = 0, vocab = 0;
  bool tied = false;
  std::vector<Op> first, last;
  std::vector<BlockOps> blocks;
};

enum class Recompute : uint8_t { None, Selective, Full, Attention, Half };

struct Layout {
  int64_t pp = 1, dp = 1, ep = 1, cp = 1, tp = 1, virtual_stages = 1;
  std::string schedule = "1F1B";  // of torch
  int64_t micro_batch = 1, zero = 0;
  bool sequence_parallel = true, offload = false, overlap_tp = false;
  Recompute recompute = Recompute::None;
  double element = 2;      // bytes of an activation
  bool quantized = false;  // the blocks' GEMMs read and write another dtype than activations have
  double param_bytes = 4, grad_bytes = 4, state_bytes = 8;

  // Of tp_ext.shares: weights, how many of n units each rank of tp has, and the rank that is priced
  std::vector<double> shares;
  std::function<std::vector<int64_t>(int64_t)> cut;
  int64_t rank = 0;

  // Units of n; without shares those of the rank that has most
  int64_t share(int64_t n) const { return cut ? cut(n)[rank] : (n + tp - 1) / tp; }
  int64_t longest(int64_t n) const {
    if (!cut) return (n + tp - 1) / tp;
    const auto sizes = cut(n);
    return *std::max_element(sizes.begin(), sizes.end());
  }

  int64_t ranks() const { return pp * dp * ep * cp * tp; }
  int64_t shards() const { return dp * ep * cp; }
  int64_t microbatches(int64_t global_batch) const {
    const int64_t each = dp * ep * micro_batch;
    return (global_batch + each - 1) / each;
  }
};

}  // namespace tp_ext::planner
