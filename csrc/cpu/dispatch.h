// CPU loops: dtype dispatch and parallel ranges.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu/multiversion.h"
#include "dtype_dispatch.h"
#include "kernels/half.h"

namespace tp_ext {

// Minimum number of elements per thread: fewer are not worth waking a second thread
constexpr int64_t kGrain = 16384;
inline int64_t rows_per_thread(int64_t width) { return std::max<int64_t>(1, kGrain / (width + 1)); }

template <typename F>
void dispatch_floating(at::ScalarType dtype, const char* op, F f) {
  dispatch_storage<Bf16, Fp16>(dtype, op, f);
}

}  // namespace tp_ext
