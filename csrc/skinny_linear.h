// A linear of a few rows on the CPU, as of a step of decoding: it waits for the weight, which comes
// from memory.

#pragma once

#include "types.h"

namespace tp_ext {

// Beyond it a library's GEMM, which copies the weight into blocks for its registers, is as fast
constexpr int64_t kMostSkinnyRows = 8;

// Whether skinny_linear_cpu takes x [.., in] and weight [out, in]: fp32 or bf16, of a size at which
// its reading of the weight counts
bool is_skinny(const Tensor& x, const Tensor& weight);

// y = x weight^T + bias. Reads each element of weight once. The bits of a row of y depend neither on
// the other rows nor on the number of threads. In cpu/skinny_linear.cpp.
Tensor skinny_linear_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

}  // namespace tp_ext
