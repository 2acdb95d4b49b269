// How the ranks of a new group find each other, over torch's store.
//
// The store may have served groups of the same name before, and ranks that were killed on the way.
// So no key of it is believed by its presence alone: rank 0 makes new memory and offers it under a
// key that holds the other rank's random number, which only a rank that lives now waits for; who
// has joined is said in that memory, not in the store.
//
//   tp_shm/rank/R     rank R's number; empty when it does not wait; "!", its number and a reason
//                     when it cannot join
//   tp_shm/offer/N    rank 0's answer to the number N: host and name of the memory, or "!" and why
//                     there is none. Removed by who reads it.
//
// A store may take a set for done before others see it, as TCPStore does. So a key is only ever
// written by one rank, and a rank that empties its own asks the store something after that.
//
// Three round trips for each rank with a TCPStore, however many ranks there are.

#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "shm/core/segment.h"
#include "shm/core/layout.h"

namespace tp_ext::shm {

// Slots of 128 KiB stay in a core's second-level cache; larger ones are no faster
Geometry geometry_for(int ranks);

// Rank 0 makes the segment, the others open it, then its name goes. Raises on all ranks, naming
// them, if they are not on one host or one cannot open it.
Segment meet(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::chrono::milliseconds timeout, const Geometry& geometry, const std::string& name);

}  // namespace tp_ext::shm
