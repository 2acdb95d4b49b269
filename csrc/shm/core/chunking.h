// Splitting of tensors into chunks that fit a slot.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shm/core/layout.h"

namespace tp_ext::shm {

// Steps that a rank writes ahead of its reads: enough to hide that others are late, few enough that
// the slots stay in the cache
constexpr int64_t kAhead = 2;

inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// At least one, so that every call synchronises with every rank
inline int64_t steps_for(int64_t n, int64_t per_step) {
  return std::max<int64_t>(1, divide_up(n, per_step));
}

// Bytes per rank in a slot, a whole number of lines
inline int64_t share_of(int64_t slot_bytes, int ranks) {
  return slot_bytes / ranks / kLine * kLine;
}

inline void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// The chunk of [0, n) that step k of per_step elements covers
struct Chunk {
  int64_t begin, length;
  Chunk(int64_t step, int64_t per_step, int64_t n)
      : Chunk(std::min(step * per_step, n), std::min(per_step, n - std::min(step * per_step, n))) {}
  Chunk(int64_t begin, int64_t length) : begin(begin), length(length) {}
};

inline int64_t largest(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

// Signature of a call that moves bytes of elements of c10's dtype `type`
inline Signature signature_of(int64_t bytes, uint32_t type, int root = 0) {
  Signature s;
  s.type = type;
  s.root = static_cast<uint32_t>(root);
  s.count = static_cast<uint64_t>(bytes);
  return s;
}

}  // namespace tp_ext::shm
