// One pass of dropout over elements that are neighbours in the full tensor.

#pragma once

#include "cpu/philox_words.h"
#include "kernels/dropout.h"
#include "kernels/half.h"

namespace tp_ext {

// y[i] = dropout(x[i] + bias[i]) + residual[i] for n elements that stand side by side in the full
// tensor, from `first` on, and not across a multiple of kPassRun. Null: no bias, no residual. sums,
// if there, gets all dropout(x + bias) added.
constexpr int64_t kPassRun = int64_t{1} << 35;  // the high half of the counters is the same
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
