// Rotary embedding of one pair: (a, b) turned by the angle whose cosine and sine are given. The
// first r of head_dim elements turn, r = 2 * (columns of cos): pairs (i, i + r / 2), or (2i, 2i +
// 1) if interleaved; the rest passes through. The inverse turns by the negative angle.

#pragma once

#include "scalar.h"

namespace tp_ext {

template <typename A>
struct Pair {
  A first, second;
};

template <typename A>
TP_HD Pair<A> rotate(A a, A b, A cos, A sin) {
  return {a * cos - b * sin, b * cos + a * sin};
}

// x [tokens, heads, head_dim], its tokens token_stride apart; y contiguous; half = r / 2
struct RopeShape {
  int64_t tokens, heads, head_dim, half, token_stride;
};

}  // namespace tp_ext
