// Calls between C++ files: operators are called by name, through the dispatcher.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace tp_ext {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalSizes = at::OptionalSymIntArrayRef;

// The typed handle of "tp_ext::<name>". Look it up once per call site:
//   static const auto op = find_op<Tensor(const Tensor&, double)>("tp_ext::_name");
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace tp_ext
