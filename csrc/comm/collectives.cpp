#include "comm/collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/broadcast.h"
#include "comm/group_name.h"
#include "comm/pack.h"
#include "comm/rotate.h"
#include "shm/backend.h"
#include "shm/tree_sum_op.h"

namespace tp_ext::comm {
namespace {

using at::Tensor;
using c10::SymInt;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

std::string bare_name(const std::string& group) { return std::string(GroupName(group).name); }

// The process group of that name. Its rank and size must match the key: slices and blocks are
// computed from the key, but c10d uses the group's.
ProcessGroup resolve(const std::string& group) {
  const GroupName key(group);
  const std::string name(key.name);
  ProcessGroup found;
  try {
    found = c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(false, "group: '", name, "' must be the name of a process group");
  }
  TORCH_CHECK_VALUE(key.size < 0 || (key.rank == found->getRank() && key.size == found->getSize()),
                    "group: '", name, "' was rank ", key.rank, " of ", key.size,
                    " when the module was built, and is rank ", found->getRank(), " of ",
                    found->getSize(),
                    " now: the process group was created again; build the modules anew on it (and "
                    "load a full_state_dict or a checkpoint)");
  return found;
}

// Whether make_fx traces a tangent on real tensors, as torch.func.linearize does. Its constant
// folding runs a collective of constants, keeps the result and drops the wait.
bool linearizing(const Tensor& x) {
  using c10::impl::TorchDispatchModeTLS;
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr &&
         TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value() &&
         !x.key_set().has(c10::DispatchKey::Python);
}

// Calls a _c10d_functional operator through a stack of IValues: its group argument is `str` or
// `Any`, depending on torch's version
template <typename... Args>
Tensor functional(const c10::OperatorHandle& op, const Tensor& x, Args&&... args) {
  TORCH_CHECK_NOT_IMPLEMENTED(!linearizing(x),
                              "tp_ext: torch.func.linearize cannot trace a collective; use "
                              "torch.func.jvp, or forward_ad.make_dual");
  torch::jit::Stack stack;
  torch::jit::push(stack, x, std::forward<Args>(args)...);
  op.callBoxed(stack);
  static const auto wait =
      c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  wait.callBoxed(stack);
  return torch::jit::pop(stack).toTensor();
}

// NCCL gives no Work for a call on the current stream; gloo always gives one
void finish(const Work& work) {
  if (work) work->wait();
}

// The buffers are allocated here and carry no graph
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView guard;
};

c10d::ReduceOp sum_in(Order order) {
  using Number = c10d::ReduceOp::RedOpType;
  return order == Order::kTree ? static_cast<Number>(shm::kTreeSum) : Number::SUM;
}

Work issue_all_reduce(const ProcessGroup& group, std::vector<Tensor> tensors, bool async,
                      const c10d::ReduceOp& operation) {
  c10d::AllreduceOptions options;
  options.asyncOp = async;
  options.reduceOp = operation;
  return group->allreduce(tensors, options);
}

bool in_shared_memory(const ProcessGroup& group) {
  return group->getBackend(at::kCPU)->getBackendName() == shm::kBackendName;
}

// The names without underscore are newer than the oldest supported torch; they forward to these.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
Work issue_all_gather(const ProcessGroup& group, Tensor& out, Tensor& x, bool async) {
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return group->_allgather_base(out, x, options);
}

Work issue_reduce_scatter(const ProcessGroup& group, Tensor& out, Tensor& x, bool async,
                          Order order) {
  c10d::ReduceScatterOptions options;
  options.asyncOp = async;
  options.reduceOp = sum_in(order);
  return group->_reduce_scatter_base(out, x, options);
}

Work issue_all_to_all(const ProcessGroup& group, Tensor& out, Tensor& x,
                      std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes, bool async) {
  c10d::AllToAllOptions options;
  options.asyncOp = async;
  return group->alltoall_base(out, x, out_sizes, in_sizes, options);
}
#pragma GCC diagnostic pop

Work issue_broadcast(const ProcessGroup& group, Tensor& x, int64_t root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.asyncOp = true;
  std::vector<Tensor> tensors{x};
  return group->broadcast(tensors, options);
}

}  // namespace

