// How the ranks of a new group find each other: over torch's store, once.

#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "shm/segment.h"
#include "shm/shared.h"

namespace tp_ext::shm {

// Slots of 128 KiB stay in a core's second-level cache; larger ones are no faster
Geometry geometry_for(int ranks);

// Rank 0 makes the segment, the others open it, then its name goes. Raises on all ranks, naming
// them, if they are not on one host or one cannot open it.
Segment meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::chrono::milliseconds timeout, const Geometry& geometry, const std::string& name);

}  // namespace tp_ext::shm
