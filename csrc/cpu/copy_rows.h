// Copies of rows of bytes, past the caches where their reader would not find them there.

#pragma once

#include <cstdint>

namespace tp_ext {

// Bytes of a result too large for a cache to keep for its reader
constexpr int64_t kStreamed = 8 << 20;

// Copies rows of n bytes that begin to_step and from_step bytes after each other. streamed: rows
// that are long enough bypass the caches.
void copy_rows(char* to, int64_t to_step, const char* from, int64_t from_step, int64_t n,
               int64_t rows, bool streamed);

}  // namespace tp_ext
