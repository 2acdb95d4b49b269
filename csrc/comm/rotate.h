// The step of a ring over a process group; collectives.h has the other collectives.

#pragma once

#include <c10/core/SymIntArrayRef.h>
#include <string>

#include "comm/collectives.h"

namespace tp_ext::comm {

// [Note: the ring of a context group is an all-to-all with empty blocks]
// x goes to the next rank, the last one's to the first; the result, of `shape`, comes from the one
// before. All ranks must call it, whose x may be empty and of different shapes.
Pending rotate_async(const at::Tensor& x, const std::string& group, c10::SymIntArrayRef shape);

}  // namespace tp_ext::comm
