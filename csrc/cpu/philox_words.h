// Philox words of runs of neighbouring elements, four per counter.

#pragma once

#include <algorithm>

#include "kernels/philox.h"

namespace tp_ext {

// Elements of a run at most. Few, so that the loop over a run finds in the cache what the processor
// has read ahead while the words were drawn: computing and memory overlap.
constexpr int64_t kWordRun = 256;

// Room for the words of a run, and for the rest of a group of counters that are drawn together
struct WordBuffer {
  alignas(64) uint32_t words[kWordRun + 64];
};

// The keys of the ten rounds: what all words of a seed have in common
struct PhiloxKeys {
  uint64_t k0[10], k1[10];
  explicit PhiloxKeys(uint64_t seed) {
    for (uint32_t round = 0; round < 10; ++round) {
      k0[round] = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
      k1[round] = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
    }
  }
  uint64_t seed() const { return k0[0] | k1[0] << 32; }
};

// Fills the buffer with the words of whole counters that cover elements [first, first + n) of the
// full tensor: the first element's is buffer.words[first % 4], and all n + first % 4 <= kWordRun
// lie in pairs and quads as in their counters. What stands behind them is overwritten.
void draw_words(const PhiloxKeys& keys, uint64_t first, int64_t n, WordBuffer& buffer);

// Calls f(i, first, n) for the runs of the local elements [begin, end), begin < end: n elements from
// i on, which in the full tensor stand side by side too, from `first` on.
template <typename F>
void for_each_run(const GlobalIndex& index, int64_t begin, int64_t end, F f) {
  uint64_t first = index(begin);
  int64_t row_end = begin - begin % index.local_inner + index.local_inner;
  for (int64_t i = begin; i < end;) {
    const int64_t skip = static_cast<int64_t>(first % 4);
    const int64_t n = std::min(std::min(row_end, end) - i, kWordRun - skip);
    f(i, first, n);
    i += n;
    first += n;
    if (i == row_end) {
      first += index.full_inner - index.local_inner;
      row_end += index.local_inner;
    }
  }
}

}  // namespace tp_ext
