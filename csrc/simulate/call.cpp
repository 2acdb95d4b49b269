#include "simulate/call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sstream>

#include "shm/tensors.h"

namespace tp_ext::simulate {

using at::Tensor;

namespace {

constexpr const char* kOperations[] = {"sum",     "avg",  "min", "max",
                                       "product", "band", "bor", "bxor"};

// Shapes that differ in dims of size 1 are equal, as for tp_shm
std::vector<int64_t> long_dims(const Tensor& t) {
  std::vector<int64_t> dims;
  for (const int64_t n : t.sizes())
    if (n != 1) dims.push_back(n);
  return dims;
}

Tensor sent(const Call& from, size_t to) { return from.sends.empty() ? Tensor() : from.sends[to]; }

bool same_size(const Tensor& a, const Tensor& b) {
  return a.defined() && a.numel() == b.numel() && a.scalar_type() == b.scalar_type();
}

// On the CPU, whichever the device: one arithmetic, and the same bits
Tensor combined(const std::vector<CallPtr>& calls, size_t to) {
  Tensors inputs;
  std::vector<const void*> pointers;
  for (const auto& call : calls) {
    inputs.push_back(shm::as_reals(sent(*call, to)).cpu().contiguous());
    pointers.push_back(inputs.back().const_data_ptr());
  }
  const Tensor result = at::empty(inputs[0].sizes(), inputs[0].options());
  const auto combine = shm::combine_for(result.scalar_type(), *calls[0]->operation);
  combine(result.mutable_data_ptr(), pointers.data(), static_cast<int>(calls.size()),
          result.numel());
  return result;
}

void store(const Tensor& to, const Tensor& from) {
  if (to.is_same(from)) return;
  to.copy_(from.reshape(to.sizes()));
  synchronize(to);
}

}  // namespace

void synchronize(const Tensor& t) {
  if (t.defined() && !t.is_cpu() && !t.is_meta())
    c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device()).synchronize();
}

bool Call::fits(const Call& other) const {
  if (kind != other.kind || root != other.root || operation != other.operation) return false;
  if (!shown.defined()) return true;
  return shown.scalar_type() == other.shown.scalar_type() &&
         (!same_shape || long_dims(shown) == long_dims(other.shown));
}

std::string Call::text() const {
  std::ostringstream out;
  out << kind << '(';
  const char* separator = "";
  if (shown.defined()) {
    out << c10::getDtypeNames(shown.scalar_type()).first << ' ' << shown.sizes();
    separator = ", ";
  }
  if (operation) out << separator << kOperations[static_cast<int>(*operation)];
  if (root >= 0)
    out << separator << (kind == "send" ? "to " : kind == "recv" ? "from " : "root ") << root;
  if (tag) out << ", tag " << tag;
  out << ')';
  return out.str();
}

std::optional<std::pair<int, int>> execute(const std::vector<CallPtr>& calls) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const size_t p = calls.size();
  const bool reduces = calls[0]->operation.has_value();
  for (size_t to = 0; to < p; ++to) {
    const auto& receives = calls[to]->receives;
    if (receives.empty()) continue;
    for (size_t from = 0; from < p; ++from) {
      const Tensor& expected = receives[reduces ? 0 : from];
      if (expected.defined() && !same_size(sent(*calls[from], to), expected))
        return std::pair(static_cast<int>(from), static_cast<int>(to));
    }
  }
  Tensors sums(p);
  for (size_t to = 0; reduces && to < p; ++to) {  // all before the first is stored: in place
    if (calls[to]->receives.empty()) continue;
    sums[to] = to > 0 && calls[0]->kind == "all_reduce" ? sums[0] : combined(calls, to);
  }
  for (size_t to = 0; to < p; ++to) {
    const auto& receives = calls[to]->receives;
    if (reduces) {
      if (!receives.empty()) store(shm::as_reals(receives[0]), sums[to]);
      continue;
    }
    for (size_t from = 0; from < receives.size(); ++from)
      if (receives[from].defined()) store(receives[from], sent(*calls[from], to));
  }
  for (const auto& call : calls) {
    call->sends.clear();
    call->receives.clear();
    call->done = true;
  }
  return std::nullopt;
}

bool deliver(const Call& send, const Call& receive) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!same_size(send.sends[0], receive.receives[0])) return false;
  store(receive.receives[0], send.sends[0]);
  return true;
}

}  // namespace tp_ext::simulate
