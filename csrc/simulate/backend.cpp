#include "simulate/backend.h"

#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shm/backend.h"

namespace tp_ext::simulate {

using at::Tensor;
using Work = SimulatedBackend::Work;

namespace {

const Tensor& only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "tensors: ", tensors.size(), " must be one");
  return tensors[0];
}

void check_tensor(const Tensor& t, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(t.layout() == at::kStrided && !t.is_meta(), "tensor: a tensor of layout ",
                    t.layout(), " on ", t.device(), " must be strided and have data");
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, "tensors: dtypes ", t.scalar_type(), " and ", dtype,
                   " must be the same");
}

// What a rank sends to itself must be what it expects from itself
void check_own_block(const Call& call, size_t rank) {
  if (call.sends.size() <= rank || call.receives.empty()) return;
  const Tensor &sent = call.sends[rank], received = call.receives[call.operation ? 0 : rank];
  TORCH_CHECK_VALUE(!sent.defined() || !received.defined() || sent.numel() == received.numel(),
                    call.text(), ": a block of ", sent.numel(), " elements must have ",
                    received.numel());
}

// Equal blocks, or `sizes` rows of dim 0 each; of the flat tensor where dim 0 cannot be divided
Tensors blocks_of(const Tensor& t, size_t p, const std::vector<int64_t>& sizes, const char* name) {
  if (!sizes.empty()) {
    TORCH_CHECK_VALUE(sizes.size() == p, name, ": ", sizes, " must have one entry per rank, of ",
                      p);
    return t.split_with_sizes(sizes);
  }
  const auto n = static_cast<int64_t>(p);
  TORCH_CHECK_VALUE(t.numel() % n == 0, name, ": ", t.numel(), " elements must be a multiple of ",
                    n);
  const Tensor rows = t.dim() > 0 && t.size(0) % n == 0 ? t : t.view(-1);
  return rows.split_with_sizes(std::vector<int64_t>(p, rows.size(0) / n));
}

}  // namespace

void Turn::give() {
  {
    const std::lock_guard lock(mutex_);
    given_ = true;
  }
  changed_.notify_one();
}

bool Turn::take(double seconds) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return given_; });
  return std::exchange(given_, false);
}

Member::Member(pybind11::object object)
    : object_(new pybind11::object(std::move(object)), [](pybind11::object* held) {
        const pybind11::gil_scoped_acquire gil;
        delete held;
      }) {}

void Member::issue(const CallPtr& call) const {
  const pybind11::gil_scoped_acquire gil;
  object_->attr("issue")(call);
}
void Member::wait(const CallPtr& call) const {
  if (call->done) return;
  const pybind11::gil_scoped_acquire gil;
  object_->attr("wait")(call);
}
void Member::poll() const {
  const pybind11::gil_scoped_acquire gil;
  object_->attr("poll")();
}

SimulatedWork::SimulatedWork(Member member, CallPtr call, int rank, c10d::OpType type)
    : Work(rank, type), member_(std::move(member)), call_(std::move(call)) {}

bool SimulatedWork::isCompleted() {
  if (!call_->done) member_.poll();
  return call_->done;
}

bool SimulatedWork::wait(std::chrono::milliseconds) {
  member_.wait(call_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> SimulatedWork::getFuture() {
  member_.wait(call_);
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(call_->results));
  return future;
}

SimulatedBackend::SimulatedBackend(int rank, int size, pybind11::object member)
    : Backend(rank, size), member_(std::move(member)) {}

int SimulatedBackend::checked_rank(int64_t rank, const char* name) const {
  TORCH_CHECK_VALUE(0 <= rank && rank < getSize(), name, ": ", rank,
                    " must be a rank of the group, of ", getSize());
  return static_cast<int>(rank);
}

void SimulatedBackend::check_count(const Tensors& blocks, const char* name) const {
  TORCH_CHECK_VALUE(blocks.size() == size(), name, ": ", blocks.size(),
                    " tensors must be one for each of ", getSize(), " ranks");
}

Work SimulatedBackend::start(Call call, OpType type, bool async) {
  if (call.operation) shm::elements_of(call.shown, *call.operation);  // refuses it for the dtype
  for (const auto* tensors : {&call.sends, &call.receives})
    for (const auto& t : *tensors) {
      if (!t.defined()) continue;
      check_tensor(t, call.shown.scalar_type());
      synchronize(t);
    }
  check_own_block(call, static_cast<size_t>(getRank()));
  const auto issued = std::make_shared<Call>(std::move(call));
  member_.issue(issued);
  if (!async) member_.wait(issued);
  return c10::make_intrusive<SimulatedWork>(member_, issued, getRank(), type);
}

template <typename Issue>
Work SimulatedBackend::each(size_t n, Issue issue) {
  TORCH_CHECK_VALUE(n > 0, "tensors: there must be at least one");
  Work work;
  for (size_t i = 0; i < n; ++i) work = issue(i, i + 1 == n);
  return work;
}

Work SimulatedBackend::all_reduce(const Tensor& t, const c10d::ReduceOp& op, bool async) {
  Call call{"all_reduce", t, Tensors(size(), t), {t}, shm::operation_of(op)};
  call.same_shape = true;
  call.results = {t};
  return start(std::move(call), OpType::ALLREDUCE, async);
}

Work SimulatedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return all_reduce(only(tensors), opts.reduceOp, opts.asyncOp);
}

