// Gathers of weights that are sharded over a second group (weight_group=). A pass over a model
// gathers its weights in the same order each time; what followed a weight the last time is gathered
// under the computation with it:
//
//   const auto order = GatherOrder::running(shard);
//   const Tensor w = gathered_weight(shard, of, order);  // under the GEMM before; and begins the
//                                                        // gather of the next, under the GEMM here
//
// A pass is one forward of a model, from GatherOrder::begin() to end() (tp_ext/nn/gather_ahead.py
// calls them around the outermost module), or one run of the autograd engine. Nothing is gathered
// ahead across its limits, so every write of a weight between two passes is seen: that of the
// optimizer, through `p.data`, of a broadcast. Within a pass, where hooks and the code of a model
// may write a weight that is being gathered, see Coming::is_of. What is gathered ahead follows from
// the calls alone: the model owns its order, with the weights in it, so it is the same on all ranks
// whenever memory is collected. A gather that is not used is dropped. Traced calls gather when they
// come.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/split.h"
#include "tp_ext/export.h"

namespace tp_ext {

// How a weight is sharded: lengths of `dim` over `group`
struct WeightShards {
  std::string group;
  int64_t dim;
  Split split;
};

// The order in which one model gathers its weights, forward and backward
class TP_EXT_API GatherOrder : public torch::CustomClassHolder {
 public:
  using Ptr = c10::intrusive_ptr<GatherOrder>;

  // That of the forward in which this thread is; null outside of one, where a call is traced, and
  // for a shard that will not come again
  static Ptr running(const Tensor& shard);
  static bool is_running();
  void begin();
  void end();

  Tensor take(const Tensor& shard, const WeightShards& of);
  void gather_next();

 private:
  struct Step {
    Tensor shard;
    WeightShards of;
  };
  struct Coming {
    Tensor shard;
    at::Storage storage;
    uint32_t version;
    std::shared_ptr<comm::Pending> gather;

    bool is_of(const Tensor& x) const;  // whether it has what x holds now
  };
  struct Pass {
    int64_t number = 0;
    std::vector<Step> known, now;  // of the pass before, and of this one so far
    bool as_known = true;          // whether this one began as the one before
    std::optional<Coming> coming;

    void finish(int64_t next);
  };

  Pass& pass();  // that in which this thread is

  std::mutex mutex_;
  Pass forward_, backward_;
};

// The ranks' shards, concatenated. With the order of a model, begins the gather of its next weight
Tensor gathered_weight(const Tensor& shard, const WeightShards& of, const GatherOrder::Ptr& order);

// In its scope a shard is no parameter but was made for one call, such as a cast of autocast
struct MadeForOneCall {
  MadeForOneCall();
  ~MadeForOneCall();
};

}  // namespace tp_ext
