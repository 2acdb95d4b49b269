// An allocator of the CPU that keeps the memory of large tensors for the next ones.

#pragma once

#include <cstdint>

#include "tp_ext/export.h"

namespace tp_ext::memory {

// Replaces torch's allocator; false: puts it back and frees what is kept
TP_EXT_API void keep(bool enabled);
TP_EXT_API bool keeps();

// Bytes of freed blocks that are kept now
TP_EXT_API int64_t kept_bytes();

}  // namespace tp_ext::memory
