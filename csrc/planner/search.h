// All legal layouts of a workload on a machine, ranked.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "planner/predict.h"

namespace tp_ext::planner {

// The values that are searched over; an empty dp stands for what remains
struct Space {
  std::vector<int64_t> pp, dp, ep, cp, tp, micro_batch, zero;
  std::vector<std::pair<std::string, int64_t>> schedules;  // with the stages of a rank
  std::vector<Recompute> recompute;
  std::vector<bool> sequence_parallel, offload, overlap_tp;
  Layout base;  // the values of the other fields
};

std::vector<Layout> legal_layouts(const Space& space, const Workload& workload, int64_t count,
                                  int64_t global_batch);

struct Rejected {
  Layout layout;
  double peak;
  int64_t rank;  // of tp, that lacks most
};

struct Found {
  std::vector<Prediction> best;
  std::vector<Rejected> rejected;  // the nearest to fit first
  int64_t count = 0;
};

Found search(const Space& space, const Workload& workload, const std::vector<Machine>& machines,
             int64_t global_batch, const Schedules& schedules, bool by_memory, int64_t top,
             int64_t most_rejected);

}  // namespace tp_ext::planner