bool traced(const Tensor& x) {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         x.key_set().has(c10::DispatchKey::Python);
}

void check_place(const std::string& group) {
  if (!group.empty()) resolve(group);
}

int64_t size(const std::string& group) {
  if (group.empty()) return 1;
  const GroupName key(group);
  return key.size > 0 ? key.size : resolve(group)->getSize();
}
int64_t rank(const std::string& group) {
  if (group.empty()) return 0;
  const GroupName key(group);
  return key.rank >= 0 ? key.rank : resolve(group)->getRank();
}

Pending::Pending(Tensor result, c10::intrusive_ptr<c10::intrusive_ptr_target> work,
                 std::function<Tensor(const Tensor&)> finish)
    : result_(std::move(result)), work_(std::move(work)), finish_(std::move(finish)) {}

Pending::~Pending() {
  if (!work_) return;
  try {
    static_cast<c10d::Work*>(work_.get())->wait();
  } catch (...) {  // the exception in flight says more
  }
}

Tensor Pending::wait() {
  BelowAutograd below;
  if (work_) {
    const auto work = std::move(work_);
    work_.reset();
    static_cast<c10d::Work*>(work.get())->wait();
  }
  return finish_ ? finish_(result_) : result_;
}

Tensor all_reduce(const Tensor& x, const std::string& group) {
  if (traced(x)) return all_reduce_fresh(x, group);
  BelowAutograd below;
  if (x.is_cpu() && !x.is_complex() && x.numel() > 0 && size(group) > 1) {
    const ProcessGroup of_ranks = resolve(group);
    if (in_shared_memory(of_ranks)) {  // which reads x where it is
      Tensor sum = at::empty_like(x, at::MemoryFormat::Contiguous);
      using Number = c10d::ReduceOp::RedOpType;
      finish(issue_all_reduce(of_ranks, {sum, x.contiguous()}, false,
                              static_cast<Number>(shm::kSumInto)));
      return sum;
    }
  }
  return all_reduce_fresh(fresh_contiguous(x), group);
}

namespace {

Tensor functional_all_reduce(const Tensor& x, const std::string& operation,
                             const std::string& group) {
  check_place(group);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::all_reduce", "");
  return functional(op, x.contiguous(), operation, bare_name(group));
}

}  // namespace

Tensor all_reduce_max(const Tensor& fresh, const std::string& group) {
  if (fresh.sym_numel() == 0 || size(group) == 1) return fresh;
  if (traced(fresh)) return functional_all_reduce(fresh, "max", group);
  BelowAutograd below;
  Tensor x = fresh.contiguous();
  finish(issue_all_reduce(resolve(group), {x}, false, c10d::ReduceOp::MAX));
  return x;
}

Tensor all_reduce_fresh(const Tensor& fresh, const std::string& group) {
  if (fresh.sym_numel() == 0 || size(group) == 1) return fresh;
  if (traced(fresh)) return functional_all_reduce(fresh, "sum", group);
  BelowAutograd below;
  Tensor x = fresh.contiguous();
  finish(issue_all_reduce(resolve(group), {x}, false, sum_in(Order::kAny)));
  return x;
}

// [Note: a fused collective calls its backend]
bool all_reduce_rows(const Tensor& x, const std::string& group, const RowEnd& end) {
  if (!x.is_cpu() || traced(x) || at::hasGlobalCallbacks() || at::hasThreadLocalCallbacks())
    return false;
  const auto backend = resolve(group)->getBackend(at::kCPU);
  auto* const shared = dynamic_cast<shm::ShmBackend*>(backend.get());
  return shared != nullptr && shared->all_reduce_rows(x, end);
}

bool adds_in_a_tree(const Tensor& x, const std::string& group) {
  return x.is_cpu() && !traced(x) && in_shared_memory(resolve(group));
}

Pending all_reduce_async(const Tensor& fresh, const std::string& group, Order order) {
  if (fresh.sym_numel() == 0 || size(group) == 1 || traced(fresh))
    return Pending(all_reduce_fresh(fresh, group), nullptr);
  BelowAutograd below;
  Tensor x = fresh.contiguous();
  auto work = issue_all_reduce(resolve(group), {x}, true, sum_in(order));
  return Pending(std::move(x), std::move(work));
}

