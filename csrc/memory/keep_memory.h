// An allocator of the CPU that keeps the memory of large tensors for the next ones.

#pragma once

#include <cstdint>

namespace tp_ext::memory {

// Replaces torch's allocator; false: puts it back and frees what is kept
void keep(bool enabled);
bool keeps();

// Bytes of freed blocks that are kept now
int64_t kept_bytes();

}  // namespace tp_ext::memory
