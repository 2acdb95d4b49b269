// How a dim that is cut over ranks lies in the full tensor, and how in what a collective moves.
//
//   full    [outer, total, inner]: rows of total * inner elements, rank k's a run in each of them
//   blocks  one per rank, one after the other: the rank's runs, row by row; padded: each run of the
//           length of the longest, zeros after its end
//
// All in units of so many bytes that every run, and every start of one, is whole units: elements do
// not matter.

#pragma once

#include <cstdint>

namespace tp_ext {

struct ShardRun {
  int64_t length;       // of the rank's run in a row
  int64_t full_start;   // where it begins in a row of full
  int64_t block_start;  // where the rank's block begins in blocks
  int64_t block_row;    // from one run of the block to the next
};

// Ranks whose runs travel as one kernel argument: 2 KB of the 4 that every GPU takes
constexpr int kShardRuns = 64;
struct ShardRuns {
  ShardRun of[kShardRuns];
};

}  // namespace tp_ext