namespace {

using Finish = std::function<Tensor(const Tensor&)>;

// The blocks of all ranks, [p, *x.shape], x contiguous
Pending gather_blocks(const Tensor& x, const std::string& group, bool async, Finish then) {
  const auto pg = resolve(group);
  const int64_t p = pg->getSize();
  const auto shape = stacked(p, x.sym_sizes());
  if (is_empty(shape)) return Pending(x.new_empty_symint(shape), nullptr, std::move(then));
  if (traced(x)) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        "_c10d_functional::all_gather_into_tensor", "");
    const auto flat = x.dim() == 0 ? x.unsqueeze(0) : x;  // it gathers along dim 0
    return Pending(functional(op, flat, p, bare_name(group)).reshape_symint(shape), nullptr,
                   std::move(then));
  }
  BelowAutograd below;
  Tensor in = x.view(-1), out = x.new_empty_symint({p * x.sym_numel()});  // gloo compares shapes
  auto work = issue_all_gather(pg, out, in, async);
  if (!async) {
    finish(work);
    work.reset();
  }
  return Pending(out.view_symint(shape), std::move(work), std::move(then));
}

Pending gather(const Tensor& x, const std::string& group, int64_t dim, const Split& split,
               bool async) {
  return gather_blocks(
      padded(x, dim, split.longest()), group, async,
      [dim, split](const Tensor& blocks) { return concatenate(blocks, dim, split); });
}

Pending scatter_sum(const Tensor& x, const std::string& group, int64_t dim, const Split& split,
                    bool fresh, bool async, Order order = Order::kAny) {
  const auto pg = resolve(group);
  const int64_t p = pg->getSize();
  const auto own = split.sizes[pg->getRank()];
  const auto then = [dim, own](const Tensor& block) { return own_part(block, dim, own); };
  Tensor blocks = blocks_of(x, dim, split);
  auto shape = blocks.sym_sizes().vec();
  shape.erase(shape.begin());
  if (is_empty(shape)) return Pending(x.new_empty_symint(shape), nullptr, then);
  if (traced(x)) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        "_c10d_functional::reduce_scatter_tensor", "");
    return Pending(
        functional(op, blocks, std::string("sum"), p, bare_name(group)).reshape_symint(shape),
        nullptr, then);
  }
  BelowAutograd below;
  if (!fresh && blocks.is_alias_of(x))  // a backend may use its input as scratch
    blocks = fresh_contiguous(blocks);
  Tensor in = blocks.view(-1), out = x.new_empty_symint({blocks.sym_numel() / p});
  auto work = issue_reduce_scatter(pg, out, in, async, order);
  if (!async) {
    finish(work);
    work.reset();
  }
  return Pending(out.view_symint(shape), std::move(work), then);
}

}  // namespace

Tensor all_gather_stack(const Tensor& x, const std::string& group) {
  if (size(group) == 1) return x.unsqueeze(0);
  return gather_blocks(x.contiguous(), group, false, nullptr).wait();
}

Tensor all_gather(const Tensor& x, const std::string& group, int64_t dim, const Split& split) {
  return gather(x, group, dim, split, false).wait();
}
Pending all_gather_async(const Tensor& x, const std::string& group, int64_t dim,
                         const Split& split) {
  return gather(x, group, dim, split, true);
}

Tensor reduce_scatter(const Tensor& x, const std::string& group, int64_t dim, const Split& split) {
  return scatter_sum(x, group, dim, split, false, false).wait();
}
Tensor reduce_scatter_fresh(const Tensor& fresh, const std::string& group, int64_t dim,
                            const Split& split) {
  return scatter_sum(fresh, group, dim, split, true, false).wait();
}
Pending reduce_scatter_async(const Tensor& fresh, const std::string& group, int64_t dim,
                             const Split& split, Order order) {
  return scatter_sum(fresh, group, dim, split, true, true, order);
}

