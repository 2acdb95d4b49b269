// What the loops over rows of norm_forward.h and norm_backward.h share (cpu/norm.cpp; formulas in
// kernels/norm.h).
//
// A row of a half type is widened once, into a buffer that stays in the cache; what comes next from
// memory, and what is written next, is fetched while there is work to do: hardware looks neither
// past a page, which a long row is, nor ahead of stores.

#pragma once

#include <cstdint>

#include "cpu/multiversion.h"
#include "cpu/half_convert.h"
#include "cpu/prefetch.h"
#include "kernels/half.h"
#include "kernels/norm.h"

namespace tp_ext {

// The sum of interleaved sums, pairwise. Recursive, so that they stay in registers
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
