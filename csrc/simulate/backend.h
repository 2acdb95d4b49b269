// A c10d backend of a rank whose group is in one process, "simulated". It puts every call into one
// form; tp_ext.simulation collects those of all ranks and decides which rank runs.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "simulate/call.h"

namespace tp_ext::simulate {

// What a thread sleeps on while others run. It lets go of Python's lock before it wakes another
// thread, which thus wakes up once and not twice.
class Turn {
 public:
  void give();
  bool take(double seconds);  // false: nobody gave it in this time

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool given_ = false;
};

// The Python object of this rank in its group. Python's lock is taken for each call.
class Member {
 public:
  explicit Member(pybind11::object object);
  void issue(const CallPtr& call) const;  // executes it if it is the last rank's
  void wait(const CallPtr& call) const;   // runs other ranks until it is done
  void poll() const;                      // runs other ranks once

 private:
  std::shared_ptr<pybind11::object> object_;
};

class SimulatedWork : public c10d::Work {
 public:
  SimulatedWork(Member member, CallPtr call, int rank, c10d::OpType type);

  bool isCompleted() override;
  bool isSuccess() const override { return call_->done; }
  std::vector<at::Tensor> result() override { return call_->results; }
  int sourceRank() const override { return call_->root; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override;
  // Waits first: a future is waited for in C++, which would not let other ranks run
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const Member member_;
  const CallPtr call_;
};

class SimulatedBackend : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using OpType = c10d::OpType;

  SimulatedBackend(int rank, int size, pybind11::object member);

  const std::string getBackendName() const override { return "simulated"; }

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
  size_t size() const { return static_cast<size_t>(getSize()); }
  int checked_rank(int64_t rank, const char* name) const;
  void check_count(const Tensors& blocks, const char* name) const;
  Work start(Call call, OpType type, bool async);
  // Issues one call per tensor. They end in order: when the last has ended, all have.
  template <typename Issue>
  Work each(size_t n, Issue issue);
  Work all_reduce(const at::Tensor& t, const c10d::ReduceOp& op, bool async);
  Work scatter_sums(const at::Tensor& out, Tensors blocks, const at::Tensor& shown,
                    const c10d::ReduceOp& op, bool async);
  Work gather_all(Tensors out, const at::Tensor& in, int to, Tensors results, bool async);

  const Member member_;
};

void bind(pybind11::module& m);

}  // namespace tp_ext::simulate
