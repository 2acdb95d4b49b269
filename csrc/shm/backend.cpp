#include "shm/backend.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shm/rendezvous.h"
#include "shm/tree_sum_op.h"
#include "shm/work.h"

namespace tp_ext::shm {

using at::Tensor;
using c10d::OpType;

Operation operation_of(const c10d::ReduceOp& op) {
  const auto type = static_cast<c10d::ReduceOp::RedOpType>(op);
  if (static_cast<uint8_t>(type) == kTreeSum) return Operation::kTreeSum;
  switch (type) {
    case c10d::ReduceOp::SUM:
      return Operation::kSum;
    case c10d::ReduceOp::AVG:
      return Operation::kAverage;
    case c10d::ReduceOp::MIN:
      return Operation::kMin;
    case c10d::ReduceOp::MAX:
      return Operation::kMax;
    case c10d::ReduceOp::PRODUCT:
      return Operation::kProduct;
    case c10d::ReduceOp::BAND:
      return Operation::kAnd;
    case c10d::ReduceOp::BOR:
      return Operation::kOr;
    case c10d::ReduceOp::BXOR:
      return Operation::kXor;
    default:
      const std::string name = type == c10d::ReduceOp::PREMUL_SUM
                                   ? "ReduceOp.PREMUL_SUM"
                                   : "number " + std::to_string(static_cast<int>(type));
      TORCH_CHECK_VALUE(false, "op: ", name,
                        " must be one of SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR and BXOR");
  }
}

ShmBackend::ShmBackend(std::shared_ptr<Engine> engine, int rank, int size, milliseconds timeout)
    : Backend(rank, size), engine_(std::move(engine)), timeout_(timeout) {}

int ShmBackend::checked_rank(int64_t rank, const char* name) const {
  TORCH_CHECK_VALUE(0 <= rank && rank < getSize(), name, ": ", rank,
                    " must be a rank of the group, of ", getSize());
  return static_cast<int>(rank);
}

void ShmBackend::check_count(size_t n, const char* name) const {
  TORCH_CHECK_VALUE(n == static_cast<size_t>(getSize()), name, ": ", n,
                    " tensors must be one for each of ", getSize(), " ranks");
}

ShmBackend::Work ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto type = static_cast<c10d::ReduceOp::RedOpType>(opts.reduceOp);
  const Terms called = terms(opts, OpType::ALLREDUCE);
  if (static_cast<uint8_t>(type) == kSumInto && tensors.size() == 2)
    return all_reduce(tensors[0], tensors[1], c10d::ReduceOp::SUM, {tensors[0]}, called);
  return all_reduce(only(tensors), tensors[0], opts.reduceOp, tensors, called);
}

ShmBackend::Work ShmBackend::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& opts) {
  return each(tensors.size(), [&](size_t i, bool last) {
    return all_reduce(tensors[i], tensors[i], opts.reduceOp, tensors,
                      terms(opts, OpType::ALLREDUCE_COALESCED, last));
  });
}

ShmBackend::Work ShmBackend::all_reduce(const Tensor& t, const Tensor& in, const c10d::ReduceOp& op,
                                        const Tensors& results, const Terms& terms) {
  check_tensor(t);
  const auto elements = elements_of(t, operation_of(op));
  Buffers buffers{{}, results, {}};
  const bool in_place = in.is_same(t);
  buffers.keep.push_back(buffers.outputs.add(t, in_place));
  if (!in_place) buffers.keep.push_back(in.contiguous());
  const void* from = data(buffers.keep.back());
  void* at = data(buffers.keep[0]);
  std::unique_ptr<Collective> call;
  if (elements.bytes() <= most_in_a_step())
    call = std::make_unique<AllReduce>(member(), from, at, elements);
  else
    call = std::make_unique<ChunkedAllReduce>(member(), from, at, elements);
  return run(std::move(call), std::move(buffers), terms);
}

bool ShmBackend::all_reduce_rows(const Tensor& x, const AllReduceRows::End& end) {
  check_tensor(x);
  const auto elements = elements_of(x, Operation::kSum);
  if (x.dim() == 0 || x.numel() == 0 || elements.bytes() > most_in_a_step()) return false;
  Buffers buffers{{x.contiguous()}, {}, {}};
  auto call =
      std::make_unique<AllReduceRows>(member(), data(buffers.keep[0]), elements, x.size(-1), end);
  run(std::move(call), std::move(buffers), {OpType::ALLREDUCE, false, c10d::kUnsetTimeout});
  return true;
}

ShmBackend::Work ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Tensor& t = only(tensors);
  const auto elements = elements_of(t, operation_of(opts.reduceOp));
  const int root = checked_rank(opts.rootRank, "root");
  Buffers buffers{{t.contiguous()}, tensors, {}};
  const Tensor in = buffers.keep[0];
  const Tensor out = root == getRank() ? buffers.outputs.add(t, true) : in;
  buffers.keep.push_back(out);
  auto call = std::make_unique<Reduce>(member(), data(in), data(out), elements, root);
  return run(std::move(call), std::move(buffers), terms(opts, OpType::REDUCE));
}

