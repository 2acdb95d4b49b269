// Types of arguments that operators share, and the typed handle of an operator. The types of the
// operators themselves are in operators.h.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace tp_ext {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<at::Tensor>;
using Sizes = at::OptionalSymIntArrayRef;

inline bool has(const OptionalTensor& t) { return t.has_value() && t->defined(); }
// The dtype in which a half type is summed
inline at::ScalarType sum_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The typed handle of "tp_ext::<name>"; TP_OP of operators.h gives it the declared type
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace tp_ext
