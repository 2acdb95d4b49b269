// A broadcast within a process group; collectives.h has the other collectives.

#pragma once

#include <c10/core/SymIntArrayRef.h>
#include <string>

#include "comm/collectives.h"

namespace tp_ext::comm {

// x of the rank `root` on all ranks. Of the others, only dtype and device of x count, and `shape`
// is that of the result.
Pending broadcast_async(const at::Tensor& x, const std::string& group, int64_t root,
                        c10::SymIntArrayRef shape);

}  // namespace tp_ext::comm
