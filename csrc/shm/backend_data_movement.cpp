#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shm/backend.h"
#include "shm/core/data_movement.h"
#include "shm/work.h"

namespace tp_ext::shm {

using at::Tensor;
using c10d::OpType;

ShmBackend::Work ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const int root = checked_rank(opts.rootRank, "root");
  TORCH_CHECK_VALUE(opts.rootTensor == 0, "rootTensor: ", opts.rootTensor,
                    " must be 0: there is one");
  Buffers buffers{{}, tensors, {}};
  const Tensor dense = buffers.outputs.add(only(tensors), root == getRank());
  buffers.keep.push_back(dense);
  auto call =
      std::make_unique<Broadcast>(member(), data(dense), bytes_of(dense), type_of(dense), root);
  return run(std::move(call), std::move(buffers), terms(opts, OpType::BROADCAST));
}

ShmBackend::Work ShmBackend::allgather(std::vector<Tensors>& out, Tensors& in,
                                       const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(out.size() == 1, "output_tensors: ", out.size(), " lists must be one");
  return gather_all(out[0], only(in), -1, terms(opts, OpType::ALLGATHER));
}

ShmBackend::Work ShmBackend::allgather_coalesced(std::vector<Tensors>& out, Tensors& in,
                                                 const c10d::AllgatherOptions& opts) {
  check_count(out.size(), "output_tensor_lists");
  return each(in.size(), [&](size_t i, bool last) {
    Tensors of_ranks;  // torch passes one list per rank
    for (const auto& list : out) of_ranks.push_back(list.at(i));
    return gather_all(of_ranks, in[i], -1, terms(opts, OpType::ALLGATHER_COALESCED, last));
  });
}

ShmBackend::Work ShmBackend::gather(std::vector<Tensors>& out, Tensors& in,
                                    const c10d::GatherOptions& opts) {
  const int to = checked_rank(opts.rootRank, "root");
  TORCH_CHECK_VALUE((getRank() == to) == (out.size() == 1), "gather_list: must be given on rank ",
                    to, " and there alone");
  return gather_all(to == getRank() ? out[0] : Tensors(), only(in), to,
                    terms(opts, OpType::GATHER));
}

ShmBackend::Work ShmBackend::_allgather_base(Tensor& out, Tensor& in,
                                             const c10d::AllgatherOptions& opts) {
  return gather_all(out, in, terms(opts, OpType::_ALLGATHER_BASE));
}

ShmBackend::Work ShmBackend::allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                             const c10d::AllgatherOptions& opts) {
  check_lists(out, in);
  return each(in.size(), [&](size_t i, bool last) {
    return gather_all(out[i], in[i], terms(opts, OpType::_ALLGATHER_BASE, last));
  });
}

ShmBackend::Work ShmBackend::gather_all(const Tensor& out, const Tensor& in, const Terms& terms) {
  check_same(out, in);
  TORCH_CHECK_VALUE(out.numel() == in.numel() * getSize(), "output_tensor: ", out.numel(),
                    " elements must be ", getSize(), " times those of input_tensor, ", in.numel());
  Buffers buffers{{in.contiguous()}, {out}, {}};
  const Tensor from = buffers.keep[0], to = buffers.outputs.add(out, false);
  buffers.keep.push_back(to);
  const int64_t bytes = bytes_of(in);
  std::vector<void*> blocks;
  for (int rank = 0; rank < getSize(); ++rank)
    blocks.push_back(static_cast<char*>(data(to)) + rank * bytes);
  auto call = std::make_unique<AllGather>(member(), data(from), std::move(blocks),
                                          std::vector<int64_t>(getSize(), bytes), type_of(in));
  return run(std::move(call), std::move(buffers), terms);
}

// out: on the ranks that receive; to: the receiving rank, -1 for all
ShmBackend::Work ShmBackend::gather_all(const Tensors& out, const Tensor& in, int to,
                                        const Terms& terms) {
  check_tensor(in);
  Buffers buffers{{in.contiguous()}, out, {}};
  std::vector<void*> blocks;
  std::vector<int64_t> bytes(getSize(), bytes_of(in));
  if (to < 0 || to == getRank()) {
    check_count(out.size(), to < 0 ? "tensor_list" : "gather_list");
    for (int rank = 0; rank < getSize(); ++rank) {
      check_same(out[rank], in);
      bytes[rank] = bytes_of(out[rank]);
      buffers.keep.push_back(buffers.outputs.add(out[rank], false));
      blocks.push_back(data(buffers.keep.back()));
    }
    check_numel(in, out[getRank()].numel(), "tensor");
  }
  auto call = std::make_unique<AllGather>(member(), data(buffers.keep[0]), std::move(blocks),
                                          std::move(bytes), type_of(in), to);
  return run(std::move(call), std::move(buffers), terms);
}

