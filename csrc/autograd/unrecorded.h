// A scope in which operators skip the kernels of autograd: the Function that opens it has a backward
// of its own. Traced calls are dispatched in full, so that a dispatch mode or torch.compile sees
// every operator.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>

#include "comm/collectives.h"
#include "ops.h"

namespace tp_ext {

struct Unrecorded {
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard;

  explicit Unrecorded(bool traced) {
    if (!traced) guard.emplace();
  }
  explicit Unrecorded(const Tensor& x) : Unrecorded(comm::traced(x)) {}
};

}  // namespace tp_ext
