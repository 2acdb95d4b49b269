// The interface of fake_cublaslt.cpp to a test, and the half types as numbers.

#pragma once

#include <cstdint>
#include <cstring>

#include <cublasLt.h>

namespace fake {

struct Counts {
  int heuristics = 0, matmuls = 0, alive = 0;  // alive: descriptors not destroyed yet
};
extern Counts counts;
extern bool supported;                // false: the heuristic finds no algorithm
extern cublasStatus_t matmul_status;  // what cublasLtMatmul returns, unless success

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline uint16_t to_bfloat16(float value) {  // finite: to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_half(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
inline uint16_t to_half(float value) {
  const auto half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

}  // namespace fake
