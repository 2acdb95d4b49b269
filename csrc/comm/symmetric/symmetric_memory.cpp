// torch's symmetric memory: memory of each rank that the other ranks read and write directly, over
// NVLink or PCIe, and the operators torch::symm_mem that sum and multiply through it.
//
// The criteria (name, dtype, size, device type, streams of captures) are the same on every rank.
// torch owns the buffer, which it calls a persistent allocation, and finds it by its number; this
// file only keeps the stream that last used a group's memory, since uses on several streams must
// wait for each other (stream_order.h).

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#ifdef TP_EXT_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

#include <mutex>
#include <unordered_map>

#include "comm/alternative.h"
#include "comm/collectives.h"
#include "comm/pack.h"
#include "comm/symmetric/group.h"
#include "comm/symmetric/stream_order.h"

namespace tp_ext::comm {
namespace {

using at::Tensor;

constexpr int64_t kAccess = 16;  // bytes per access of torch's kernels

enum class Algorithm { backend, one_shot, two_shot };

Algorithm choose(at::ScalarType dtype, int64_t numel, const SymmetricGroup& limits) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const bool kernels = dtype == at::kFloat || dtype == at::kBFloat16;
  if (!kernels || bytes == 0 || bytes % kAccess != 0) return Algorithm::backend;
  if (bytes <= limits.one_shot_bytes) return Algorithm::one_shot;
  const bool two_shot = limits.size == 2 || limits.size == 4 || limits.size == 8;
  return two_shot && bytes <= limits.max_bytes ? Algorithm::two_shot : Algorithm::backend;
}

// An operator of torch, if it exists for the device of x: some are defined by a Python module, some
// builds lack the kernels
std::optional<c10::OperatorHandle> find(const char* name, const Tensor& x) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  const auto key = x.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return op.has_value() && op->hasKernelForDispatchKey(key) ? op : std::nullopt;
}

template <typename... Args>
torch::jit::Stack call(const c10::OperatorHandle& op, Args&&... args) {
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Args>(args)...);
  op.callBoxed(stack);
  return stack;
}

// The alignment of x must not decide the algorithm, since it may differ between ranks; an unaligned
// x is copied
Tensor aligned(const Tensor& x) {
  const Tensor y = x.contiguous();
  const auto offset = y.storage_offset() * static_cast<int64_t>(y.element_size());
  const bool is = offset % kAccess == 0 && reinterpret_cast<uintptr_t>(y.data_ptr()) % kAccess == 0;
  return is ? y : fresh_contiguous(y);
}

// The group's buffer, shaped like x. Must have no other user at the same time.
Tensor buffer_like(const Tensor& x, const SymmetricGroup& limits) {
  const auto bytes = c10d::symmetric_memory::empty_strided_p2p(
      {limits.max_bytes}, {1}, at::kByte, x.device(), limits.name, limits.buffer);
  return bytes.narrow(0, 0, x.numel() * static_cast<int64_t>(x.element_size()))
      .view(x.scalar_type())
      .view(x.sizes());
}

// Whether a graph is being captured on the stream; torch before 2.12 or so does not report it
template <typename S>
auto reports_capture(const S& stream, int) -> decltype(stream.is_capturing()) {
  return stream.is_capturing();
}
template <typename S>
bool reports_capture(const S&, long) {
  return false;
}

