// The event simulation of one step of a pipeline: each rank runs its list of actions in order, and
// an action begins when the rank is free and what it needs has arrived. Messages overlap with
// computation.

#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace tp_ext::planner {

// B is I and then W in one action
enum class Kind : uint8_t { F, B, I, W };

struct Action {
  Kind kind;
  int32_t stage;  // of the whole pipeline
  int32_t microbatch;
};

struct Event {
  Action action;
  double start, end;
};

// The lists of all ranks, for one number of microbatches
struct Schedule {
  Schedule() = default;
  Schedule(std::vector<std::vector<Action>> actions_of_ranks, int32_t number_of_microbatches);

  std::vector<std::vector<Action>> actions;
  int32_t microbatches = 0;
  int32_t stages = 0;
  std::vector<int32_t> rank_of;                 // of each stage
  std::vector<std::vector<int32_t>> in_flight;  // of each rank: most held microbatches, by stage of
                                                // the rank, at the time of the largest number
};

// Seconds of one microbatch in one stage
struct StageTimes {
  double forward = 0, input_grad = 0, weight_grad = 0;
};

struct Step {
  double time = 0;
  std::vector<double> busy;                // of each rank
  std::vector<std::vector<Event>> events;  // of each rank, if they were asked for
};

// Throws std::invalid_argument if the lists wait for each other for ever.
Step simulate(const Schedule& schedule, const std::vector<StageTimes>& stages, double send,
              bool with_events);

}  // namespace tp_ext::planner
