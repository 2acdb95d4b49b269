// The prediction of one step: time by cause, collectives and memory of each rank of a pipeline.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>

#include "planner/layer.h"
#include "planner/pipeline.h"

namespace tp_ext::planner {

struct Breakdown {
  Seconds work;
  double pp = 0, dp = 0, bubble = 0, optimizer = 0;

  double total() const { return work.total() + pp + dp + bubble + optimizer; }
};

// Bytes of one rank
struct Memory {
  double parameters = 0, gradients = 0, states = 0, activations = 0, buffers = 0, logits = 0;
  double peak = 0;
};

struct Prediction {
  Layout layout;
  double step_time = 0;
  Breakdown breakdown;                        // mean over the ranks of a pipeline
  std::vector<std::vector<Traffic>> traffic;  // of a rank of each
  std::vector<Memory> memory;                 // likewise
  std::vector<StageTimes> stages;             // of one microbatch
  double send = 0;                            // seconds of a message
};

// Returns the lists of a schedule
using Schedules = std::function<std::shared_ptr<const Schedule>(
    const std::string& name, int64_t pp, int64_t virtual_stages, int64_t microbatches)>;

// Of one workload on one machine; keeps what several layouts share.
class Planner {
 public:
  Planner(Workload workload, Machine machine, int64_t global_batch, Schedules schedules);

  Prediction predict(const Layout& layout);

  // For the search: no layout is faster than its bound, which takes no simulation
  double bound(const Layout& layout);
  double largest_peak(const Layout& layout);

 private:
  struct Layers {
    Layer first, last;
    std::vector<Layer> blocks;  // a kind each
  };
  struct Stage {
    Costs costs;
    std::vector<int64_t> blocks;  // of each kind
    bool first = false, last = false;
    // What the collectives of ZeRO 2 and 3 add to the passes of a microbatch
    double forward_gathers = 0, backward_gathers = 0;
  };
  // A step of fewer microbatches, and the one after which all further ones are alike
  struct Sample {
    std::shared_ptr<const Schedule> schedule, longer;
    double further = 0;  // number of differences between them in the step
  };

  const Layers& layers(const Layout& layout);
  std::vector<Stage> stages(const Layout& layout);
  void add_gathers(const Layout& layout, const Layers& layers, Stage& stage) const;
  const Sample& sample(const Layout& layout);
  static std::vector<std::vector<int64_t>> stages_of_ranks(const Layout& layout);
  std::vector<Memory> memory(const Layout& layout, const std::vector<Stage>& stages);
  // What the data axes cost a rank after its last backward; adds its collectives to the rows
  double data_time(const Layout& layout, const std::vector<Stage>& stages,
                   const std::vector<int64_t>& own, std::vector<Traffic>* rows);
  double optimizer_time(const Layout& layout, const Memory& memory, double tensors) const;
  std::pair<double, double> parameters(const std::vector<Stage>& stages,
                                       const std::vector<int64_t>& own, int64_t tp) const;
  static std::pair<double, double> by_group(const Layout& layout, double dense, double experts);
  // Parameters of which FSDP2 gathers and shards the rows, with its padding
  std::pair<double, double> padded(const Layout& layout, const Costs& costs) const;
  double send_time(const Layout& layout) const;
  double message_bytes(const Layout& layout) const;

  Workload workload_;
  Machine machine_;
  int64_t global_batch_;
  Schedules schedules_;
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, bool, bool, Recompute, bool>, Layers>
      layers_;
  std::map<int64_t, std::vector<int64_t>> splits_;
  std::map<std::tuple<std::string, int64_t, int64_t, int64_t>, Sample> samples_;
};

}  // namespace tp_ext::planner
