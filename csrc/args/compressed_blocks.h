// Arguments of the operators on compressed blocks, checked alike for every device.

#pragma once

#include "check.h"
#include "dtype_dispatch.h"
#include "kernels/compressed_blocks.h"

namespace tp_ext {

// Elements [first, first + count) of a tensor at a byte of the wire
struct WirePlace {
  int64_t first, count, byte;
};

inline int64_t blocks_in(int64_t count, int64_t block) { return (count + block - 1) / block; }
inline int64_t wire_bytes(int64_t count, int64_t block) {
  return count + blocks_in(count, block) * kScaleBytes;
}

// f(code) for the code of the values
template <typename F>
void with_code(bool float8, F f) {
  float8 ? f(E4m3Code{}) : f(Int8Code{});
}

inline void check_wire(const at::Tensor& wire, const char* name, const at::Tensor& like) {
  TORCH_CHECK_TYPE(wire.scalar_type() == at::kByte, name, ": dtype ", wire.scalar_type(),
                   " must be uint8");
  TORCH_CHECK_VALUE(wire.is_contiguous(), name, ": must be contiguous");
  check_same_device(wire, name, like, "x");
}

inline void check_values(const at::Tensor& x, const char* name) {
  check_up_to_float32(x, name);
  TORCH_CHECK_VALUE(x.is_contiguous(), name, ": must be contiguous");
}

inline void check_residual(const std::optional<at::Tensor>& residual, int64_t numel,
                           const at::Tensor& like) {
  if (!residual.has_value()) return;
  TORCH_CHECK_VALUE(residual->device() == like.device(), "residual: device ", residual->device(),
                    " must be that of the wire, ", like.device());
  TORCH_CHECK_TYPE(residual->scalar_type() == at::kFloat, "residual: dtype ",
                   residual->scalar_type(), " must be float32");
  TORCH_CHECK_VALUE(residual->is_contiguous() && residual->numel() == numel, "residual: shape ",
                    residual->sizes(), " must have ", numel, " elements, contiguous");
}

inline void check_places(const at::Tensor& places, const at::Tensor& x, int64_t block) {
  TORCH_CHECK_VALUE(block > 0, "block: ", block, " must be positive");
  TORCH_CHECK_VALUE(places.dim() == 2 && places.size(1) == 3 && places.is_contiguous() &&
                        places.scalar_type() == at::kLong,
                    "places: shape ", places.sizes(), " must be [ranks, 3], int64, contiguous");
  check_same_device(places, "places", x, "x");
}

inline void check_sums(const at::Tensor& received, const at::Tensor& wire, int64_t byte,
                       int64_t count, int64_t block) {
  TORCH_CHECK_VALUE(block > 0, "block: ", block, " must be positive");
  TORCH_CHECK_VALUE(received.dim() == 2 && wire.dim() == 1 && received.size(1) == wire.size(0),
                    "received: shape ", received.sizes(), " must be [ranks, ", wire.numel(), "]");
  TORCH_CHECK_INDEX(byte >= 0 && count >= 0 && byte + wire_bytes(count, block) <= wire.numel(),
                    "byte: ", byte, " must leave place for ", count, " elements in wire");
}

}  // namespace tp_ext
