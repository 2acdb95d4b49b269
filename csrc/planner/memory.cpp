// The bytes that the ranks of a pipeline hold in a step.

#include <algorithm>

#include "planner/predict.h"

namespace tp_ext::planner {

std::vector<Memory> Planner::memory(const Layout& layout, const std::vector<Stage>& stages,
                                    const Layers& priced) {
  const auto own = stages_of_ranks(layout);
  const int64_t microbatches = layout.microbatches(global_batch_);
  const double shards = double(layout.shards()), expert_shards = double(layout.dp * layout.cp);
  std::vector<Memory> result(layout.pp);
  for (int64_t rank = 0; rank < layout.pp; ++rank) {
    Memory& memory = result[rank];
    const auto [dense, experts] = parameters(stages, own[rank], layout);
    const double whole = dense + experts;
    double shard = dense / shards + experts / expert_shards;
    for (const int64_t index : own[rank]) {
      if (layout.zero < 2) break;
      const auto [all, routed] = padded(layout, stages[index].costs);
      shard += (all - stages[index].costs.dense) / shards;
      shard += (routed - stages[index].costs.experts) / expert_shards;
    }
    const bool gathers = layout.zero >= 2 && shards > 1;
    memory.parameters = layout.param_bytes * (layout.zero == 3 ? shard : whole);
    memory.gradients = layout.grad_bytes * (layout.zero >= 2 ? shard : whole);
    memory.states = layout.offload ? 0 : layout.state_bytes * (layout.zero >= 1 ? shard : whole);

    double recomputed = 0, largest = 0, around = 0;  // the largest block, and what is around them
    for (const int64_t index : own[rank]) {
      for (size_t k = 0; k < stages[index].blocks.size(); ++k)
        if (stages[index].blocks[k])
          largest = std::max(largest, priced.blocks[k].dense + priced.blocks[k].experts);
      recomputed = std::max(recomputed, stages[index].costs.recomputed);
      memory.logits += stages[index].costs.logits;
      around += (stages[index].first ? priced.first.dense : 0) +
                (stages[index].last ? priced.last.dense : 0);
    }
    const double some = std::min(whole, around + 2 * largest);
    // Two blocks are gathered at once, unless a stage keeps all that it has gathered; without the
    // reduction of every microbatch the gradients of the others wait unsharded
    const bool keeps = layout.zero == 2 || layout.pp > 1;
    if (gathers && layout.zero == 2)  // of which the parameters are one copy
      memory.buffers += layout.param_bytes * shard;
    else if (gathers)
      memory.buffers += layout.param_bytes * (keeps ? whole : some);
    if (gathers) memory.buffers += layout.grad_bytes * (microbatches > 1 ? whole : largest);
    // The weights that autocast casts, which backward needs, too; FSDP2 casts what it gathers
    if (layout.param_bytes > layout.element && !gathers) memory.buffers += layout.element * whole;

    memory.buffers += recomputed;
    if (layout.pp == 1) {
      memory.activations = stages[0].costs.saved;
    } else {
      const Sample& steps = sample(layout);
      for (const int64_t index : own[rank]) {
        double held = steps.schedule->in_flight[rank][index];
        if (steps.longer)
          held += steps.further * double(steps.longer->in_flight[rank][index] -
                                         steps.schedule->in_flight[rank][index]);
        memory.activations += held * stages[index].costs.saved;
      }
    }
    memory.peak = memory.parameters + memory.gradients + memory.states + memory.activations +
                  memory.buffers + memory.logits;
  }
  return result;
}

Planner::Need Planner::need(const Layout& layout) {
  const Ranks& ranks = layers(layout);
  Layout of_rank = layout;
  Need need;
  double lacking = 0;
  for (size_t rank = 0; rank < ranks.of.size(); ++rank) {
    const Machine& machine = machine_of(rank);
    of_rank.rank = int64_t(rank);
    const auto priced = stages(layout, ranks.of[rank], machine);
    for (const Memory& one : memory(of_rank, priced, ranks.of[rank])) {
      const double lack = one.peak - machine.memory;
      need.most = std::max(need.most, one.peak);
      need.fits = need.fits && lack <= 0;
      if (need.peak > 0 && lack <= lacking) continue;
      need.peak = one.peak;
      need.rank = int64_t(rank);
      lacking = lack;
    }
  }
  return need;
}

}  // namespace tp_ext::planner
