// Attention of some queries to some keys, with the logarithm of the sum of its exponentials (lse),
// by which the results for several sets of keys are merged:
//
//   out = sum_j w_j v_j / sum_j w_j    w_j = exp(s_j)    lse = log sum_j w_j
//   out of both = out_a + (out_b - out_a) sigmoid(lse_b - lse_a)    lse = log(e^lse_a + e^lse_b)
//
// Backward needs the merged out and lse only: exp(s_j - lse) is the weight of key j among all keys.
// Layout of tensors: [batch, heads, tokens, head_dim]; k and v may have fewer heads.

#pragma once

#include <ATen/core/Tensor.h>
#include <optional>

#include "autograd/context_tiles.h"
#include "types.h"

namespace tp_ext {

struct TileOptions {
  bool causal = true;
  double scale = 1;
  std::optional<int64_t> window;
  std::optional<double> softcap;
  double dropout = 0;
  int64_t num_heads = 0, first_head = 0;  // of the unsharded layer; the first one here

  // Whether torch's fused kernels do not compute it
  bool is_explicit() const { return window || softcap || dropout > 0; }
};

// Out in q's dtype (explicit: in that of lse), lse [batch, heads, queries] in fp32, fp64 for fp64
struct Attended {
  Tensor out, lse;
};

struct Operands {
  Tensor q, k, v;
};

// Whether q attends to k by torch's CPU kernels of fp32. Those of half types take some 10 ms for a
// backward of any size and win by a fifth from 1024 keys on, on a processor with instructions for
// bf16; their forward is no faster anywhere.
bool computed_in_fp32(const Tensor& q, const Tensor& k);

// length: tokens of the sequence, seed: of its dropout masks; used only if options.is_explicit()
Attended tile_forward(const Operands& operands, const Tile& tile, const TileOptions& options,
                      int64_t length, const Tensor& seed);
// The gradients of q, k and v
Operands tile_backward(const Tensor& dout, const Operands& operands, const Attended& result,
                       const Tile& tile, const TileOptions& options, int64_t length,
                       const Tensor& seed);

// The result for two disjoint sets of keys; out in lse's dtype. One without any key has lse -inf.
Attended merged(const Attended& a, const Attended& b);

}  // namespace tp_ext
