#include "planner/search.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace tp_ext::planner {
namespace {

// tp_ext/parallel/schedules.py, check_microbatches
bool runs(const std::string& schedule, int64_t microbatches, int64_t pp, int64_t stages) {
  if ((schedule == "1F1B" || schedule == "DualPipeV") && microbatches < stages) return false;
  if (schedule == "Interleaved1F1B" || schedule == "InterleavedZeroBubble")
    return microbatches % std::max<int64_t>(1, microbatches / pp) == 0;
  return true;
}

bool has_halves(const std::string& schedule) {
  return schedule == "ZBVZeroBubble" || schedule == "DualPipeV" ||
         schedule == "InterleavedZeroBubble";
}

// What parallelize and the layers take
bool is_legal(const Layout& layout, const Workload& workload, int64_t global_batch) {
  const int64_t stages = layout.pp * layout.virtual_stages, tp = layout.tp;
  if (stages > workload.layers || layout.cp > workload.seq) return false;
  if (tp > std::max<int64_t>(1, workload.heads)) return false;
  if (workload.kv_heads && workload.kv_heads < tp && tp % workload.kv_heads) return false;
  if (layout.ep > std::max<int64_t>(1, workload.experts)) return false;
  if (std::max(layout.dp * layout.ep, layout.micro_batch) > global_batch) return false;
  if (layout.ep > 1 && layout.zero == 1) return false;
  if (layout.ep > 1 && layout.zero > 1 && layout.recompute == Recompute::Selective) return false;
  if (layout.pp == 1) return layout.virtual_stages == 1;
  if (has_halves(layout.schedule) && layout.recompute != Recompute::None) return false;
  return runs(layout.schedule, layout.microbatches(global_batch), layout.pp, stages);
}

}  // namespace

std::vector<Layout> legal_layouts(const Space& space, const Workload& workload, int64_t count,
                                  int64_t global_batch) {
  std::vector<Layout> found;
  Layout layout = space.base;
  const auto add_schedules = [&] {
    for (const auto& [name, virtual_stages] : space.schedules) {
      layout.schedule = name;
      layout.virtual_stages = virtual_stages;
      if (is_legal(layout, workload, global_batch)) found.push_back(layout);
      if (layout.pp == 1 && virtual_stages == 1) break;  // one stage needs no schedule
    }
  };
  const auto add_options = [&] {
    for (const int64_t micro_batch : space.micro_batch)
      for (const int64_t zero : space.zero)
        for (const Recompute recompute : space.recompute)
          for (const bool sequence_parallel : space.sequence_parallel)
            for (const bool offload : space.offload)
              for (const bool overlap_tp : space.overlap_tp) {
                layout.micro_batch = micro_batch;
                layout.zero = zero;
                layout.recompute = recompute;
                layout.sequence_parallel = sequence_parallel;
                layout.offload = offload;
                layout.overlap_tp = overlap_tp;
                add_schedules();
              }
  };
  for (const int64_t pp : space.pp)
    for (const int64_t ep : space.ep)
      for (const int64_t cp : space.cp)
        for (const int64_t tp : space.tp) {
          const int64_t ranks = pp * ep * cp * tp;
          if (ranks > count || count % ranks) continue;
          const int64_t dp = count / ranks;
          if (!space.dp.empty() &&
              std::find(space.dp.begin(), space.dp.end(), dp) == space.dp.end())
            continue;
          layout.pp = pp;
          layout.dp = dp;
          layout.ep = ep;
          layout.cp = cp;
          layout.tp = tp;
          add_options();
        }
  return found;
}

Found search(const Space& space, const Workload& workload, const std::vector<Machine>& machines,
             int64_t global_batch, const Schedules& schedules, bool by_memory, int64_t top,
             int64_t most_rejected) {
  Planner planner(workload, machines, global_batch, schedules);
  const auto layouts = legal_layouts(space, workload, machines.at(0).count, global_batch);
  struct Candidate {
    double bound, peak;
    const Layout* layout;
    int64_t rank = 0;
  };
  std::vector<Candidate> fitting, rejected;
  for (const Layout& layout : layouts) {
    const Planner::Need need = planner.need(layout);
    if (!need.fits)
      rejected.push_back({0, need.peak, &layout, need.rank});
    else
      fitting.push_back({by_memory ? need.most : planner.bound(layout), need.most, &layout});
  }
  Found found;
  found.count = int64_t(layouts.size());
  const auto nearest = [](const Candidate& one, const Candidate& other) {
    return one.peak < other.peak;
  };
  std::stable_sort(rejected.begin(), rejected.end(), nearest);
  for (size_t i = 0; i < std::min(rejected.size(), size_t(most_rejected)); ++i)
    found.rejected.push_back({*rejected[i].layout, rejected[i].peak, rejected[i].rank});

  std::stable_sort(fitting.begin(), fitting.end(),
                   [](const auto& one, const auto& other) { return one.bound < other.bound; });
  struct Ranked {
    double time, peak;
    Prediction prediction;
    auto key(bool by_memory) const {
      const Layout& layout = prediction.layout;
      return std::make_tuple(by_memory ? peak : time, by_memory ? time : peak, layout.tp, layout.pp,
                             layout.cp);
    }
  };
  std::vector<Ranked> best;
  for (const Candidate& candidate : fitting) {
    // None of those that follow can be among the best
    if (int64_t(best.size()) == top) {
      const double last = by_memory ? best.back().peak : best.back().time;
      if (candidate.bound > last) break;
    }
    Prediction prediction = planner.predict(*candidate.layout);
    Ranked ranked{prediction.step_time, candidate.peak, std::move(prediction)};
    const auto place =
        std::upper_bound(best.begin(), best.end(), ranked, [&](const auto& one, const auto& other) {
          return one.key(by_memory) < other.key(by_memory);
        });
    best.insert(place, std::move(ranked));
    if (int64_t(best.size()) > top) best.pop_back();
  }
  for (Ranked& ranked : best) found.best.push_back(std::move(ranked.prediction));
  return found;
}

}  // namespace tp_ext::planner