ShmBackend::Work ShmBackend::scatter(Tensors& out, std::vector<Tensors>& in,
                                     const c10d::ScatterOptions& opts) {
  const int from = checked_rank(opts.rootRank, "root");
  const Tensor& t = only(out);
  TORCH_CHECK_VALUE((getRank() == from) == (in.size() == 1), "scatter_list: must be given on rank ",
                    from, " and there alone");
  Buffers buffers{{}, out, {}};
  const Tensor dense = buffers.outputs.add(t, false);
  buffers.keep.push_back(dense);
  std::vector<const void*> blocks;
  if (getRank() == from) {
    check_count(in[0].size(), "scatter_list");
    for (const Tensor& block : in[0]) {
      check_same(block, t);
      check_numel(block, t.numel(), "scatter_list");
      buffers.keep.push_back(block.contiguous());
      blocks.push_back(data(buffers.keep.back()));
    }
  }
  auto call = std::make_unique<Scatter>(member(), std::move(blocks), data(dense), bytes_of(dense),
                                        type_of(dense), from);
  return run(std::move(call), std::move(buffers), terms(opts, OpType::SCATTER));
}

ShmBackend::Work ShmBackend::alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes,
                                           std::vector<int64_t>& in_sizes,
                                           const c10d::AllToAllOptions& opts) {
  check_same(out, in);
  Buffers buffers{{in.contiguous()}, {out}, {}};
  const Tensor from = buffers.keep[0], to = buffers.outputs.add(out, false);
  buffers.keep.push_back(to);
  Blocks sent = divide(from, in_sizes, getSize(), "input_split_sizes");
  Blocks received = divide(to, out_sizes, getSize(), "output_split_sizes");
  auto call = std::make_unique<AllToAll>(member(), blocks_at(sent.at, sent.bytes),
                                         blocks_at(received.at, received.bytes), type_of(from));
  return run(std::move(call), std::move(buffers), terms(opts, OpType::ALLTOALL_BASE));
}

ShmBackend::Work ShmBackend::alltoall(Tensors& out, Tensors& in,
                                      const c10d::AllToAllOptions& opts) {
  check_count(out.size(), "output_tensor_list");
  check_count(in.size(), "input_tensor_list");
  Buffers buffers{{}, out, {}};
  std::vector<Rows> sent, received;
  for (int rank = 0; rank < getSize(); ++rank) {
    check_same(out[rank], in[0]);
    check_same(in[rank], in[0]);
    // Rows go into the shared memory, and come out of it, without a copy in between
    buffers.keep.push_back(rows_of(out[rank]) ? out[rank] : buffers.outputs.add(out[rank], false));
    received.push_back(*rows_of(buffers.keep.back()));
    buffers.keep.push_back(rows_of(in[rank]) ? in[rank] : in[rank].contiguous());
    sent.push_back(*rows_of(buffers.keep.back()));
  }
  auto call =
      std::make_unique<AllToAll>(member(), std::move(sent), std::move(received), type_of(in[0]));
  return run(std::move(call), std::move(buffers), terms(opts, OpType::ALLTOALL));
}

ShmBackend::Work ShmBackend::send(Tensors& tensors, int to, int tag) {
  return transfer(checked_rank(to, "dst"), tag, {{only(tensors).contiguous()}, tensors, {}},
                  OpType::SEND);
}

ShmBackend::Work ShmBackend::recv(Tensors& tensors, int from, int tag) {
  Buffers buffers{{}, tensors, {}};
  buffers.keep.push_back(buffers.outputs.add(only(tensors), false));
  return transfer(checked_rank(from, "src"), tag, std::move(buffers), OpType::RECV);
}

ShmBackend::Work ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  Buffers buffers{{}, tensors, {}};
  buffers.keep.push_back(buffers.outputs.add(only(tensors), false));
  return transfer(-1, tag, std::move(buffers), OpType::RECVANYSOURCE);
}

ShmBackend::Work ShmBackend::transfer(int peer, int tag, Buffers buffers, OpType type) {
  auto task = std::make_shared<Task>();
  const Tensor dense = buffers.keep[0];
  task->message = std::make_shared<Message>(
      Message{peer, tag, static_cast<char*>(data(dense)), bytes_of(dense), type_of(dense)});
  task->receives = type != OpType::SEND;
  task->deadline = deadline_in(timeout_);
  Tensors results = std::move(buffers.results);
  task->finish = finish_of(*task, std::move(buffers));
  engine_->start(task, true);
  return c10::make_intrusive<ShmWork>(engine_, task, std::move(results), getRank(), type);
}

}  // namespace tp_ext::shm
