// The nodes of a tree as a list: after node k the last `after[k]` sums that wait are added to it
// one after the other, the latest first; then it waits itself. The last node leaves the root.

#pragma once

#include <cstdint>

namespace tp_ext {

constexpr int kTreeNodes = 256;  // of one launch
constexpr int kTreeDepth = 16;   // sums that wait at a time: nodes of distinct levels

struct TreeJoins {
  int nodes;
  uint8_t after[kTreeNodes];
};

}  // namespace tp_ext