Work SimulatedBackend::allreduce_coalesced(Tensors& tensors,
                                           const c10d::AllreduceCoalescedOptions& opts) {
  return each(tensors.size(), [&](size_t i, bool last) {
    return all_reduce(tensors[i], opts.reduceOp, opts.asyncOp || !last);
  });
}

Work SimulatedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Tensor& t = only(tensors);
  Call call{"reduce", t, Tensors(size()), {}, shm::operation_of(opts.reduceOp)};
  call.root = checked_rank(opts.rootRank, "root");
  call.sends[call.root] = t;
  if (getRank() == call.root) call.receives = {t};
  call.same_shape = true;
  call.results = tensors;
  return start(std::move(call), OpType::REDUCE, opts.asyncOp);
}

Work SimulatedBackend::scatter_sums(const Tensor& out, Tensors blocks, const Tensor& shown,
                                    const c10d::ReduceOp& op, bool async) {
  check_count(blocks, "input_list");
  Call call{"reduce_scatter", shown, std::move(blocks), {out}, shm::operation_of(op)};
  call.results = {out};
  return start(std::move(call), OpType::REDUCE_SCATTER, async);
}

Work SimulatedBackend::reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                                      const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(in.size() == 1, "input_lists: ", in.size(), " lists must be one");
  return scatter_sums(only(out), in[0], only(out), opts.reduceOp, opts.asyncOp);
}

Work SimulatedBackend::_reduce_scatter_base(Tensor& out, Tensor& in,
                                            const c10d::ReduceScatterOptions& opts) {
  return scatter_sums(out, blocks_of(in.contiguous(), size(), {}, "input_tensor"), in,
                      opts.reduceOp, opts.asyncOp);
}

Work SimulatedBackend::reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                       const c10d::ReduceScatterOptions& opts) {
  shm::check_lists(out, in);
  return each(in.size(), [&](size_t i, bool last) {
    c10d::ReduceScatterOptions each_opts = opts;
    each_opts.asyncOp = opts.asyncOp || !last;
    return _reduce_scatter_base(out[i], in[i], each_opts);
  });
}

Work SimulatedBackend::barrier(const c10d::BarrierOptions& opts) {
  return start(Call{"barrier"}, OpType::BARRIER, opts.asyncOp);
}

Work SimulatedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Tensor& t = only(tensors);
  TORCH_CHECK_VALUE(opts.rootTensor == 0, "rootTensor: ", opts.rootTensor,
                    " must be 0: there is one");
  Call call{"broadcast", t};
  call.root = checked_rank(opts.rootRank, "root");
  if (getRank() == call.root) {
    call.sends = Tensors(size(), t);
  } else {
    call.receives = Tensors(size());
    call.receives[call.root] = t;
  }
  call.results = tensors;
  return start(std::move(call), OpType::BROADCAST, opts.asyncOp);
}

// out: on the ranks that receive; to: the receiving rank, -1 for all
Work SimulatedBackend::gather_all(Tensors out, const Tensor& in, int to, Tensors results,
                                  bool async) {
  Call call{to < 0 ? "all_gather" : "gather", in, Tensors(size(), in), std::move(out)};
  call.root = to;
  if (to < 0 || to == getRank()) check_count(call.receives, to < 0 ? "tensor_list" : "gather_list");
  call.results = std::move(results);
  return start(std::move(call), to < 0 ? OpType::ALLGATHER : OpType::GATHER, async);
}

Work SimulatedBackend::allgather(std::vector<Tensors>& out, Tensors& in,
                                 const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(out.size() == 1, "output_tensors: ", out.size(), " lists must be one");
  return gather_all(out[0], only(in), -1, out[0], opts.asyncOp);
}

