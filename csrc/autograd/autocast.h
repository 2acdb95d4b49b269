// Kernels of public operators under autocast. Not in function.h: torch's header of autocast
// includes all of ATen.

#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <utility>

#include "autograd/differentiation.h"

namespace tp_ext {

// The key of autocast on a device
template <c10::DeviceType device>
constexpr auto kAutocastKey =
    device == c10::kCPU ? c10::DispatchKey::AutocastCPU : c10::DispatchKey::AutocastCUDA;

enum class AutocastTo { kLowPrecision, kFp32 };

// `op` with its arguments at the indices `cast` in the dtype of autocast, as torch's operators take
// theirs: fp32 leaves are cast to the low precision once per autocast region
template <auto op, c10::DeviceType device, AutocastTo to, size_t... cast>
struct Autocast;
template <typename Result, typename... Args, Result (*op)(Args...), c10::DeviceType device,
          AutocastTo to, size_t... cast>
struct Autocast<op, device, to, cast...> {
  static Result call(Args... args) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKey<device>);
    return call_cast(std::index_sequence_for<Args...>(), args...);
  }

 private:
  static constexpr bool is_cast(size_t argument) { return ((argument == cast) || ...); }

  template <size_t... i>
  static Result call_cast(std::index_sequence<i...>, const Args&... args) {
    const auto dtype =
        to == AutocastTo::kFp32 ? at::kFloat : at::autocast::get_autocast_dtype(device);
    return op(cast_if<is_cast(i)>(args, dtype)...);
  }

  template <bool yes, typename Arg>
  static decltype(auto) cast_if(const Arg& arg, at::ScalarType dtype) {
    if constexpr (yes)
      return at::autocast::cached_cast(dtype, arg, device);
    else
      return (arg);
  }
};

// Registers `kernel`, which excludes the key of autocast itself, for the operator under autocast
template <c10::DeviceType device, auto kernel>
void impl_autocast(torch::Library& m, const char* name) {
  Composite<kernel>::name = name;
  m.impl(name, torch::dispatch(kAutocastKey<device>, &Composite<kernel>::call));
}

// Registers a public operator, and it under autocast as torch's linear: the arguments `cast` in the
// low precision
template <auto op, size_t... cast>
void autocast_to_low_precision(torch::Library& m, const char* name) {
  impl_composite<op>(m, name);
  constexpr auto to = AutocastTo::kLowPrecision;
  impl_autocast<c10::kCPU, Autocast<op, c10::kCPU, to, cast...>::call>(m, name);
  impl_autocast<c10::kCUDA, Autocast<op, c10::kCUDA, to, cast...>::call>(m, name);
}

// The same as torch's norms: in fp32 on CUDA; the CPU keeps the dtypes
template <auto op, size_t... cast>
void autocast_to_fp32_on_cuda(torch::Library& m, const char* name) {
  impl_composite<op>(m, name);
  impl_autocast<c10::kCUDA, Autocast<op, c10::kCUDA, AutocastTo::kFp32, cast...>::call>(m, name);
}

}  // namespace tp_ext
