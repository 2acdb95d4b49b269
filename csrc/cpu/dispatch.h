// CPU loops: dtype dispatch and parallel ranges.

#pragma once

#include <ATen/Parallel.h>

#include "cpu/multiversion.h"
#include "kernels/half.h"
#include "dtype_dispatch.h"

namespace tp_ext {

// Elements a thread should get at least, before a second thread is worth waking
constexpr int64_t kGrain = 16384;

template <typename F>
void dispatch_floating(at::ScalarType dtype, const char* op, F f) {
  dispatch_storage<Bf16, Fp16>(dtype, op, f);
}

}  // namespace tp_ext
