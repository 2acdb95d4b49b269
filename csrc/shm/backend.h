// The engine as a c10d backend for CPU tensors, "tp_shm".

#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shm/core/engine.h"
#include "shm/core/reductions.h"
#include "shm/tensors.h"
#include "tp_ext/export.h"

namespace tp_ext::shm {

// Raises ValueError for one that the backends of this package do not have
TP_EXT_API Operation operation_of(const c10d::ReduceOp& op);

class ShmBackend : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using milliseconds = std::chrono::milliseconds;

  ShmBackend(std::shared_ptr<Engine> engine, int rank, int size, milliseconds timeout);

  const std::string getBackendName() const override { return "tp_shm"; }
  void setTimeout(milliseconds timeout) override { timeout_ = timeout; }
  uint64_t getSequenceNumberForGroup() override { return engine_->calls(); }
  void setSequenceNumberForGroup() override {}
  void abort() override { engine_->abort_group("the group was aborted"); }

  // Gives each row of the sum of x over the ranks to `end`; false, and nothing is done, if x is
  // larger than what is summed in one step
  bool all_reduce_rows(const at::Tensor& x, const AllReduceRows::End& end);

  // Reductions and the barrier: backend.cpp
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Work reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                      const c10d::ReduceScatterOptions& opts) override;
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                            const c10d::ReduceScatterOptions& opts) override;
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                       const c10d::ReduceScatterOptions& opts) override;
  Work barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Data movement: backend_data_movement.cpp
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Work allgather(std::vector<Tensors>& out, Tensors& in,
                 const c10d::AllgatherOptions& opts) override;
  Work allgather_coalesced(std::vector<Tensors>& out, Tensors& in,
                           const c10d::AllgatherOptions& opts) override;
  Work _allgather_base(at::Tensor& out, at::Tensor& in,
                       const c10d::AllgatherOptions& opts) override;
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                       const c10d::AllgatherOptions& opts) override;
  Work gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& opts) override;
  Work scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& opts) override;
  Work alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                     std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& opts) override;
  Work alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& opts) override;
  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;

 private:
  // The tensors of a call: those to keep alive until it is done, and the results to copy back then
  struct Buffers {
    Tensors keep, results;
    Outputs outputs;
  };
  struct Terms {
    c10d::OpType type;
    bool async;
    milliseconds timeout;
  };
  template <typename Options>
  static Terms terms(const Options& opts, c10d::OpType type, bool last = true) {
    return {type, opts.asyncOp || !last, opts.timeout};  // all but the last in the background
  }

  Member member() { return engine_->member(); }
  int64_t most_in_a_step() { return std::min(AllReduce::kMaxBytes, member().slot_bytes()); }
  int checked_rank(int64_t rank, const char* name) const;
  void check_count(size_t n, const char* name) const;

  // `in` is `t` itself, or what is summed into it
  Work all_reduce(const at::Tensor& t, const at::Tensor& in, const c10d::ReduceOp& op,
                  const Tensors& results, const Terms& terms);
  Work scatter_sums(const at::Tensor& out, const Tensors& in, const c10d::ReduceOp& op,
                    const Terms& terms);
  Work scatter_sums(const at::Tensor& out, const at::Tensor& in, const c10d::ReduceOp& op,
                    const Terms& terms);
  Work gather_all(const Tensors& out, const at::Tensor& in, int to, const Terms& terms);
  Work gather_all(const at::Tensor& out, const at::Tensor& in, const Terms& terms);

  template <typename Issue>
  static Work each(size_t n, Issue issue);

  Work run(std::unique_ptr<Collective> call, Buffers buffers, const Terms& terms);
  // What a task does at its end: stores the results, ends its range in a profile
  static std::function<void()> finish_of(const Task& task, Buffers buffers);
  Work transfer(int peer, int tag, Buffers buffers, c10d::OpType type);

  const std::shared_ptr<Engine> engine_;
  milliseconds timeout_;
};

// Calls end in order: when the last has ended, all have
template <typename Issue>
ShmBackend::Work ShmBackend::each(size_t n, Issue issue) {
  TORCH_CHECK_VALUE(n > 0, "tensors: there must be at least one");
  Work work;
  for (size_t i = 0; i < n; ++i) work = issue(i, i + 1 == n);
  return work;
}

// torch calls this for each process group. Raises on every rank if the ranks are not on one host.
TP_EXT_API c10::intrusive_ptr<c10d::Backend> create_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, const std::string& name);

}  // namespace tp_ext::shm
