// Permutation of tokens to the rows of their experts and back: the formula of one element, on host
// and device.
//
// rows [tokens, choices]: slot s is choice s % choices of token s / choices; rows[s] is its row of
// y, or -1 (dropped), and no two slots share a row. The operators are the three derivatives of
//
//   F(x, y, weights) = sum over slots s of weights[s] * <x[s / choices], y[rows[s]]>
//
//   permute    dF/dy        y[rows[s]] = weights[s] * x[s / choices], 0 in rows without a slot
//   unpermute  dF/dx        x[t] = sum over the slots of t, in order, of weights[s] * y[rows[s]]
//   dot        dF/dweights  <x[s / choices], y[rows[s]]>, 0 at -1

#pragma once

#include "scalar.h"

namespace tp_ext {

struct MoeShape {
  int64_t tokens, choices, rows, hidden;
};

// Without weights all of them are 1, by which products are exact
template <typename A>
TP_HD A moe_weight(const A* weights, int64_t slot) {
  return weights == nullptr ? A(1) : weights[slot];
}

template <typename T>
TP_HD T moe_scaled(T x, acc_t<T> weight) {
  return from_acc<T>(weight * to_acc(x));
}

}  // namespace tp_ext