// The same of the current stream; with every torch in a build with CUDA
bool is_capturing(const c10::Stream& stream) {
#ifdef TP_EXT_WITH_CUDA
  if (stream.device_type() == c10::kCUDA) {
    const c10::OptionalDeviceGuard guard(stream.device());
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
#endif
  return reports_capture(stream, 0);
}

// One use of a group's memory, on the current stream
class Use {
 public:
  Use(const Tensor& x, const SymmetricGroup& limits)
      : group_(std::hash<std::string>()(limits.name)),
        stream_(c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device())),
        capturing_(is_capturing(stream_)),
        ordered_(!x.is_cpu()) {
    if (!ordered_) return;
    const std::lock_guard lock(mutex());
    allowed_ = orders()[group_].begin(stream_, capturing_);
  }
  ~Use() {
    if (!ordered_ || !allowed_) return;
    const std::lock_guard lock(mutex());
    orders()[group_].end(stream_, capturing_);
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  bool allowed() const { return allowed_; }

 private:
  using Orders = std::unordered_map<size_t, StreamOrder<c10::Stream, c10::Event>>;
  static std::mutex& mutex() {
    static auto& mutex = *new std::mutex;
    return mutex;
  }
  // Lives to the end of the process, like the buffers: the driver may be gone by then, so no event
  // may be destroyed
  static Orders& orders() {
    static auto& orders = *new Orders;
    return orders;
  }

  const size_t group_;
  const c10::Stream stream_;
  const bool capturing_, ordered_;
  bool allowed_ = true;
};

// Fused GEMMs: nothing to gain without rows, and torch splits them evenly
std::optional<SymmetricGroup> fusable(const Tensor& x, const std::string& group,
                                      const Split& tokens) {
  if (traced(x) || !tokens.even() || x.dim() < 2 || x.sym_numel() == 0) return std::nullopt;
  auto limits = symmetric_group(group);
  if (!limits.has_value() || !limits->fused) return std::nullopt;
  check_place(group);
  return limits;
}

const char* algorithm_of(at::ScalarType dtype, int64_t numel, const std::string& group) {
  const auto limits = symmetric_group(group);
  const auto chosen = limits ? choose(dtype, numel, *limits) : Algorithm::backend;
  if (chosen == Algorithm::backend) return "backend";
  return chosen == Algorithm::one_shot ? "one_shot" : "two_shot";
}

std::optional<Tensor> all_reduce_symmetric(const Tensor& x, const std::string& group) {
  const auto limits = symmetric_group(group);
  if (!limits) return std::nullopt;
  const auto chosen = choose(x.scalar_type(), x.numel(), *limits);
  if (chosen == Algorithm::backend) return std::nullopt;
  const auto op = find(chosen == Algorithm::one_shot ? "symm_mem::one_shot_all_reduce_copy"
                                                     : "symm_mem::two_shot_all_reduce_out",
                       x);
  if (!op) return std::nullopt;
  check_place(group);
  at::AutoDispatchBelowADInplaceOrView below;
  const Use use(x, *limits);
  if (!use.allowed()) return std::nullopt;
  const Tensor in = aligned(x);
  Tensor buffer = buffer_like(in, *limits);
  if (chosen == Algorithm::one_shot)  // its kernel copies the input itself
    return call(*op, buffer, in, std::string("sum"), limits->name).back().toTensor();
  buffer.copy_(in);
  return call(*op, buffer, std::string("sum"), limits->name, at::empty_like(in)).back().toTensor();
}

std::optional<GatherMatmul> all_gather_matmul(const Tensor& x, const Tensor& w, bool transposed,
                                              const std::string& group, const Split& tokens,
                                              bool wants_x) {
  const auto limits = fusable(x, group, tokens);
  if (!limits) return std::nullopt;
  const auto op = find("symm_mem::fused_all_gather_matmul", x);
  if (!op) return std::nullopt;
  at::AutoDispatchBelowADInplaceOrView below;
  const Use use(x, *limits);
  if (!use.allowed()) return std::nullopt;
  const std::vector<Tensor> factors{transposed ? w.t() : w};
  const auto results = call(*op, x.contiguous(), factors, int64_t{0}, limits->name, wants_x);
  return GatherMatmul{results[1].toTensorVector()[0], wants_x ? results[0].toTensor() : Tensor()};
}

std::optional<Tensor> matmul_reduce_scatter(const Tensor& x, const Tensor& w,
                                            const std::string& group, const Split& tokens) {
  const auto limits = fusable(x, group, tokens);
  if (!limits) return std::nullopt;
  const auto op = find("symm_mem::fused_matmul_reduce_scatter", x);
  if (!op) return std::nullopt;
  at::AutoDispatchBelowADInplaceOrView below;
  const Use use(x, *limits);
  if (!use.allowed()) return std::nullopt;
  return call(*op, x.contiguous(), w.t(), std::string("sum"), int64_t{0}, limits->name)
      .back()
      .toTensor();
}

// Runs when the library is loaded
[[maybe_unused]] const bool registered = [] {
  alternative = {algorithm_of, all_reduce_symmetric, all_gather_matmul, matmul_reduce_scatter};
  return true;
}();

}  // namespace
}  // namespace tp_ext::comm
