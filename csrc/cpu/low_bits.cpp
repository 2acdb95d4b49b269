// Frozen weights of 8 and 4 bits on the CPU: rows in fp32.

#include "args/low_bits.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/dispatch.h"

namespace tp_ext {
namespace {

TP_MULTIVERSION void dequantize_8(const int8_t* __restrict q, float scale, float* __restrict row,
                                  int64_t n) {
  for (int64_t i = 0; i < n; ++i) row[i] = static_cast<float>(q[i]) * scale;
}

// Input 2j in the low, 2j + 1 in the high four bits of a byte
TP_MULTIVERSION void dequantize_4(const uint8_t* __restrict q, const float* __restrict scales,
                                  float* __restrict row, int64_t bytes, int64_t bytes_of_block) {
  for (int64_t first = 0; first < bytes; first += bytes_of_block, ++scales) {
    const float scale = *scales;
    for (int64_t j = first; j < first + bytes_of_block; ++j) {
      row[2 * j] = static_cast<float>((q[j] & 15) - 8) * scale;
      row[2 * j + 1] = static_cast<float>((q[j] >> 4) - 8) * scale;
    }
  }
}

Tensor dequantize_low_bits(const Tensor& given, const Tensor& scale, std::optional<int64_t> block) {
  const bool four = check_low_bits(given, scale, block);
  const Tensor packed = given.contiguous(), scales = scale.to(at::kFloat).contiguous();
  const int64_t rows = packed.size(0), bytes = packed.size(1), inputs = four ? 2 * bytes : bytes;
  const Tensor weight = at::empty({rows, inputs}, scales.options());
  const auto* const s = in<float>(scales);
  at::parallel_for(0, rows, rows_per_thread(inputs), [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      float* const row = out<float>(weight) + r * inputs;
      if (four)
        dequantize_4(in<uint8_t>(packed) + r * bytes, s + r * scales.size(1), row, bytes,
                     *block / 2);
      else
        dequantize_8(in<int8_t>(packed) + r * bytes, s[r], row, bytes);
    }
  });
  return weight;
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) { m.impl("_dequantize_low_bits", dequantize_low_bits); }

}  // namespace tp_ext
