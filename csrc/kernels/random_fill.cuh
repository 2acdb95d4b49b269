// Fills with random values by global index. A thread takes one counter of one row, draws its four
// values and stores those whose elements are local: the same bits for every slicing.

#pragma once

#include <algorithm>

#include "divide.h"
#include "launch_table.h"
#include "random_fill.h"
#include "truncated_normal.h"
#include "vec.cuh"

namespace tp_ext {

// Blocks of the grid for n elements, by the table or one counter a thread
inline int fill_blocks(int64_t n, const LaunchChoice& tuned) {
  const int most = grid_for(n / 4 + 1);
  return tuned.blocks > 0 ? std::min(tuned.blocks, most) : most;
}

template <typename T, typename Draw>
__global__ void random_fill_kernel(T* self, int64_t n, const int64_t* seed_ptr, Draw draw,
                                   GlobalIndex index) {
  const uint64_t seed = static_cast<uint64_t>(*seed_ptr);
  // local_inner elements that start anywhere within a counter touch at most this many counters
  const int64_t counters = (index.local_inner + 6) / 4;
  grid_stride(n / index.local_inner * counters, 1, [&](int64_t item) {
    const int64_t row = divide(item, counters), start = row * index.local_inner;
    const int64_t first = row * index.full_inner + index.offset;
    const int64_t counter = first / 4 + (item - row * counters);
    if (4 * counter >= first + index.local_inner) return;
    const PhiloxWords words = philox4x32(seed, static_cast<uint64_t>(counter));
    double values[4];
    if constexpr (Draw::kPairs) {
      const ValuePair a = draw(words.w[0], words.w[1]), b = draw(words.w[2], words.w[3]);
      values[0] = a.even, values[1] = a.odd, values[2] = b.even, values[3] = b.odd;
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) values[k] = draw(words.w[k]);
    }
    const int64_t begin = 4 * counter - first;
    T* const to = self + start + begin;
    if (begin >= 0 && begin + 4 <= index.local_inner &&
        reinterpret_cast<uintptr_t>(to) % sizeof(Vec<T, 4>) == 0) {
      Vec<T, 4> all;
#pragma unroll
      for (int k = 0; k < 4; ++k) all.v[k] = round_to<T>(values[k]);
      store<4>(to, 0, all);
      return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t column = 4 * counter + k - first;
      if (column >= 0 && column < index.local_inner) self[start + column] = round_to<T>(values[k]);
    }
  });
}

}  // namespace tp_ext
