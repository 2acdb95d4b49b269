// The primitives that fill a tensor with random numbers, out of one function of the device:
//   Fill()(self, seed, draw, op, local_inner, full_inner, offset), draw: see kernels/random_fill.h

#pragma once

#include "args/random.h"
#include "args/truncated_normal.h"
#include "kernels/random_fill.h"

namespace tp_ext {

template <typename Fill>
struct RandomFillPrimitives {
  static void philox_uniform_(at::Tensor& self, const at::Tensor& seed, double low, double high,
                              int64_t local_inner, int64_t full_inner, int64_t offset) {
    check_floating(self, "self");
    Fill()(self, seed, Uniform{low, high - low}, "_philox_uniform_", local_inner, full_inner,
           offset);
  }

  static void philox_normal_(at::Tensor& self, const at::Tensor& seed, double mean, double std,
                             int64_t local_inner, int64_t full_inner, int64_t offset) {
    check_floating(self, "self");
    Fill()(self, seed, Normal{mean, std}, "_philox_normal_", local_inner, full_inner, offset);
  }

  static void philox_truncated_normal_(at::Tensor& self, const at::Tensor& seed, double mean,
                                       double std, double low, double high, int64_t local_inner,
                                       int64_t full_inner, int64_t offset) {
    check_floating(self, "self");
    with_truncated_draw(check_truncated_normal(self, mean, std, low, high), [&](auto draw) {
      Fill()(self, seed, draw, "_philox_truncated_normal_", local_inner, full_inner, offset);
    });
  }
};

}  // namespace tp_ext
