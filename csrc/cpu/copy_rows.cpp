#include "cpu/copy_rows.h"

#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cpu/multiversion.h"

namespace tp_ext {
namespace {

// Bytes from which on neither a call of memcpy matters, nor partial cache lines of a streamed row
constexpr int64_t kLongRow = 1024;

// Rows of W to 2 W bytes: their first W and their last W, which may overlap
template <int W>
inline void copy_ends(char* to, int64_t to_step, const char* from, int64_t from_step,
                      int64_t length, int64_t rows) {
  const int64_t last = length - W;
  for (int64_t r = 0; r < rows; ++r, to += to_step, from += from_step) {
    char ends[2 * W];
    std::memcpy(ends, from, W);
    std::memcpy(ends + W, from + last, W);
    std::memcpy(to, ends, W);
    std::memcpy(to + last, ends + W, W);
  }
}

// n >= 64: the last 64 may be copied twice
inline void copy_blocks(char* to, const char* from, int64_t n) {
  for (int64_t i = 0; i < n - 64; i += 64) std::memcpy(to + i, from + i, 64);
  std::memcpy(to + n - 64, from + n - 64, 64);
}

// Stores that bypass the cache: an ordinary store reads the line that it is about to overwrite. No
// line is written in both ways.
inline void stream(char* to, const char* from, int64_t n) {
#ifdef __SSE2__
  const int64_t head = -reinterpret_cast<intptr_t>(to) & 63;
  if (head) std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + j)));
  if (i < n) std::memcpy(to + i, from + i, n - i);
#else
  std::memcpy(to, from, n);
#endif
}

}  // namespace

// A call of memcpy costs more than a short row itself
TP_MULTIVERSION void copy_rows(char* to, int64_t to_step, const char* from, int64_t from_step,
                               int64_t n, int64_t rows, bool streamed) {
  if (n <= 0) return;
  if (n <= 2) return copy_ends<1>(to, to_step, from, from_step, n, rows);
  if (n <= 4) return copy_ends<2>(to, to_step, from, from_step, n, rows);
  if (n <= 8) return copy_ends<4>(to, to_step, from, from_step, n, rows);
  if (n <= 16) return copy_ends<8>(to, to_step, from, from_step, n, rows);
  if (n <= 32) return copy_ends<16>(to, to_step, from, from_step, n, rows);
  if (n <= 64) return copy_ends<32>(to, to_step, from, from_step, n, rows);
  for (int64_t r = 0; r < rows; ++r, to += to_step, from += from_step) {
    if (n < kLongRow)
      copy_blocks(to, from, n);
    else if (streamed)
      stream(to, from, n);
    else
      std::memcpy(to, from, n);
  }
}

}  // namespace tp_ext
