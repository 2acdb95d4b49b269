// An operation of this backend alone, whose number torch passes on: the sum of floating-point
// tensors as a binary tree over the ranks. Neighbours are added, level by level; an odd last one
// moves up as it is.

#pragma once

#include <cstdint>

namespace tp_ext::shm {

constexpr uint8_t kTreeSum = 200;
constexpr const char* kBackendName = "tp_shm";

}  // namespace tp_ext::shm
