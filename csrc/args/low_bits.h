// Argument checks of the operators on frozen weights of few bits.

#pragma once

#include "check.h"
#include "kernels/low_bits.h"
#include "types.h"

namespace tp_ext {

// packed is uint8 with a block, two inputs a byte, else int8
inline LowBitsRows check_low_bits(const Tensor& packed, const Tensor& scale,
                                  std::optional<int64_t> block) {
  const bool four = block.has_value();
  TORCH_CHECK_TYPE(packed.scalar_type() == (four ? at::kByte : at::kChar), "packed: dtype ",
                   packed.scalar_type(), " must be uint8 with a block, int8 without");
  check_floating(scale, "scale");
  TORCH_CHECK_VALUE(packed.dim() == 2, "packed: shape ", packed.sizes(), " must have 2 dims");
  if (!four) {
    TORCH_CHECK_VALUE(scale.dim() == 1 && scale.size(0) == packed.size(0), "scale: shape ",
                      scale.sizes(), " must be [", packed.size(0), "], a number per row of packed");
  } else {
    TORCH_CHECK_VALUE(*block > 0 && *block % 2 == 0 && 2 * packed.size(1) % *block == 0,
                      "block: ", *block, " must be even and divide the ", 2 * packed.size(1),
                      " inputs of packed");
    TORCH_CHECK_VALUE(scale.dim() == 2 && scale.size(0) == packed.size(0) &&
                          scale.size(1) == 2 * packed.size(1) / *block,
                      "scale: shape ", scale.sizes(), " must be [", packed.size(0), ", ",
                      2 * packed.size(1) / *block, "], a number per block");
  }
  check_same_device(scale, "scale", packed, "packed");
  return {packed.size(0), packed.size(1), four ? *block / 2 : packed.size(1), four ? 2 : 1};
}

inline LowBitsRows check_low_bits_product(const Tensor& x, const Tensor& packed,
                                          const Tensor& scale, std::optional<int64_t> block) {
  const LowBitsRows rows = check_low_bits(packed, scale, block);
  check_up_to_float32(x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == rows.inputs(), "x: shape ", x.sizes(),
                    " must be [tokens, ", rows.inputs(), "], the inputs of packed");
  check_same_device(x, "x", packed, "packed");
  return rows;
}

}  // namespace tp_ext
