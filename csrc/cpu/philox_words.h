// Philox words of a run of neighbouring elements, four per counter, in a loop that vectorises.

#pragma once

#include <algorithm>

#include "cpu/simd.h"
#include "kernels/philox.h"

namespace tp_ext {

constexpr int64_t kWordRun = 2048;  // elements of a run at most: its words stay in the L1 cache

// Room for a run that starts and ends within a counter
struct WordBuffer {
  alignas(64) uint32_t words[kWordRun + 8];
};

// How many of the local elements [i, end) are neighbours in the full tensor too, a run at most
inline int64_t run_length(const GlobalIndex& index, int64_t i, int64_t end) {
  return std::min({end - i, index.local_inner - i % index.local_inner, kWordRun});
}

// Fills the buffer with the words of whole counters that cover elements [first, first + n) of the
// full tensor: the first element's is buffer.words[first % 4], and all n + first % 4 lie in pairs
// and quads as in their counters. A function of its own, not inlined into each dtype's loop.
TP_SIMD static void draw_words(uint64_t seed, uint64_t first, int64_t n, WordBuffer& buffer) {
  uint32_t* __restrict words = buffer.words;
  const int64_t counters = (static_cast<int64_t>(first % 4) + n + 3) / 4;
  for (int64_t c = 0; c < counters; ++c) {
    const PhiloxWords four = philox4x32(seed, first / 4 + c);
    for (int k = 0; k < 4; ++k) words[4 * c + k] = four.w[k];
  }
}

}  // namespace tp_ext
