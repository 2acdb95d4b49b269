// Token rows split into chunks: chunk i has part i of every rank's rows, so that a chunk of a
// sharded tensor is gathered, or reduced, by one collective.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/split.h"

namespace tp_ext {

struct Range {
  c10::SymInt start, length;
};

// Chunk i of n elements; lengths differ by one at most
inline Range chunk_of(const c10::SymInt& n, int64_t i, int64_t chunks) {
  const c10::SymInt start = n * i / chunks;
  return {start, n * (i + 1) / chunks - start};
}

inline at::Tensor tokens_of(const at::Tensor& x, const Range& range) {
  return x.narrow_symint(0, range.start, range.length);
}

// Chunk i of every rank's tokens: where they are in the full tensor and in the gathered chunk
struct TokenChunk {
  Split tokens;
  std::vector<Range> full, gathered;

  TokenChunk(const std::vector<c10::SymInt>& lengths, int64_t i, int64_t chunks) {
    c10::SymInt start = 0, at = 0;
    for (const auto& n : lengths) {
      const auto own = chunk_of(n, i, chunks);
      tokens.sizes.push_back(own.length);
      full.push_back({start + own.start, own.length});
      gathered.push_back({at, own.length});
      start = start + n;
      at = at + own.length;
    }
  }
};

}  // namespace tp_ext
