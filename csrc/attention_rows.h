// Loops over the scores of one query: their bits depend on this query and its keys alone, as the
// attention of tp_ext.tp_invariant (autograd/block_attention.cpp) needs it.

#pragma once

#include <cstdint>

namespace tp_ext {

// Keys of a tile. Loops of the forward pass have this constant length and no remainder, in which a
// vector loop may round otherwise.
constexpr int64_t kTileKeys = 128;

// Keys [begin, end) of a query
struct Keys {
  int64_t begin, end;
};

template <typename A>
struct ScoreOptions {
  A scale, softcap;  // softcap 0: none
};

// Maximum and sum of the exponentials of the scores so far
template <typename A>
struct SoftmaxRow {
  A max, sum;
};

// Makes the products q k of a tile, [kTileKeys], weights relative to the maximum so far, in place.
// `out`, [width], the sum of weighted values so far, is scaled when the maximum grows. Keys that
// are not seen get 0. mask: added to the scores, of the keys that are seen, or null.
template <typename A>
void tile_weights(A* scores, const A* mask, Keys seen, const ScoreOptions<A>& options,
                  SoftmaxRow<A>& row, A* out, int64_t width);

// From the products q k and dout v of n keys: the weights exp(score - lse) and the gradients of the
// products, in place. dot: dout out.
template <typename A>
void weight_grads(A* products, A* dweights, const A* mask, Keys seen, int64_t n,
                  const ScoreOptions<A>& options, A lse, A dot);

}  // namespace tp_ext
