// Gathers of weights that are sharded over a second group (weight_group=). A pass over a model
// gathers its weights in the same order each time; what followed a weight the last time is gathered
// under the computation with it:
//
//   const Tensor w = gathered_weight(shard, of, Pass::forward);   // under the previous GEMM
//   prefetch_weight(Pass::forward);                               // the next one, under this GEMM
//
// A pass begins where a weight comes for the second time. Ranks run the same program, so they
// predict the same gathers; one that is not used is dropped when its pass ends. A weight that was
// written after its prefetch is gathered again. Traced calls gather without prefetch.

#pragma once

#include <ATen/core/Tensor.h>
#include <string>

#include "comm/split.h"

namespace tp_ext {

enum class Pass { forward, backward };

// How a weight is sharded: lengths of `dim` over `group`
struct WeightShards {
  std::string group;
  int64_t dim;
  Split split;
};

// The ranks' shards, concatenated
Tensor gathered_weight(const Tensor& shard, const WeightShards& of, Pass pass);

// Issues the gather that followed the last one of this pass when the pass last ran
void prefetch_weight(Pass pass);

}  // namespace tp_ext
