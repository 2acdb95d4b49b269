// Element-wise sums and the like over the ranks' tensors, for every dtype.

#pragma once

#include <c10/core/ScalarType.h>
#include <string>

#include "shm/core/reductions.h"
#include "tp_ext/export.h"

namespace tp_ext::shm {

enum class Operation : uint32_t { kSum, kAverage, kMin, kMax, kProduct, kAnd, kOr, kXor, kTreeSum };

// Half types are combined in fp32 and rounded once. Raises ValueError for an operation that the
// dtype does not have.
TP_EXT_API Combine combine_for(at::ScalarType dtype, Operation operation);

}  // namespace tp_ext::shm
