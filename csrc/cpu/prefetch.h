// Loops that fetch what comes next. Hardware looks ahead within a page of 4 KB only, and not at all
// past what the processor has in flight while it computes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/multiversion.h"

namespace tp_ext {

// Iterations between two fetches: whole cache lines of every type
constexpr int kSweep = 32;

// Fetches the lines from p on that kCount of its elements take into the cache of level kCache; what
// is not const is going to be written
template <int kCache, int kCount, typename T>
TP_INLINE void fetch(T* p) {
  for (size_t byte = 0; byte < kCount * sizeof(T); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + byte, !std::is_const_v<T>, 4 - kCache);
}

// Calls f(k) for k < n, while the n elements from each of `next` on are fetched
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
