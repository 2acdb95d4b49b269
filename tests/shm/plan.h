// A long random sequence of all calls and messages, the same on all ranks; each rank chooses how
// and when it waits. Every result is compared with the expected one.

#pragma once

#include "harness.h"

namespace tp_ext::shm::test {

struct Plan {
  int ranks;
  int64_t operations;
  uint64_t seed;
  int64_t longest;  // bytes of a tensor
};

// Runs it as `rank` of all the engines' groups; returns once everything has been checked
void follow(const Plan& plan, const std::vector<std::shared_ptr<Engine>>& engines, int rank);

}  // namespace tp_ext::shm::test
