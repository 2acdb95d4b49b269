// Counts every collective that this process issues, whichever library or thread issues it: these
// operators, torch.distributed, DDP, FSDP, compiled code. Facts only;
// tp_ext/debug/collective_counts.py turns them into bytes on the wire.
//
// Uses torch's record functions, as the profiler does, and needs no dispatch mode, so that counted
// calls take the same path as uncounted ones. While no counter is open, nothing is registered.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tp_ext/export.h"

namespace tp_ext::comm {

// Equal calls, and their number: `own` is the part of the `full` bytes that begins or ends on this
// rank and is never sent.
struct CollectiveCount {
  std::string group;
  int64_t group_size;
  std::string kind;
  int64_t full, own, number;
  std::string op;  // the operator of the first of them, with its namespace
};

TP_EXT_API int64_t open_counter(bool keep_calls);  // returns its id
TP_EXT_API void close_counter(int64_t id);
TP_EXT_API std::vector<CollectiveCount> read_counter(
    int64_t id);                                                 // in the order of their first call
TP_EXT_API std::vector<CollectiveCount> read_calls(int64_t id);  // one by one, if it keeps them

}  // namespace tp_ext::comm
