// CPU loops: dtype dispatch, parallel ranges, and several instruction sets in one binary.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

namespace tp_ext {

// Compiles the function once per x86-64 level; the loader picks the best the machine has, so a
// wheel runs on any x86-64 and the loops still use AVX2 or AVX-512. Callees are compiled along when
// inlined, and `flatten` inlines them all: left to its size limits, gcc leaves a call in the loops
// of the larger activations or half conversions, which then run 50 times slower. Other targets: one
// version.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define TP_SIMD \
  __attribute__((flatten, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TP_SIMD
#endif

// Elements a thread should get at least, before a second thread is worth waking
constexpr int64_t kGrain = 16384;

// Calls f(T{}) with the C++ type of dtype: double, float, at::BFloat16 or at::Half
template <typename F>
void dispatch_floating(at::ScalarType dtype, const char* op, F f) {
  switch (dtype) {
    case at::kDouble:
      return f(double{});
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(at::BFloat16{});
    case at::kHalf:
      return f(at::Half{});
    default:
      TORCH_CHECK_TYPE(false, op, ": dtype ", dtype,
                       " must be float64, float32, bfloat16 or float16");
  }
}

template <typename T>
const T* in(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
const T* in(const std::optional<at::Tensor>& t) {
  return t.has_value() && t->defined() ? in<T>(*t) : nullptr;
}
template <typename T>
T* out(const at::Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

}  // namespace tp_ext
