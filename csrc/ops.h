// Calls between C++ files: operators are called by name, through the dispatcher. Their types are in
// operators.h.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace tp_ext {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using Sizes = at::OptionalSymIntArrayRef;

// The typed handle of "tp_ext::<name>"; TP_OP of operators.h gives it the declared type
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace tp_ext
