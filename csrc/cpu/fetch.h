// Loops that fetch what comes next. Hardware looks ahead within a page of 4 KB only, and not at all
// past what the processor has in flight while it computes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace tp_ext {

// Iterations between two fetches: whole cache lines of every type
constexpr int64_t kSweep = 32;

// The lines from p on that kSweep of its elements take; what is going to be written is fetched, too
template <int kCache, typename T>
inline __attribute__((always_inline)) void fetch_sweep(T* p) {
  for (size_t byte = 0; byte < kSweep * sizeof(T); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + byte, !std::is_const_v<T>, 4 - kCache);
}

// Calls f(k) for k < n, while the n elements from each of `next` on are fetched into the cache of
// level kCache
template <int kCache, typename F, typename... T>
inline __attribute__((always_inline)) void sweep(int64_t n, F f, T*... next) {
  int64_t k = 0;
  for (; k + kSweep <= n; k += kSweep) {
    (fetch_sweep<kCache>(next + k), ...);
    for (int l = 0; l < kSweep; ++l) f(k + l);
  }
  for (; k < n; ++k) f(k);
}

}  // namespace tp_ext
