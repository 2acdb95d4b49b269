// y = residual + dropout(x + bias), per element: the sum is scaled by 1 / (1 - p) if the element's
// Philox word, as a fraction of 2^32, is at least p, and by 0 otherwise. As in torch, 0 times NaN
// or infinity stays NaN.

#pragma once

#include "philox.h"

namespace tp_ext {

template <typename A>
struct Dropout {
  uint32_t threshold;
  A scale;

  // p = 1 drops all: the largest word passes the threshold, so the scale is 0 too
  explicit Dropout(double p)
      : threshold(dropout_threshold(p)), scale(p < 1 ? static_cast<A>(1 / (1 - p)) : A(0)) {}

  TP_HD bool keeps_all() const { return threshold == 0; }  // then no word need be drawn
  TP_HD A factor(uint32_t word) const { return word >= threshold ? scale : A(0); }
};

}  // namespace tp_ext
