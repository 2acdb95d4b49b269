#include "planner/pipeline.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace tp_ext::planner {
namespace {

constexpr double kNotYet = -1;

// The most microbatches of each stage that a rank holds at once, from the begin of F to the end of
// B, or of W: the order of a rank's list decides it, not the times.
std::vector<int32_t> most_in_flight(const std::vector<Action>& actions, int32_t stages) {
  std::vector<int32_t> held(stages, 0), most(stages, 0);
  int32_t sum = 0, largest = 0;
  for (const Action& action : actions) {
    if (action.kind == Kind::F) {
      ++held[action.stage];
      if (++sum > largest) {
        largest = sum;
        most = held;
      }
    } else if (action.kind != Kind::I) {
      --held[action.stage];
      --sum;
    }
  }
  return most;
}

}  // namespace

Schedule::Schedule(std::vector<std::vector<Action>> actions_of_ranks,
                   int32_t number_of_microbatches)
    : actions(std::move(actions_of_ranks)), microbatches(number_of_microbatches) {
  for (const auto& of_rank : actions)
    for (const Action& action : of_rank) {
      if (action.stage < 0 || action.microbatch < 0 || action.microbatch >= microbatches)
        throw std::invalid_argument("actions: a stage or a microbatch is out of range");
      stages = std::max(stages, action.stage + 1);
    }
  rank_of.assign(stages, -1);
  for (size_t rank = 0; rank < actions.size(); ++rank)
    for (const Action& action : actions[rank]) rank_of[action.stage] = static_cast<int32_t>(rank);
  for (const auto& of_rank : actions) in_flight.push_back(most_in_flight(of_rank, stages));
}

Step simulate(const Schedule& schedule, const std::vector<StageTimes>& stages, double send,
              bool with_events) {
  const int32_t ranks = static_cast<int32_t>(schedule.actions.size());
  const int32_t count = schedule.stages, microbatches = schedule.microbatches;
  if (static_cast<int32_t>(stages.size()) != count)
    throw std::invalid_argument("stages: times of " + std::to_string(stages.size()) +
                                " stages for a schedule of " + std::to_string(count));
  // When the output of a stage, and the gradient of its input, are complete
  std::vector<double> forward(size_t(count) * microbatches, kNotYet), backward(forward);
  const auto at = [microbatches](int32_t stage, int32_t microbatch) {
    return size_t(stage) * microbatches + microbatch;
  };
  const auto arrives = [&](const std::vector<double>& done, int32_t from, int32_t to,
                           int32_t microbatch) {
    const double end = done[at(from, microbatch)];
    if (end == kNotYet) return kNotYet;
    return end + (schedule.rank_of[from] == schedule.rank_of[to] ? 0 : send);
  };

  Step step;
  step.busy.assign(ranks, 0);
  if (with_events) step.events.resize(ranks);
  std::vector<double> free(ranks, 0);
  std::vector<size_t> next(ranks, 0);
  std::vector<int32_t> ready(ranks);  // ranks that may be able to go on
  std::vector<char> listed(ranks, 1);
  for (int32_t rank = 0; rank < ranks; ++rank) ready[rank] = ranks - 1 - rank;
  while (!ready.empty()) {
    const int32_t rank = ready.back();
    ready.pop_back();
    listed[rank] = 0;
    for (; next[rank] < schedule.actions[rank].size(); ++next[rank]) {
      const Action action = schedule.actions[rank][next[rank]];
      const int32_t stage = action.stage, microbatch = action.microbatch;
      const StageTimes& times = stages[stage];
      double begin = free[rank], length = times.weight_grad;
      if (action.kind == Kind::F) {
        length = times.forward;
        if (stage > 0) begin = arrives(forward, stage - 1, stage, microbatch);
      } else if (action.kind != Kind::W) {
        length = times.input_grad + (action.kind == Kind::B ? times.weight_grad : 0);
        begin = stage == count - 1 ? forward[at(stage, microbatch)]
                                   : arrives(backward, stage + 1, stage, microbatch);
      }
      if (begin == kNotYet) break;
      begin = std::max(begin, free[rank]);
      const double end = begin + length;
      free[rank] = end;
      step.busy[rank] += length;
      if (with_events) step.events[rank].push_back({action, begin, end});
      int32_t neighbour = -1;
      if (action.kind == Kind::F) {
        forward[at(stage, microbatch)] = end;
        neighbour = stage + 1 < count ? schedule.rank_of[stage + 1] : -1;
      } else if (action.kind != Kind::W) {
        backward[at(stage, microbatch)] = end;
        neighbour = stage > 0 ? schedule.rank_of[stage - 1] : -1;
      }
      if (neighbour >= 0 && neighbour != rank && !listed[neighbour]) {
        listed[neighbour] = 1;
        ready.push_back(neighbour);
      }
    }
  }
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (next[rank] < schedule.actions[rank].size())
      throw std::invalid_argument("actions: the lists of the ranks wait for each other");
    step.time = std::max(step.time, free[rank]);
  }
  return step;
}

}  // namespace tp_ext::planner