namespace {

Pending exchange(const Tensor& x, const std::string& group, int64_t split_dim, int64_t concat_dim,
                 const Split& split, const Split& concat, bool async) {
  const auto pg = resolve(group);
  const int64_t p = pg->getSize();
  auto shape = with_dim(x, split_dim, split.sizes[pg->getRank()]);  // shape of the incoming block
  shape[concat_dim] = concat.total();
  std::vector<SymInt> sent, received;  // elements
  for (int64_t k = 0; k < p; ++k) {
    SymInt to = split.sizes[k], from = concat.sizes[k];
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (d != split_dim) to = to * x.sym_size(d);
      if (d != concat_dim) from = from * shape[d];
    }
    sent.push_back(to);
    received.push_back(from);
  }
  const Tensor in = flat_blocks_of(x, split_dim, split);
  const auto then = [shape, concat_dim, concat](const Tensor& flat) {
    return concatenate_flat(flat, shape, concat_dim, concat);
  };
  if (traced(x)) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::all_to_all_single", "");
    return Pending(functional(op, in, received, sent, bare_name(group)), nullptr, then);
  }
  BelowAutograd below;
  std::vector<int64_t> received_ints, sent_ints;
  int64_t incoming = 0;
  for (int64_t k = 0; k < p; ++k) {
    received_ints.push_back(received[k].guard_int(__FILE__, __LINE__));
    sent_ints.push_back(sent[k].guard_int(__FILE__, __LINE__));
    incoming += received_ints.back();
  }
  Tensor out = at::empty({incoming}, x.options()), from = in;
  auto work = issue_all_to_all(pg, out, from, received_ints, sent_ints, async);
  if (!async) {
    finish(work);
    work.reset();
  }
  return Pending(std::move(out), std::move(work), then);
}

}  // namespace

Tensor all_to_all(const Tensor& x, const std::string& group, int64_t split_dim, int64_t concat_dim,
                  const Split& split, const Split& concat) {
  return exchange(x, group, split_dim, concat_dim, split, concat, false).wait();
}
Pending all_to_all_async(const Tensor& x, const std::string& group, int64_t split_dim,
                         int64_t concat_dim, const Split& split, const Split& concat) {
  return exchange(x, group, split_dim, concat_dim, split, concat, true);
}

// An all-to-all whose blocks are empty but for those of the neighbours: torch's compiler knows no
// send and receive
Pending rotate_async(const Tensor& x, const std::string& group, c10::SymIntArrayRef shape) {
  const auto pg = resolve(group);
  const int64_t p = pg->getSize(), rank = pg->getRank(), next = (rank + 1) % p;
  const int64_t before = (rank + p - 1) % p;
  const Tensor in = x.contiguous().view(-1);
  SymInt incoming = 1;
  for (const auto& size : shape) incoming = incoming * size;
  const auto then = [shape = shape.vec()](const Tensor& flat) { return flat.view_symint(shape); };
  if (traced(x)) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::all_to_all_single", "");
    std::vector<SymInt> sent(p, 0), received(p, 0);
    sent[next] = in.sym_numel(), received[before] = incoming;
    return Pending(functional(op, in, received, sent, bare_name(group)), nullptr, then);
  }
  BelowAutograd below;
  std::vector<int64_t> sent(p, 0), received(p, 0);
  sent[next] = in.numel(), received[before] = incoming.guard_int(__FILE__, __LINE__);
  Tensor out = at::empty({received[before]}, x.options()), from = in;
  auto work = issue_all_to_all(pg, out, from, received, sent, true);
  return Pending(std::move(out), std::move(work), then);
}

Pending broadcast_async(const Tensor& x, const std::string& group, int64_t root,
                        c10::SymIntArrayRef shape) {
  const auto pg = resolve(group);
  const bool own = pg->getRank() == root;
  if (traced(x)) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::broadcast", "");
    return Pending(
        functional(op, own ? x.contiguous() : x.new_empty_symint(shape), root, bare_name(group)),
        nullptr);
  }
  BelowAutograd below;
  Tensor y = own ? x.contiguous() : x.new_empty_symint(shape);
  if (y.numel() == 0) return Pending(y, nullptr);
  auto work = issue_broadcast(pg, y, root);
  return Pending(std::move(y), std::move(work));
}

}  // namespace tp_ext::comm
