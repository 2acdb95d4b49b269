// Checks of the operators whose random numbers follow the global index, the same on every device.

#pragma once

#include "check.h"
#include "kernels/philox.h"

namespace tp_ext {

inline void check_seed(const at::Tensor& seed, const at::Tensor& like, const char* like_name) {
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, "seed: dtype ", seed.scalar_type(),
                   " must be int64");
  TORCH_CHECK_VALUE(seed.dim() == 0, "seed: shape ", seed.sizes(), " must be 0-dimensional");
  check_same_device(seed, "seed", like, like_name);
}

// Rows of local_inner elements, full_inner apart; the first may lie anywhere in the full tensor
inline GlobalIndex check_global_index(const at::Tensor& x, const char* name, int64_t local_inner,
                                      int64_t full_inner, int64_t offset) {
  const int64_t n = x.numel();
  TORCH_CHECK_VALUE(n == 0 || (local_inner > 0 && n % local_inner == 0),
                    "local_inner: ", local_inner, " must divide the ", n, " elements of ", name);
  TORCH_CHECK_VALUE(n == 0 || local_inner <= full_inner, "local_inner: ", local_inner,
                    " must be at most full_inner = ", full_inner);
  TORCH_CHECK_VALUE(n == 0 || offset >= 0, "offset: ", offset, " must be at least 0");
  return {local_inner, full_inner, offset};
}

}  // namespace tp_ext
