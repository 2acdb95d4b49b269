// [Note: the one step of a small all-reduce is written past the caches]

#pragma once

#include "shm/core/chunking.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tp_ext::shm {

constexpr int64_t kLeastStreamed = 8 << 10;  // below, readers have them sooner from a cache

// Copies to a slot, which this rank does not read back
inline void stream(char* slot, const char* from, int64_t bytes) {
  int64_t done = 0;
#if defined(__SSE2__)
  if (bytes >= kLeastStreamed) {
    for (; done + kLine <= bytes; done += kLine)
      for (int64_t i = done; i < done + kLine; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(slot + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    _mm_sfence();  // a release does not order these stores
  }
#endif
  copy(slot + done, from + done, bytes - done);
}

}  // namespace tp_ext::shm
