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
  // Likewise; of each rank of tp where their shares or devices differ
  std::vector<std::vector<Memory>> memory;
  std::vector<StageTimes> stages;  // of one microbatch
  double send = 0;                 // seconds of a message
};

// Returns the lists of a schedule
using Schedules = std::function<std::shared_ptr<const Schedule>(
    const std::string& name, int64_t pp, int64_t virtual_stages, int64_t microbatches)>;

// Of one workload on one machine; keeps what several layouts share.
class Planner {
 public:
  // One machine, or that of each rank of tp, which then must be as many; they differ in the device
  Planner(Workload workload, std::vector<Machine> machines, int64_t global_batch,
          Schedules schedules);

  Prediction predict(const Layout& layout);

  // For the search: no layout is faster than its bound, which takes no simulation
  double bound(const Layout& layout);
  struct Need {
    double peak = 0, most = 0;  // of the rank that lacks most, and of the one that needs most
    bool fits = true;
    int64_t rank = 0;  // of tp, that lacks most
  };
  Need need(const Layout& layout);

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
  // Of each rank of tp that differs, and of the slowest of each layer
  struct Ranks {
    std::vector<Layers> of;
    Layers slowest;
  };
  // A step of fewer microbatches, and the one after which all further ones are alike
  struct Sample {
    std::shared_ptr<const Schedule> schedule, longer;
    double further = 0;  // number of differences between them in the step
  };

  const Ranks& layers(const Layout& layout);
  Layers layers_of(const Layout& layout, const Machine& machine) const;
  const Machine& machine_of(size_t rank) const { return machines_[rank % machines_.size()]; }
  // All ranks wait for the slowest
  std::vector<Stage> stages(const Layout& layout);
  std::vector<Stage> stages(const Layout& layout, const Layers& priced, const Machine& machine);
  void add_gathers(const Layout& layout, const Layers& layers, const Machine& machine,
                   Stage& stage) const;
  const Sample& sample(const Layout& layout);
  static std::vector<std::vector<int64_t>> stages_of_ranks(const Layout& layout);
  std::vector<Memory> memory(const Layout& layout, const std::vector<Stage>& stages,
                             const Layers& priced);
  // What the data axes cost a rank after its last backward; adds its collectives to the rows
  double data_time(const Layout& layout, const std::vector<Stage>& stages,
                   const std::vector<int64_t>& own, const Layers& kinds, const Machine& machine,
                   std::vector<Traffic>& rows) const;
  static double optimizer_time(const Layout& layout, const Memory& memory, double tensors,
                               const Machine& machine);
  std::pair<double, double> parameters(const std::vector<Stage>& stages,
                                       const std::vector<int64_t>& own, const Layout& layout) const;
  static std::pair<double, double> by_group(const Layout& layout, double dense, double experts);
  // Parameters of which FSDP2 gathers and shards the rows, with its padding
  std::pair<double, double> padded(const Layout& layout, const Costs& costs) const;
  double send_time(const Layout& layout) const;
  double message_bytes(const Layout& layout) const;

  Workload workload_;
  std::vector<Machine> machines_;
  Machine machine_;  // the first
  int64_t global_batch_;
  Schedules schedules_;
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, bool, bool, Recompute, bool,
                      std::vector<double>>,
           Ranks>
      layers_;
  std::map<int64_t, std::vector<int64_t>> splits_;
  std::map<std::tuple<std::string, int64_t, int64_t, int64_t>, Sample> samples_;
};

}  // namespace tp_ext::planner
