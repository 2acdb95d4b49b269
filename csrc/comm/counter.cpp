#include "comm/counter.h"

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "comm/collectives.h"

namespace tp_ext::comm {
namespace {

using at::IValue;

// An operator of c10d and the positions of its tensors among its arguments. The full tensors of a
// gather exist on one rank only, so every rank computes bytes from its local ones.
constexpr size_t kNone = 99, kOwnTimesSize = 98;
struct Operator {
  const char* name;
  const char* kind;
  size_t full, own, group;
};
constexpr Operator kOperators[] = {
    {"allreduce_", "all_reduce", 0, kNone, 1},
    {"allreduce_coalesced_", "all_reduce", 0, kNone, 1},
    {"allgather_", "all_gather", 0, 1, 2},
    {"_allgather_base_", "all_gather", 0, 1, 2},
    {"allgather_coalesced_", "all_gather", 0, 1, 2},
    {"allgather_into_tensor_coalesced_", "all_gather", 0, 1, 2},
    {"reduce_scatter_", "reduce_scatter", 1, 0, 2},
    {"_reduce_scatter_base_", "reduce_scatter", 1, 0, 2},
    {"reduce_scatter_tensor_coalesced_", "reduce_scatter", 1, 0, 2},
    {"alltoall_", "all_to_all", 1, kNone, 2},
    {"alltoall_base_", "all_to_all", 1, kNone, 2},
    {"broadcast_", "broadcast", 0, kNone, 1},
    {"reduce_", "reduce", 0, kNone, 1},
    {"gather_", "gather", kOwnTimesSize, 1, 2},
    {"gather_into_tensor_", "gather", kOwnTimesSize, 1, 2},
    {"scatter_", "scatter", kOwnTimesSize, 0, 2},
    {"send", "send", 0, kNone, 1},
    {"recv_", "recv", 0, kNone, 1},
    {"recv_any_source_", "recv", 0, kNone, 1},
    {"barrier", "barrier", kNone, kNone, 1},
    {"monitored_barrier_", "barrier", kNone, kNone, 1},
};

// Operators over symmetric memory, which name their group: a collective, or a GEMM with one inside.
// `x` is this rank's input.
struct Symmetric {
  const char* name;
  const char* kind;
  size_t x, group;
};
constexpr Symmetric kSymmetric[] = {
    {"one_shot_all_reduce", "all_reduce", 0, 2},
    {"one_shot_all_reduce_out", "all_reduce", 0, 2},
    {"one_shot_all_reduce_copy", "all_reduce", 1, 3},
    {"one_shot_all_reduce_copy_out", "all_reduce", 1, 3},
    {"two_shot_all_reduce_", "all_reduce", 0, 2},
    {"two_shot_all_reduce_out", "all_reduce", 0, 2},
    {"multimem_all_reduce_", "all_reduce", 0, 2},
    {"multimem_one_shot_all_reduce", "all_reduce", 0, 2},
    {"multimem_one_shot_all_reduce_out", "all_reduce", 0, 2},
    {"fused_all_gather_matmul", "all_gather", 0, 3},
    {"fused_matmul_reduce_scatter", "reduce_scatter", 0, 4},
};

// Bytes of a tensor, a list of tensors, or a list of lists
int64_t bytes_of(const IValue& value) {
  if (value.isTensor()) {
    const auto& x = value.toTensor();
    return x.defined() ? x.numel() * static_cast<int64_t>(x.element_size()) : 0;
  }
  int64_t bytes = 0;
  if (value.isList())
    for (const IValue& one : value.toListRef()) bytes += bytes_of(one);
  return bytes;
}

// Bytes of an all-to-all that stay local: block `rank` of the input
int64_t own_block(const Operator& op, c10::ArrayRef<IValue> inputs, int64_t full, int64_t rank,
                  int64_t size) {
  if (!inputs[1].isTensor()) return bytes_of(inputs[1].toListRef()[rank]);
  const auto rows = inputs[1].toTensor().size(0);
  const auto lengths = inputs[4].toIntVector();
  if (lengths.empty()) return full / size;
  return rows == 0 ? 0 : full / rows * lengths[rank];
}

CollectiveCount described(const Operator& op, c10::ArrayRef<IValue> inputs) {
  const auto group = inputs[op.group].toCustomClass<c10d::ProcessGroup>();
  const int64_t size = group->getSize();
  int64_t own = op.own == kNone ? 0 : bytes_of(inputs[op.own]);
  int64_t full = 0;
  if (op.full == kOwnTimesSize)
    full = own * size;
  else if (op.full != kNone)
    full = bytes_of(std::strcmp(op.name, "allreduce_") == 0  // tp_shm's sum has its input behind it
                        ? inputs[op.full].toListRef()[0]
                        : inputs[op.full]);
  if (std::strcmp(op.kind, "all_to_all") == 0)
    own = own_block(op, inputs, full, group->getRank(), size);
  return CollectiveCount{group->getGroupName(),          size, op.kind, full, own, 1,
                         std::string("c10d::") + op.name};
}

CollectiveCount described(const Symmetric& op, c10::ArrayRef<IValue> inputs) {
  const std::string group = inputs[op.group].toStringRef();
  const int64_t p = size(group);
  int64_t full = bytes_of(inputs[op.x]), own = 0;
  if (std::strcmp(op.kind, "all_gather") == 0) {
    own = full;
    full *= p;
  } else if (std::strcmp(op.kind, "reduce_scatter") == 0) {  // of x w, w [in, out]
    const auto& w = inputs[op.x + 1].toTensor();
    full = w.size(0) == 0 ? 0 : full / w.size(0) * w.size(1);
    own = full / p;
  }
  return CollectiveCount{group, p, op.kind, full, own, 1, std::string("symm_mem::") + op.name};
}

// All open counters. Names and numbers, no group.
class Counters {
 public:
  int64_t open(bool keep_calls) {
    std::lock_guard lock(mutex_);
    if (counters_.empty()) listener_ = at::addGlobalCallback(listener());
    counters_[++last_].keeps_calls = keep_calls;
    return last_;
  }
  void close(int64_t id) {
    std::lock_guard lock(mutex_);
    if (counters_.erase(id) && counters_.empty()) at::removeCallback(listener_);
  }
  std::vector<CollectiveCount> read(int64_t id) {
    std::lock_guard lock(mutex_);
    return find(id).counts;
  }
  std::vector<CollectiveCount> read_calls(int64_t id) {
    std::lock_guard lock(mutex_);
    return find(id).calls;
  }
  void add(const CollectiveCount& call) {
    std::lock_guard lock(mutex_);
    for (auto& [id, counter] : counters_) counter.add(call);
  }

