// Memory in rows that are some distance apart, as the bytes that they hold one after the other.

#pragma once

#include "shm/core/chunking.h"

namespace tp_ext::shm {

struct Rows {
  char* at;
  int64_t bytes;      // of all rows
  int64_t row, step;  // bytes of a row, from one row to the next

  Rows(void* at, int64_t bytes) : Rows(at, bytes, bytes, bytes) {}
  Rows(void* at, int64_t bytes, int64_t row, int64_t step)
      : at(static_cast<char*>(at)), bytes(bytes), row(row), step(step) {}

  // Calls f(address, offset, length) for the rows, or parts of rows, of a chunk
  template <typename F>
  void for_each_part(const Chunk& chunk, F f) const {
    for (int64_t done = 0; done < chunk.length;) {
      const int64_t begin = chunk.begin + done, first = begin % row;
      const int64_t length = std::min(chunk.length - done, row - first);
      f(at + begin / row * step + first, done, length);
      done += length;
    }
  }
  void read(const Chunk& chunk, char* to) const {
    for_each_part(chunk, [&](char* from, int64_t offset, int64_t length) {
      copy(to + offset, from, length);
    });
  }
  void write(const Chunk& chunk, const char* from) const {
    for_each_part(
        chunk, [&](char* to, int64_t offset, int64_t length) { copy(to, from + offset, length); });
  }
  void write(const Rows& from) const {
    for_each_part({0, bytes}, [&](char* to, int64_t offset, int64_t length) {
      from.read({offset, length}, to);
    });
  }
};

// Contiguous blocks, one of each rank
inline std::vector<Rows> blocks_at(const std::vector<void*>& at,
                                   const std::vector<int64_t>& bytes) {
  std::vector<Rows> blocks;
  for (size_t rank = 0; rank < at.size(); ++rank) blocks.emplace_back(at[rank], bytes[rank]);
  return blocks;
}

}  // namespace tp_ext::shm
