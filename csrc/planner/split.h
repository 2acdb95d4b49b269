// The number of blocks of each stage of a pipeline.

#pragma once

#include <cstdint>
#include <vector>

namespace tp_ext::planner {

// As tp_ext.parallel.pipeline.split.split_blocks of equal blocks, bit by bit: ties are decided by
// the rounding of the same sums.
std::vector<int64_t> split_blocks(int64_t blocks, int64_t stages);

}  // namespace tp_ext::planner
