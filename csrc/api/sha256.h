// SHA-256 (FIPS 180-4) of bytes in memory, for the digests of exported files.

#pragma once

#include <cstddef>
#include <string>

namespace tp_ext {

// In 64 hexadecimal digits
std::string sha256(const void* data, size_t size);

}  // namespace tp_ext
