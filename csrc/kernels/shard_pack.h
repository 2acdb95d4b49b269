// The layout of a sharded dim in the full tensor, and in the blocks that a collective moves.
//
//   full    [outer, total, inner]: rows of total * inner elements; in each, a chunk of rank k
//   blocks  one per rank, one after the other: the rank's chunks, row by row; padded: each chunk as
//           long as the longest, zeros after its end
//
// Lengths and starts are in units of bytes such that every chunk, and every start of one, is whole
// units: element types do not matter.

#pragma once

#include <cstdint>

namespace tp_ext {

struct ShardChunk {
  int64_t length;       // of the rank's chunk in a row
  int64_t full_start;   // its start in a row of full
  int64_t block_start;  // start of the rank's block in blocks
  int64_t block_row;    // distance between chunks of the block
};

// Ranks whose chunks are passed as one kernel argument: 2 KB of the 4 that every GPU accepts
constexpr int kShardChunks = 64;
struct ShardChunks {
  ShardChunk of[kShardChunks];
};

}  // namespace tp_ext
