// Operations of this backend alone, whose numbers torch passes on: the sum of floating-point tensors
// as a binary tree over the ranks, in which neighbours are added, level by level, and an odd last
// one moves up as it is; and of an all-reduce the sum of its second tensor into its first.

#pragma once

#include <cstdint>

namespace tp_ext::shm {

constexpr uint8_t kTreeSum = 200, kSumInto = 201;
constexpr const char* kBackendName = "tp_shm";

}  // namespace tp_ext::shm
