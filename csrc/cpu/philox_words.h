// Philox words of consecutive counters, four each, and chunks of contiguous elements.

#pragma once

#include <algorithm>

#include "kernels/philox.h"

namespace tp_ext {

// Elements drawn at once. Few, so that the loop over them finds in the cache what the hardware has
// prefetched meanwhile.
constexpr int64_t kWordChunk = 256;

// Room for a word per element, and for the rest of a group of counters that are drawn together
struct WordBuffer {
  alignas(64) uint32_t words[kWordChunk + 64];
};

// The keys of the ten rounds, shared by all words of a seed
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

// Fills the buffer with the words of `counters` counters, at most kWordChunk / 4. The rest of the
// buffer may be overwritten.
void draw_words(const PhiloxKeys& keys, uint64_t counter, int64_t counters, WordBuffer& buffer);

// The counters needed for n elements from `first` on, `each` elements per counter
inline int64_t counters_over(uint64_t first, int64_t n, int64_t each) {
  return (static_cast<int64_t>(first % each) + n + each - 1) / each;
}

// Calls f(i, first, n) for the chunks of the local elements [begin, end), begin < end: n elements
// from i on that are contiguous in the full tensor too, from `first` on, not across a multiple of
// `limit`.
template <typename F>
void for_each_chunk(const GlobalIndex& index, int64_t begin, int64_t end, int64_t limit, F f) {
  uint64_t first = index(begin);
  int64_t row_end = begin - begin % index.local_inner + index.local_inner;
  for (int64_t i = begin; i < end;) {
    const auto left = limit - static_cast<int64_t>(first % static_cast<uint64_t>(limit));
    const int64_t n = std::min(std::min(row_end, end) - i, left);
    f(i, first, n);
    i += n;
    first += n;
    if (i == row_end) {
      first = index.rows && i < end ? index(i) : first + index.full_inner - index.local_inner;
      row_end += index.local_inner;
    }
  }
}

}  // namespace tp_ext