ShmBackend::Work ShmBackend::reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                                            const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(in.size() == 1, "input_lists: ", in.size(), " lists must be one");
  return scatter_sums(only(out), in[0], opts.reduceOp, terms(opts, OpType::REDUCE_SCATTER));
}

ShmBackend::Work ShmBackend::_reduce_scatter_base(Tensor& out, Tensor& in,
                                                  const c10d::ReduceScatterOptions& opts) {
  return scatter_sums(out, in, opts.reduceOp, terms(opts, OpType::_REDUCE_SCATTER_BASE));
}

ShmBackend::Work ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& opts) {
  check_lists(out, in);
  return each(in.size(), [&](size_t i, bool last) {
    return scatter_sums(out[i], in[i], opts.reduceOp,
                        terms(opts, OpType::_REDUCE_SCATTER_BASE, last));
  });
}

ShmBackend::Work ShmBackend::scatter_sums(const Tensor& out, const Tensor& in,
                                          const c10d::ReduceOp& op, const Terms& terms) {
  check_same(out, in);
  TORCH_CHECK_VALUE(in.numel() == out.numel() * getSize(), "input_tensor: ", in.numel(),
                    " elements must be ", getSize(), " times those of output_tensor, ",
                    out.numel());
  const Tensor flat = in.contiguous().view(-1);
  Tensors blocks;
  for (int rank = 0; rank < getSize(); ++rank)
    blocks.push_back(flat.narrow(0, rank * out.numel(), out.numel()));
  return scatter_sums(out, blocks, op, terms);
}

ShmBackend::Work ShmBackend::scatter_sums(const Tensor& out, const Tensors& in,
                                          const c10d::ReduceOp& op, const Terms& terms) {
  check_count(in.size(), "input_list");
  check_numel(in[getRank()], out.numel(), "input_list");
  Buffers buffers{{}, {out}, {}};
  const Tensor dense = buffers.outputs.add(out, false);
  buffers.keep.push_back(dense);
  std::vector<const void*> blocks;
  std::vector<int64_t> counts;
  Elements like = elements_of(out, operation_of(op));
  like.count = 0;
  for (const Tensor& block : in) {
    check_same(block, out);
    buffers.keep.push_back(block.contiguous());
    blocks.push_back(data(buffers.keep.back()));
    counts.push_back(bytes_of(block) / like.size);
    like.count += counts.back();
  }
  auto call = std::make_unique<ReduceScatter>(member(), std::move(blocks), data(dense),
                                              std::move(counts), like);
  return run(std::move(call), std::move(buffers), terms);
}

ShmBackend::Work ShmBackend::barrier(const c10d::BarrierOptions& opts) {
  return run(std::make_unique<Barrier>(member()), {}, terms(opts, OpType::BARRIER));
}

// Every barrier of this backend names the missing ranks
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
  c10d::BarrierOptions now = opts;
  now.asyncOp = false;
  barrier(now);
}

// Begins the range of a call in a profile; returns what ends it, null where nothing is recorded
static std::function<void()> begin_range(const Task& task) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  auto range = std::make_shared<at::RecordFunction>(std::move(*callbacks));
  range->_setAsync();
  range->before(std::string("tp_shm:") + task.what());
  // A thread of ours may end it, and must see the caller's profiler
  return at::wrapPropagateTLSState([range] { range->end(); });
}

std::function<void()> ShmBackend::finish_of(const Task& task, Buffers buffers) {
  return [kept = std::move(buffers), end_range = begin_range(task)] {
    kept.outputs.store();
    if (end_range) end_range();
  };
}

ShmBackend::Work ShmBackend::run(std::unique_ptr<Collective> call, Buffers buffers,
                                 const Terms& terms) {
  auto task = std::make_shared<Task>();
  task->call = std::move(call);
  task->deadline = deadline_in(terms.timeout == c10d::kUnsetTimeout ? timeout_ : terms.timeout);
  Tensors results = std::move(buffers.results);
  task->finish = finish_of(*task, std::move(buffers));
  engine_->start(task, terms.async);
  if (!terms.async) engine_->wait(task);
  return c10::make_intrusive<ShmWork>(engine_, task, std::move(results), getRank(), terms.type);
}

c10::intrusive_ptr<c10d::Backend> create_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                 int rank, int size,
                                                 std::chrono::milliseconds timeout,
                                                 const std::string& name) {
  TORCH_CHECK_VALUE(size <= kMaxRanks, "size: ", size, " ranks of group '", name,
                    "' must be at most ", kMaxRanks, " for tp_shm");
  const Geometry geometry = geometry_for(size);
  auto segment = std::make_shared<Segment>(meet(store, rank, size, timeout, geometry, name));
  auto engine = std::make_shared<Engine>(Shared(segment->base(), geometry), rank, name, segment);
  return c10::make_intrusive<ShmBackend>(std::move(engine), rank, size, timeout);
}

}  // namespace tp_ext::shm
