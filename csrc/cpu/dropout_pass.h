// One pass of dropout over elements that are contiguous in the full tensor.

#pragma once

#include "cpu/philox_words.h"
#include "kernels/dropout.h"
#include "kernels/half.h"

namespace tp_ext {

// y[i] = dropout(x[i] + bias[i]) + residual[i] for n elements that are contiguous in the full
// tensor, from `first` on, not across a multiple of kPassChunk. Null: no bias, no residual. sums,
// if not null, is increased by all dropout(x + bias).
constexpr int64_t kPassChunk = int64_t{1} << 35;  // the high half of the counters is constant
template <typename T>
struct DropoutPass {
  const PhiloxKeys& keys;
  Dropout<acc_t<T>> dropout;
  const T* x;
  const acc_t<T>* bias;
  const T* residual;
  T* y;
  acc_t<T>* sums;
  int64_t n;
  uint64_t first;
};

template <typename T>
void dropout_pass(const DropoutPass<T>& pass);

}  // namespace tp_ext