 private:
  struct Counter {
    std::map<std::tuple<std::string, std::string, int64_t, int64_t>, size_t> places;
    std::vector<CollectiveCount> counts, calls;
    bool keeps_calls = false;

    void add(const CollectiveCount& call) {
      if (keeps_calls) calls.push_back(call);
      const auto [place, is_new] =
          places.try_emplace({call.group, call.kind, call.full, call.own}, counts.size());
      if (is_new)
        counts.push_back(call);
      else
        ++counts[place->second].number;
    }
  };

  static at::RecordFunctionCallback listener();
  const Counter& find(int64_t id) const {
    const auto found = counters_.find(id);
    TORCH_CHECK_VALUE(found != counters_.end(), "id: ", id, " must be that of an open counter");
    return found->second;
  }

  std::mutex mutex_;
  std::map<int64_t, Counter> counters_;
  int64_t last_ = 0;
  at::CallbackHandle listener_ = 0;
};

Counters& counters() {
  static Counters all;
  return all;
}

// Counts the call if its name, without the namespace, is in the table
template <typename Operators>
void hear(const at::RecordFunction& fn, const char* space, const Operators& operators) {
  const char* name = fn.name();
  const size_t length = std::strlen(space);
  if (std::strncmp(name, space, length) != 0) return;
  for (const auto& op : operators)
    if (std::strcmp(name + length, op.name) == 0) counters().add(described(op, fn.inputs()));
}

// Runs before every operator that the dispatcher calls. Functional collectives end in c10d's
// operators.
std::unique_ptr<at::ObserverContext> heard(const at::RecordFunction& fn) {
  hear(fn, "c10d::", kOperators);
  hear(fn, "symm_mem::", kSymmetric);
  return nullptr;
}

// [Note: collectives are counted where the profiler listens]
at::RecordFunctionCallback Counters::listener() {
  return at::RecordFunctionCallback(heard).needsInputs(true).scopes({at::RecordScope::FUNCTION});
}

}  // namespace

int64_t open_counter(bool keep_calls) { return counters().open(keep_calls); }
void close_counter(int64_t id) { counters().close(id); }
std::vector<CollectiveCount> read_counter(int64_t id) { return counters().read(id); }
std::vector<CollectiveCount> read_calls(int64_t id) { return counters().read_calls(id); }

}  // namespace tp_ext::comm
