#include "planner/predict.h"

#include <algorithm>
#include <cmath>

#include "planner/split.h"

namespace tp_ext::planner {
namespace {

constexpr double kHostLink = 32e9;    // bytes/s of PCIe 4.0 x16, over which offload moves
constexpr double kBucket = 25 << 20;  // of DDP, bytes
// [Note: Python on a CPU]: times the host's time for a kernel
constexpr double kHooks = 7.5;      // of FSDP2, for each tensor in a forward and in a backward
constexpr double kShardedStep = 8;  // of an optimizer over FSDP2's shards, for each tensor
constexpr double kAction = 26;      // of a pipeline's F, B, I or W

bool is_v(const std::string& schedule) {
  return schedule == "ZBVZeroBubble" || schedule == "DualPipeV";
}

bool splits_backward(const std::string& schedule) {
  return is_v(schedule) || schedule == "InterleavedZeroBubble";
}

bool has_rounds(const std::string& schedule) {
  return schedule == "Interleaved1F1B" || schedule == "InterleavedZeroBubble";
}

Group data_group(const Layout& layout) { return {layout.shards(), layout.tp}; }

Group expert_group(const Layout& layout) {
  return {layout.dp * layout.cp, layout.cp > 1 ? layout.tp : layout.tp * layout.ep};
}

}  // namespace

Planner::Planner(Workload workload, std::vector<Machine> machines, int64_t global_batch,
                 Schedules schedules)
    : workload_(std::move(workload)),
      machines_(std::move(machines)),
      machine_(machines_.at(0)),
      global_batch_(global_batch),
      schedules_(std::move(schedules)) {}

const Planner::Ranks& Planner::layers(const Layout& layout) {
  const bool accumulates = layout.microbatches(global_batch_) > 1;
  const auto key =
      std::make_tuple(layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.sequence_parallel,
                      layout.overlap_tp, layout.recompute, accumulates, layout.shares);
  const auto found = layers_.find(key);
  if (found != layers_.end()) return found->second;
  Ranks made;
  Layout of_rank = layout;
  const bool differ = layout.cut || machines_.size() > 1;
  for (; of_rank.rank < (differ ? layout.tp : 1); ++of_rank.rank)
    made.of.push_back(layers_of(of_rank, machine_of(of_rank.rank)));
  made.slowest = made.of[0];
  const auto wait_for = [](Layer& layer, const Layer& other) {
    if (other.forward.total() + other.backward() > layer.forward.total() + layer.backward())
      layer = other;
  };
  for (const Layers& other : made.of) {
    wait_for(made.slowest.first, other.first);
    wait_for(made.slowest.last, other.last);
    for (size_t k = 0; k < other.blocks.size(); ++k)
      wait_for(made.slowest.blocks[k], other.blocks[k]);
  }
  return layers_.emplace(key, std::move(made)).first->second;
}

Planner::Layers Planner::layers_of(const Layout& layout, const Machine& machine) const {
  const bool accumulates = layout.microbatches(global_batch_) > 1;
  Layers made;
  made.first = price(workload_.first, false, accumulates, workload_, layout, machine);
  made.last = price(workload_.last, false, accumulates, workload_, layout, machine);
  for (const BlockOps& block : workload_.blocks)
    made.blocks.push_back(price(block.ops, true, accumulates, workload_, layout, machine));
  return made;
}

std::vector<Planner::Stage> Planner::stages(const Layout& layout) {
  const Ranks& ranks = layers(layout);
  auto slowest = stages(layout, ranks.slowest, machine_);
  for (size_t rank = 0; ranks.of.size() > 1 && rank < ranks.of.size(); ++rank) {
    const auto other = stages(layout, ranks.of[rank], machine_of(rank));
    for (size_t i = 0; i < slowest.size(); ++i) {
      Stage& stage = slowest[i];
      stage.forward_gathers = std::max(stage.forward_gathers, other[i].forward_gathers);
      stage.backward_gathers = std::max(stage.backward_gathers, other[i].backward_gathers);
    }
  }
  return slowest;
}

std::vector<Planner::Stage> Planner::stages(const Layout& layout, const Layers& priced,
                                            const Machine& machine) {
  const int64_t count = layout.pp * layout.virtual_stages;
  auto& split = splits_[count];
  if (split.empty()) {
    // More stages than blocks: the first, and the last, have what is around the blocks alone
    const int64_t ends = std::max<int64_t>(0, count - workload_.layers);
    split = split_blocks(workload_.layers, count - ends);
    if (ends > 0) split.insert(split.begin(), 0);
    if (ends > 1) split.push_back(0);
  }
  std::vector<Stage> stages(count);
  size_t kind = 0;
  int64_t left = workload_.blocks.empty() ? 0 : workload_.blocks[0].layers;
  for (int64_t i = 0; i < count; ++i) {
    Stage& stage = stages[i];
    stage.first = i == 0;
    stage.last = i == count - 1;
    stage.blocks.assign(workload_.blocks.size(), 0);
    for (int64_t wanted = split[i]; wanted > 0;) {
      if (left == 0) left = workload_.blocks[++kind].layers;
      const int64_t taken = std::min(wanted, left);
      stage.blocks[kind] += taken;
      wanted -= taken;
      left -= taken;
    }
    for (size_t k = 0; k < stage.blocks.size(); ++k)
      if (stage.blocks[k]) stage.costs.add(priced.blocks[k], double(stage.blocks[k]));
    if (stage.first) stage.costs.add(priced.first, 1);
    if (stage.last) stage.costs.add(priced.last, 1);
    if (layout.zero >= 2) add_gathers(layout, priced, machine, stage);
    if (layout.pp > 1) {
      const double action = machine.python(kAction);
      stage.costs.forward.host += action;
      stage.costs.input_grad.host += action;
      if (splits_backward(layout.schedule)) stage.costs.weight_grad.host += action;
    }
  }
  return stages;
}

// FSDP2: the gather of a block runs during the block before it, the reduction of a block's
// gradients during the backward of the next one. Only the last microbatch reduces, so that its
// share of each is counted.
void Planner::add_gathers(const Layout& layout, const Layers& layers, const Machine& machine,
                          Stage& stage) const {
  const double microbatches = double(layout.microbatches(global_batch_));
  const bool again = layout.zero == 3 && layout.pp == 1;        // for each backward, too
  const double rounds = layout.pp == 1 ? 1 : 1 / microbatches;  // a pipeline keeps what it gathers
  for (size_t k = 0; k < stage.blocks.size(); ++k) {
    if (!stage.blocks[k]) continue;
    const Layer& block = layers.blocks[k];
    const double number = double(stage.blocks[k]);
    const auto whole = padded(layout, block);
    const auto [dense, experts] = by_group(layout, whole.first, whole.second);
    const auto time = [&, dense = dense, experts = experts](Collective kind, double bytes) {
      return (machine.collective(kind, data_group(layout), bytes * dense) +
              machine.collective(kind, expert_group(layout), bytes * experts)) /
             machine.gather;
    };
    const double gather = time(Collective::AllGather, layout.param_bytes);
    const double reduce = time(Collective::ReduceScatter, layout.grad_bytes);
    // What was gathered is copied out of its buffer, and gradients into theirs
    const double out = machine.copy(number * layout.param_bytes * (dense + experts));
    const double in = machine.copy(number * layout.grad_bytes * (dense + experts));
    const double forward = block.forward.total(), backward = block.backward();
    const double hooks = machine.python(kHooks * number * block.tensors);
    stage.forward_gathers += hooks;
    stage.backward_gathers += hooks;
    stage.forward_gathers += rounds * (number * machine.shown(gather, forward) + out +
                                       std::min(gather, forward));  // nothing precedes the first
    const double both = (again ? gather : 0) + reduce;
    const double last = number * machine.shown(both, backward) + (again ? out : 0) + in +
                        std::min(reduce, backward);
    const double others = again ? number * machine.shown(gather, backward) + out : 0;
    stage.backward_gathers += (last + others * (microbatches - 1)) / microbatches;
  }
}

std::vector<std::vector<int64_t>> Planner::stages_of_ranks(const Layout& layout) {
  std::vector<std::vector<int64_t>> own(layout.pp);
  for (int64_t rank = 0; rank < layout.pp; ++rank) {
    if (is_v(layout.schedule) && layout.pp > 1) {
      own[rank] = {rank, 2 * layout.pp - 1 - rank};
      continue;
    }
    for (int64_t i = 0; i < layout.virtual_stages; ++i) own[rank].push_back(i * layout.pp + rank);
  }
  return own;
}

// [Note: long pipelines are extrapolated]
const Planner::Sample& Planner::sample(const Layout& layout) {
  const int64_t microbatches = layout.microbatches(global_batch_), pp = layout.pp;
  const auto key = std::make_tuple(layout.schedule, pp, layout.virtual_stages, microbatches);
  const auto found = samples_.find(key);
  if (found != samples_.end()) return found->second;
  int64_t fewer = 4 * pp * (is_v(layout.schedule) ? 2 : 1), step = pp;
  if (layout.schedule == "LoopedBFS") fewer *= layout.virtual_stages;
  if (has_rounds(layout.schedule)) {
    const int64_t rounds = std::max<int64_t>(1, microbatches / pp);
    step = microbatches / rounds;
    fewer = 4 * step;
  }
  Sample made;
  const auto get = [&](int64_t number) {
    return schedules_(layout.schedule, pp, layout.virtual_stages, number);
  };
  if (fewer + step >= microbatches) {
    made.schedule = get(microbatches);
  } else {
    made.schedule = get(fewer);
    made.longer = get(fewer + step);
    made.further = double(microbatches - fewer) / double(step);
  }
  return samples_.emplace(key, std::move(made)).first->second;
}

double Planner::message_bytes(const Layout& layout) const {
  double tokens = double(divide_up(layout.micro_batch * workload_.seq, layout.cp));
  if (layout.sequence_parallel) tokens = double(layout.longest(int64_t(tokens)));
  return tokens * workload_.hidden * layout.element;
}

// Without ep experts are gathered and reduced with the rest of their block
std::pair<double, double> Planner::by_group(const Layout& layout, double dense, double experts) {
  return layout.ep > 1 ? std::pair(dense, experts) : std::pair(dense + experts, 0.0);
}

std::pair<double, double> Planner::padded(const Layout& layout, const Costs& costs) const {
  if (!workload_.experts) return {costs.dense, costs.experts};
  const auto more = [](int64_t rows, int64_t ranks) {
    return double(divide_up(rows, ranks) * ranks) / double(rows);
  };
  // Few ranks have rows of a router, or experts, where there are fewer than ranks
  const int64_t own = divide_up(workload_.experts, layout.ep);
  return {costs.dense + costs.routers * (more(workload_.experts, layout.shards()) - 1),
          costs.experts * more(own, layout.dp * layout.cp)};
}

double Planner::send_time(const Layout& layout) const {
  const int64_t stride = layout.tp * layout.shards();
  return layout.pp == 1 ? 0 : machine_.message(stride, message_bytes(layout));
}

std::pair<double, double> Planner::parameters(const std::vector<Stage>& stages,
                                              const std::vector<int64_t>& own,
                                              const Layout& layout) const {
  double dense = 0, experts = 0;
  bool first = false, last = false;
  for (const int64_t index : own) {
    dense += stages[index].costs.dense;
    experts += stages[index].costs.experts;
    first |= stages[index].first;
    last |= stages[index].last;
  }
  if (workload_.tied && first && last)
    dense -= double(layout.share(workload_.vocab)) * workload_.hidden;
  return {dense, experts};
}

double Planner::data_time(const Layout& layout, const std::vector<Stage>& stages,
                          const std::vector<int64_t>& own, const Layers& kinds,
                          const Machine& machine, std::vector<Traffic>& rows) const {
  const auto parameters_of_rank = parameters(stages, own, layout);
  const double dense = parameters_of_rank.first, experts = parameters_of_rank.second;
  const double microbatches = double(layout.microbatches(global_batch_));
  double exposed = 0;
  const auto call = [&](Collective kind, Group group, double number, double payload, double hidden,
                        double share) {
    if (group.size == 1 || payload <= 0) return;
    const double time = number * machine.collective(kind, group, payload) / share;
    const double seen = machine.shown(time, hidden);
    exposed += seen;
    add_traffic(rows, {Axis::Dp, kind, group.size, number, payload, time, seen});
  };
  const Group data = data_group(layout), of_experts = expert_group(layout);
  if (layout.zero < 2) {
    const auto [of_all, of_some] = by_group(layout, dense, experts);
    const double bytes = layout.grad_bytes * of_all;
    const double buckets = std::max(1.0, std::ceil(bytes / kBucket));
    // DDP reduces during the last backward, all but its last bucket; a pipeline after all of them
    const double hidden = layout.pp > 1 ? 0 : stages[0].costs.backward() * (1 - 1 / buckets);
    call(Collective::AllReduce, data, layout.pp > 1 ? 1 : buckets,
         layout.pp > 1 ? bytes : bytes / buckets, hidden, 1);
    call(Collective::AllReduce, of_experts, 1, layout.grad_bytes * of_some, 0, 1);
    if (layout.pp == 1 && data.size > 1) exposed += machine.copy(2 * bytes);  // to buckets and back
    if (layout.zero ==
        1) {  // each parameter after the step of the optimizer, by the rank that has it
      double tensors = workload_.tied && layout.pp == 1 ? -1 : 0;
      for (const int64_t index : own) tensors += stages[index].costs.tensors;
      call(Collective::Broadcast, data, tensors, layout.param_bytes * (dense + experts) / tensors,
           0, 1);
    }
    return exposed;
  }
  // Their exposed time is in the passes; of each block, and of what is around the blocks
  const double forwards = layout.pp > 1 ? 1 : microbatches;
  const double again = layout.pp == 1 && layout.zero == 3 ? 2 : 1;  // for a block's backward, too
  const double before = exposed;
  double whole_dense = 0;
  for (const int64_t index : own) whole_dense += stages[index].costs.dense;
  const auto both = [&](double number, double gathers, double dense_of_one, double experts_of_one) {
    for (const auto& [group, one] :
         {std::pair(data, dense_of_one), std::pair(of_experts, experts_of_one)}) {
      call(Collective::AllGather, group, gathers * number, layout.param_bytes * one, 0,
           machine.gather);
      call(Collective::ReduceScatter, group, number, layout.grad_bytes * one, 0, machine.gather);
    }
  };
  for (const int64_t index : own) {
    double rest = stages[index].costs.dense;
    for (size_t k = 0; k < stages[index].blocks.size(); ++k)
      if (const double number = double(stages[index].blocks[k]); number > 0) {
        const auto whole = padded(layout, kinds.blocks[k]);
        const auto one = by_group(layout, whole.first, whole.second);
        both(number, forwards * again, one.first, one.second);
        rest -= number * kinds.blocks[k].dense;
      }
    // Stays for backward, and the loss may read it. Of one stage a tied weight is one
    both(1, forwards, layout.pp == 1 ? rest - (whole_dense - dense) : rest, 0);
  }
  return before;
}

// Adam reads parameters, gradients and states and writes all but the gradients. With offload the host
// does it while the device waits: gradients go there, and parameters come back
double Planner::optimizer_time(const Layout& layout, const Memory& memory, double tensors,
                               const Machine& machine) {
  const double shards = layout.zero >= 1 ? double(layout.shards()) : 1;
  double parameters = memory.parameters, gradients = memory.gradients;
  if (layout.zero == 1 || layout.zero == 2) parameters /= shards;
  if (layout.zero == 1) gradients /= shards;
  if (layout.offload) return (parameters + gradients) / kHostLink;
  const double moved = 2 * parameters + gradients + 2 * memory.states;
  const double python = layout.zero >= 2 ? machine.python(kShardedStep * tensors) : 0;
  return moved / machine.optimizer_bandwidth + python;
}

// A lower bound of the simulated step: no rank is faster than all of its work, after the forward
// through the stages before its first, and before the backward through them where that comes last.
double Planner::bound(const Layout& layout) {
  const auto priced = stages(layout);
  const auto own = stages_of_ranks(layout);
  const double microbatches = double(layout.microbatches(global_batch_));
  const double send = send_time(layout);
  const bool splits = splits_backward(layout.schedule) && layout.pp > 1;
  double bound = 0;
  for (int64_t rank = 0; rank < layout.pp; ++rank) {
    double work = 0, outside = 0;
    for (const int64_t index : own[rank]) {
      const Stage& stage = priced[index];
      work += stage.costs.forward.total() + stage.costs.backward() + stage.forward_gathers +
              stage.backward_gathers;
    }
    for (int64_t index = 0; index < own[rank].front(); ++index) {
      const Costs& costs = priced[index].costs;
      outside += costs.forward.total() + send;
      if (!splits) outside += costs.backward() + send;
    }
    bound = std::max(bound, microbatches * work + outside);
  }
  return bound;
}

Prediction Planner::predict(const Layout& layout) {
  const auto priced = stages(layout);
  const auto own = stages_of_ranks(layout);
  const Ranks& of_layers = layers(layout);
  const Layers& kinds = of_layers.slowest;
  const double microbatches = double(layout.microbatches(global_batch_));
  Prediction result;
  result.layout = layout;
  result.send = send_time(layout);
  result.memory.resize(layout.pp);
  std::vector<std::vector<Stage>> of_ranks;
  Layout of_rank = layout;
  for (size_t rank = 0; rank < of_layers.of.size(); ++rank) {
    of_rank.rank = int64_t(rank);
    of_ranks.push_back(stages(layout, of_layers.of[rank], machine_of(rank)));
    const auto memories = memory(of_rank, of_ranks[rank], of_layers.of[rank]);
    for (int64_t index = 0; index < layout.pp; ++index)
      result.memory[index].push_back(memories[index]);
  }
  for (const Stage& stage : priced)
    result.stages.push_back({stage.costs.forward.total() + stage.forward_gathers,
                             stage.costs.input_grad.total() + stage.backward_gathers,
                             stage.costs.weight_grad.total()});

  double time = 0, without_sends = 0;
  if (layout.pp == 1) {
    const StageTimes& one = result.stages[0];
    time = without_sends = microbatches * (one.forward + one.input_grad + one.weight_grad);
  } else {
    const Sample& steps = sample(layout);
    const auto simulated = [&](double send) {
      const double fewer = simulate(*steps.schedule, result.stages, send, false).time;
      if (!steps.longer) return fewer;
      return fewer +
             steps.further * (simulate(*steps.longer, result.stages, send, false).time - fewer);
    };
    time = simulated(result.send);
    without_sends = std::min(time, simulated(0));
  }

  double after = 0;
  const double ranks = double(layout.pp);
  for (int64_t rank = 0; rank < layout.pp; ++rank) {
    std::vector<Traffic> rows;
    for (const int64_t index : own[rank]) {
      const Stage& stage = priced[index];
      Seconds work = stage.costs.forward;
      work += stage.costs.input_grad;
      work += stage.costs.weight_grad;
      result.breakdown.work += work * (microbatches / ranks);
      result.breakdown.dp +=
          (stage.forward_gathers + stage.backward_gathers) * microbatches / ranks;
      const auto add = [&](const Layer& layer, double times) {
        for (const Traffic& row : layer.traffic) add_traffic(rows, row, times * microbatches);
      };
      for (size_t k = 0; k < stage.blocks.size(); ++k)
        if (stage.blocks[k]) add(kinds.blocks[k], double(stage.blocks[k]));
      if (stage.first) add(kinds.first, 1);
      if (stage.last) add(kinds.last, 1);
    }
    // Messages to and from other ranks: activations forward, their gradients backward
    double outward = 0;
    const auto is_own = [&](int64_t index) {
      return std::find(own[rank].begin(), own[rank].end(), index) != own[rank].end();
    };
    for (const int64_t index : own[rank])
      for (const int64_t other : {index - 1, index + 1})
        if (other >= 0 && other < int64_t(priced.size()) && !is_own(other)) ++outward;
    if (outward > 0)
      for (const Collective kind : {Collective::Send, Collective::Recv})
        add_traffic(rows, {Axis::Pp, kind, layout.pp, outward * microbatches, message_bytes(layout),
                           outward * microbatches * result.send, 0});
    const auto tied = [&](int64_t end) { return workload_.tied && is_own(end) && outward > 0; };
    const int64_t last = int64_t(priced.size()) - 1;
    if (tied(0) != tied(last))  // the gradient of a tied weight, to its other stage and from there
      for (const Collective kind : {Collective::Send, Collective::Recv}) {
        const double rows_of_rank = double(layout.longest(workload_.vocab));
        const double elements =
            rows_of_rank * workload_.hidden / (layout.zero >= 2 ? double(layout.shards()) : 1);
        const double payload = elements * layout.param_bytes + 4;
        add_traffic(rows, {Axis::Pp, kind, layout.pp, 1, payload,
                           machine_.message(layout.tp * layout.shards(), payload), 0});
      }
    // Of the rank of tp that ends last
    double data = 0, optimizer = 0;
    std::vector<Traffic> data_rows;
    for (size_t tp_rank = 0; tp_rank < of_ranks.size(); ++tp_rank) {
      of_rank.rank = int64_t(tp_rank);
      const auto& costs = of_ranks[tp_rank];
      const Machine& machine = machine_of(tp_rank);
      std::vector<Traffic> of_data;
      const double exposed =
          data_time(of_rank, costs, own[rank], of_layers.of[tp_rank], machine, of_data);
      double tensors = 0;
      for (const int64_t index : own[rank]) tensors += costs[index].costs.tensors;
      const double steps = optimizer_time(layout, result.memory[rank][tp_rank], tensors, machine);
      if (tp_rank > 0 && exposed + steps <= data + optimizer) continue;
      data = exposed;
      optimizer = steps;
      data_rows = std::move(of_data);
    }
    for (const Traffic& row : data_rows) add_traffic(rows, row);
    result.breakdown.dp += data / ranks;
    result.breakdown.optimizer += optimizer / ranks;
    after = std::max(after, data + optimizer);
    result.traffic.push_back(std::move(rows));
  }
  result.step_time = time + after;
  result.breakdown.pp = time - without_sends;
  result.breakdown.bubble = result.step_time - result.breakdown.total();
  return result;
}

}  // namespace tp_ext::planner
