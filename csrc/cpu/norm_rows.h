// Shared by the loops over rows of norm_forward.h and norm_backward.h (cpu/norm.cpp; formulas in
// kernels/norm.h); the sum of lanes also by moe_permute.cpp.
//
// A row of a half type is widened once, into a buffer that stays in the cache; the next reads and
// writes are prefetched during computation: hardware prefetches neither past a page, which a long
// row is, nor ahead of stores.

#pragma once

#include <cstdint>

#include "cpu/half_convert.h"
#include "cpu/multiversion.h"
#include "cpu/prefetch.h"
#include "kernels/half.h"
#include "kernels/norm.h"

namespace tp_ext {

// The pairwise sum of interleaved sums. Recursive, so that they stay in registers
template <int kCount, typename A>
TP_INLINE A sum_lanes(const A (&lanes)[kCount]) {
  if constexpr (kCount == 1) {
    return lanes[0];
  } else {
    A half[kCount / 2];
    for (int l = 0; l < kCount / 2; ++l) half[l] = lanes[l] + lanes[l + kCount / 2];
    return sum_lanes(half);
  }
}

}  // namespace tp_ext
