#include "autograd/weight_gather.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace tp_ext {
namespace {

thread_local GatherOrder::Ptr running_order;
thread_local int made_for_one_call = 0;

uint32_t version_of(const Tensor& x) { return x.is_inference() ? 0 : x._version(); }

int64_t backward_number() { return torch::autograd::get_current_graph_task_id(); }

// FSDP2 frees the memory of a weight that is not in use
bool has_memory(const Tensor& x) { return x.has_storage() && x.storage().nbytes() >= x.nbytes(); }

}  // namespace

MadeForOneCall::MadeForOneCall() { ++made_for_one_call; }
MadeForOneCall::~MadeForOneCall() { --made_for_one_call; }

GatherOrder::Ptr GatherOrder::running(const Tensor& shard) {
  const bool comes_again = made_for_one_call == 0 && shard.is_leaf() && !comm::traced(shard);
  return comes_again ? running_order : nullptr;
}

bool GatherOrder::is_running() { return static_cast<bool>(running_order); }

void GatherOrder::begin() {
  const std::lock_guard lock(mutex_);
  forward_.finish(forward_.number + 1);
  running_order = Ptr::reclaim_copy(this);
}

void GatherOrder::end() {
  running_order.reset();
  const std::lock_guard lock(mutex_);
  forward_.finish(forward_.number + 1);
}

// A shard written between its prefetch and its use. `p.data = t` is another storage, which cannot
// have the address of the old one, held here; writes in place are counted. Those through an alias
// made by `p.data` are not, nor could anything see them but a comparison of all elements, for which
// the host would wait for the device: that is the one thing a forward must not do to its weights
// (under FSDP2 it must not write them in any way).
bool GatherOrder::Coming::is_of(const Tensor& x) const {
  return shard.is_same(x) && x.has_storage() && storage.is_alias_of(x.storage()) &&
         version == version_of(x);
}

void GatherOrder::Pass::finish(int64_t next) {
  coming.reset();
  if (!now.empty()) known = std::exchange(now, {});
  as_known = true;
  number = next;
}

GatherOrder::Pass& GatherOrder::pass() {
  const int64_t task = backward_number();
  if (task < 0 || running_order.get() == this) return forward_;
  if (backward_.number != task) backward_.finish(task);
  return backward_;
}

Tensor GatherOrder::take(const Tensor& shard, const WeightShards& of) {
  std::optional<Coming> coming;
  {
    const std::lock_guard lock(mutex_);
    auto& now = pass();
    const size_t at = now.now.size();
    now.as_known = now.as_known && at < now.known.size() && now.known[at].shard.is_same(shard);
    now.now.push_back({shard, of});
    std::swap(coming, now.coming);
  }
  if (coming && coming->is_of(shard)) return coming->gather->wait();
  coming.reset();
  return comm::all_gather(shard, of.group, of.dim, of.split);
}

void GatherOrder::gather_next() {
  const std::lock_guard lock(mutex_);
  auto& now = pass();
  const size_t next = now.now.size();
  if (now.coming || !now.as_known || now.known.size() <= next) return;
  const auto& [shard, of] = now.known[next];
  if (!has_memory(shard)) return;
  now.coming.emplace(Coming{
      shard, shard.storage(), version_of(shard),
      std::make_shared<comm::Pending>(comm::all_gather_async(shard, of.group, of.dim, of.split))});
}

Tensor gathered_weight(const Tensor& shard, const WeightShards& of, const GatherOrder::Ptr& order) {
  if (of.split.sizes.size() == 1) return shard;
  if (!order) return comm::all_gather(shard, of.group, of.dim, of.split);
  const Tensor gathered = order->take(shard, of);
  order->gather_next();
  return gathered;
}

}  // namespace tp_ext