Work SimulatedBackend::allgather_coalesced(std::vector<Tensors>& out, Tensors& in,
                                           const c10d::AllgatherOptions& opts) {
  return each(in.size(), [&](size_t i, bool last) {
    Tensors of_ranks;  // torch passes one list per rank
    for (const auto& list : out) of_ranks.push_back(list.at(i));
    return gather_all(of_ranks, in[i], -1, of_ranks, opts.asyncOp || !last);
  });
}

Work SimulatedBackend::_allgather_base(Tensor& out, Tensor& in,
                                       const c10d::AllgatherOptions& opts) {
  return gather_all(blocks_of(out, size(), {}, "output_tensor"), in, -1, {out}, opts.asyncOp);
}

Work SimulatedBackend::allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                       const c10d::AllgatherOptions& opts) {
  shm::check_lists(out, in);
  return each(in.size(), [&](size_t i, bool last) {
    c10d::AllgatherOptions each_opts = opts;
    each_opts.asyncOp = opts.asyncOp || !last;
    return _allgather_base(out[i], in[i], each_opts);
  });
}

Work SimulatedBackend::gather(std::vector<Tensors>& out, Tensors& in,
                              const c10d::GatherOptions& opts) {
  const int to = checked_rank(opts.rootRank, "root");
  TORCH_CHECK_VALUE((getRank() == to) == (out.size() == 1), "gather_list: must be given on rank ",
                    to, " and there alone");
  const Tensors blocks = to == getRank() ? out[0] : Tensors();
  return gather_all(blocks, only(in), to, blocks, opts.asyncOp);
}

Work SimulatedBackend::scatter(Tensors& out, std::vector<Tensors>& in,
                               const c10d::ScatterOptions& opts) {
  const Tensor& t = only(out);
  Call call{"scatter", t, {}, Tensors(size())};
  call.root = checked_rank(opts.rootRank, "root");
  TORCH_CHECK_VALUE((getRank() == call.root) == (in.size() == 1),
                    "scatter_list: must be given on rank ", call.root, " and there alone");
  if (getRank() == call.root) {
    check_count(in[0], "scatter_list");
    call.sends = in[0];
  }
  call.receives[call.root] = t;
  call.results = out;
  return start(std::move(call), OpType::SCATTER, opts.asyncOp);
}

Work SimulatedBackend::alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes,
                                     std::vector<int64_t>& in_sizes,
                                     const c10d::AllToAllOptions& opts) {
  Call call{"all_to_all", in, blocks_of(in, size(), in_sizes, "input_split_sizes"),
            blocks_of(out, size(), out_sizes, "output_split_sizes")};
  call.results = {out};
  return start(std::move(call), OpType::ALLTOALL_BASE, opts.asyncOp);
}

Work SimulatedBackend::alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& opts) {
  check_count(out, "output_tensor_list");
  check_count(in, "input_tensor_list");
  Call call{"all_to_all", in[0], in, out};
  call.results = out;
  return start(std::move(call), OpType::ALLTOALL, opts.asyncOp);
}

// Sends are buffered
Work SimulatedBackend::send(Tensors& tensors, int to, int tag) {
  Call call{"send", only(tensors), {only(tensors).detach().clone()}};
  call.root = checked_rank(to, "dst");
  call.tag = tag;
  call.results = tensors;
  return start(std::move(call), OpType::SEND, true);
}

Work SimulatedBackend::recv(Tensors& tensors, int from, int tag) {
  Call call{"recv", only(tensors), {}, {only(tensors)}};
  call.root = from < 0 ? from : checked_rank(from, "src");
  call.tag = tag;
  call.results = tensors;
  return start(std::move(call), OpType::RECV, true);
}

Work SimulatedBackend::recvAnysource(Tensors& tensors, int tag) { return recv(tensors, -1, tag); }

void bind(pybind11::module& m) {
  pybind11::class_<Call, CallPtr>(m, "SimulatedCall", pybind11::dynamic_attr())
      .def_readonly("kind", &Call::kind)
      .def_readonly("tag", &Call::tag)
      .def_readwrite("root", &Call::root)
      .def_readwrite("done", &Call::done)
      .def("fits", &Call::fits)
      .def("text", &Call::text)
      .def("deliver", &deliver);
  m.def("execute_simulated", &execute);
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<Turn>(m, "Turn")
      .def(pybind11::init<>())
      .def("give", &Turn::give, Unlocked())
      .def("take", &Turn::take, Unlocked())
      .def(
          "give_and_take",
          [](Turn& own, Turn& other, double seconds) {
            other.give();
            return own.take(seconds);
          },
          Unlocked());
  m.def(
      "create_simulated_backend",
      [](int rank, int size, const pybind11::object& member) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<SimulatedBackend>(rank, size, member);
      });
}

}  // namespace tp_ext::simulate
