// Rendezvous of the ranks of a new group, over torch's store.
//
// The store may have served groups of the same name before, and ranks that were killed midway. So
// the presence of a key proves nothing: rank 0 makes new memory and offers it under a key that
// holds the other rank's random number, which only a live rank waits for; a rank records that it
// has joined in that memory, not in the store.
//
//   tp_shm/rank/R     rank R's number; empty when it does not wait; "!", its number and a reason
//                     when it cannot join
//   tp_shm/offer/N    rank 0's answer to the number N: host and name of the memory, or "!" and why
//                     there is none. Removed by its reader.
//
// A store may report a set as done before other ranks see it, as TCPStore does. So a key has only
// one writer, and a rank that empties its key makes another request to the store after that.
//
// Three round trips per rank with a TCPStore, for any number of ranks.

#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "shm/core/layout.h"
#include "shm/core/segment.h"

namespace tp_ext::shm {

// Slots of 128 KiB stay in a core's second-level cache; larger ones are no faster
Geometry geometry_for(int ranks);

// Rank 0 makes the segment, the others open it, then its name is removed. Raises on all ranks,
// naming the causes, if they are not on one host or one cannot open it.
Segment meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::chrono::milliseconds timeout, const Geometry& geometry, const std::string& name);

}  // namespace tp_ext::shm
