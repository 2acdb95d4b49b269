// Loops with software prefetch. Hardware prefetches only within a page of 4 KB, and not past the
// loads in flight while the processor computes.
//
// [Note: CPU loops prefetch]

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/multiversion.h"

namespace tp_ext {

// Iterations between two prefetches: whole cache lines of every type
constexpr int kSweep = 32;

// Prefetches the lines of kCount elements from p on into the cache of level kCache; non-const
// memory is prefetched for writing
template <int kCache, int kCount, typename T>
TP_INLINE void fetch(T* p) {
  for (size_t byte = 0; byte < kCount * sizeof(T); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + byte, !std::is_const_v<T>, 4 - kCache);
}

// Calls f(k) for k < n, while prefetching the n elements from each of `next` on
template <int kCache, typename F, typename... T>
TP_INLINE void sweep(int64_t n, F f, T*... next) {
  int64_t k = 0;
  for (; k + kSweep <= n; k += kSweep) {
    (fetch<kCache, kSweep>(next + k), ...);
    for (int l = 0; l < kSweep; ++l) f(k + l);
  }
  for (; k < n; ++k) f(k);
}

}  // namespace tp_ext
