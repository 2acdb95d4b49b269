// What the Functions of this folder share: torch's names for them, the scope in which they run, and
// the gradients that they return.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "autograd/differentiation.h"
#include "comm/collectives.h"
#include "types.h"

namespace tp_ext {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// A scope in which operators skip the kernels of autograd: the Function that opens it has a
// backward of its own. Traced calls are dispatched in full, so that a dispatch mode or
// torch.compile sees every operator.
struct Unrecorded {
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard;

  explicit Unrecorded(bool traced) {
    if (!traced) guard.emplace();
  }
  explicit Unrecorded(const Tensor& x) : Unrecorded(comm::traced(x)) {}
};

// The gradients of the first arguments of a Function; undefined for the others. Autograd drops
// undefined ones that are more than the arguments, so no Function counts its own.
inline variable_list gradients(std::initializer_list<Tensor> first = {}) {
  constexpr size_t kMaxArguments = 12;
  variable_list all(kMaxArguments);
  std::copy(first.begin(), first.end(), all.begin());
  return all;
}

// nullopt for an undefined tensor
inline OptionalTensor optional(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

}  // namespace tp_ext
