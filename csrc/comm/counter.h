// Counting of collectives: what this process asks its process groups to do, from any thread, by
// whom ever: these operators, torch.distributed, DDP, FSDP, compiled code. Facts only; what they
// mean in bytes on the wire stands in tp_ext/debug/collective_counts.py.
//
// It listens to torch's record functions, as the profiler does, and needs no dispatch mode, so that
// what is counted takes the way it takes uncounted. While nobody counts, nothing is registered.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tp_ext::comm {

// Calls that are alike: `own` is the part of the `full` bytes that begins or ends on this rank and
// is never sent.
struct CollectiveCount {
  std::string group;
  int64_t group_size;
  std::string kind;
  int64_t full, own, number;
};

int64_t open_counter();  // returns its id
void close_counter(int64_t id);
std::vector<CollectiveCount> read_counter(int64_t id);  // in the order in which they came up

}  // namespace tp_ext::comm
