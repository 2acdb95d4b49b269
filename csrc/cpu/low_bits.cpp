// Frozen weights of 8 and 4 bits on the CPU: rows in fp32, and products of few tokens, which read
// the bits alone.

#include "args/low_bits.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/dispatch.h"
#include "cpu/low_bits_avx512.h"

namespace tp_ext {
namespace {

// Of int8 a value, of int4 the input 2j in the low, 2j + 1 in the high four bits of a byte
template <bool four>
TP_INLINE float low(uint8_t q) {
  return static_cast<float>(four ? (q & 15) - 8 : static_cast<int8_t>(q));
}
TP_INLINE float high(uint8_t q) { return static_cast<float>((q >> 4) - 8); }

template <typename T>
TP_MULTIVERSION void dequantize_8(const uint8_t* __restrict q, float scale, T* __restrict row,
                                  int64_t n) {
  for (int64_t i = 0; i < n; ++i) row[i] = static_cast<T>(low<false>(q[i]) * scale);
}

template <typename T>
TP_MULTIVERSION void dequantize_4(const uint8_t* __restrict q, const float* __restrict scales,
                                  T* __restrict row, int64_t bytes, int64_t bytes_of_block) {
  for (int64_t first = 0; first < bytes; first += bytes_of_block, ++scales) {
    const float scale = *scales;
    for (int64_t j = first; j < first + bytes_of_block; ++j) {
      row[2 * j] = static_cast<T>(low<true>(q[j]) * scale);
      row[2 * j + 1] = static_cast<T>(high(q[j]) * scale);
    }
  }
}

// The same where a block is whole vectors
template <typename T>
TP_FP16_AVX512 void dequantize_4_in_vectors(const uint8_t* q, const float* scales, T* row,
                                            int64_t bytes, int64_t bytes_of_block) {
#if TP_HAS_FP16_AVX512
  for (int64_t j = 0; j < bytes; j += bytes_of_block)
    dequantize_block(q + j, *scales++, row + 2 * j, bytes_of_block);
#endif
}

template <typename T>
void dequantize(const Tensor& packed, const Tensor& scales, LowBitsRows rows,
                const Tensor& weight) {
  const auto* const q = in<uint8_t>(packed);
  const bool in_vectors =
      TP_HAS_FP16_AVX512 && has_avx512() && rows.bytes_of_block % (32 / sizeof(T)) == 0;
  const auto of_4 = in_vectors ? dequantize_4_in_vectors<T> : dequantize_4<T>;
  at::parallel_for(0, rows.count, rows_per_thread(rows.inputs()), [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
      T* const row = out<T>(weight) + r * rows.inputs();
      const float* const s = in<float>(scales) + r * rows.blocks();
      if (rows.four())
        of_4(q + r * rows.bytes, s, row, rows.bytes, rows.bytes_of_block);
      else
        dequantize_8(q + r * rows.bytes, *s, row, rows.bytes);
    }
  });
}

Tensor dequantize_low_bits(const Tensor& given, const Tensor& scale, std::optional<int64_t> block,
                           std::optional<at::ScalarType> dtype) {
  const LowBitsRows rows = check_low_bits(given, scale, block);
  const Tensor packed = given.contiguous(), scales = scale.to(at::kFloat).contiguous();
  const bool narrow = dtype == at::kBFloat16;
  const Tensor weight =
      at::empty({rows.count, rows.inputs()}, scales.options().dtype(narrow ? *dtype : at::kFloat));
  if (narrow)
    dequantize<Bf16>(packed, scales, rows, weight);
  else
    dequantize<float>(packed, scales, rows, weight);
  return weight.to(dtype.value_or(at::kFloat));
}

constexpr int kLanes = 8;
constexpr int kTogether = 4;  // tokens that share the conversion of a weight to fp32
using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Bytes = uint8_t __attribute__((vector_size(kLanes), aligned(1)));

// The next weights in two vectors, whose sums do not wait for each other: of int8 2 kLanes bytes, of
// int4 the low and the high bits of kLanes. Of a plain conversion of the bytes that were loaded gcc
// makes one by one; with their upper bits inverted they are signed numbers, too
template <bool four>
TP_INLINE void load_weights(const uint8_t* q, Floats& first, Floats& second) {
  constexpr uint8_t signs = four ? 0x88 : 0x80;
  const Ints a = __builtin_convertvector(*reinterpret_cast<const Bytes*>(q) ^ signs, Ints);
  if constexpr (four) {
    first = __builtin_convertvector((a << 28) >> 28, Floats);
    second = __builtin_convertvector((a << 24) >> 28, Floats);
  } else {
    const Ints b =
        __builtin_convertvector(*reinterpret_cast<const Bytes*>(q + kLanes) ^ signs, Ints);
    first = __builtin_convertvector(a - 128, Floats);
    second = __builtin_convertvector(b - 128, Floats);
  }
}

// y[t] = the sum over the inputs of a row with x[t]; of int4, x has the even inputs first
template <bool four, int tokens>
TP_INLINE void product(const uint8_t* __restrict q, const float* __restrict scales,
                       const float* __restrict x, LowBitsRows rows, float* __restrict y) {
  constexpr int64_t step = four ? kLanes : 2 * kLanes;
  const int64_t inputs = rows.inputs(), apart = four ? rows.bytes : kLanes;
  Floats sums[tokens] = {};
  float rest[tokens] = {};
  for (int64_t j = 0; j < rows.bytes; ++scales) {
    const int64_t end = j + rows.bytes_of_block;
    Floats block[tokens][2] = {};
    float last[tokens] = {};
    for (; j + step <= end; j += step) {
      Floats first, second;
      load_weights<four>(q + j, first, second);
      for (int t = 0; t < tokens; ++t) {
        const float* const token = x + t * inputs + j;
        block[t][0] += first * *reinterpret_cast<const Floats*>(token);
        block[t][1] += second * *reinterpret_cast<const Floats*>(token + apart);
      }
    }
    for (; j < end; ++j)
      for (int t = 0; t < tokens; ++t) {
        last[t] += low<four>(q[j]) * x[t * inputs + j];
        if (four) last[t] += high(q[j]) * x[t * inputs + rows.bytes + j];
      }
    for (int t = 0; t < tokens; ++t) {
      sums[t] += (block[t][0] + block[t][1]) * *scales;
      rest[t] += last[t] * *scales;
    }
  }
  for (int t = 0; t < tokens; ++t) {
    y[t] = rest[t];
    for (int l = 0; l < kLanes; ++l) y[t] += sums[t][l];
  }
}

// Rows [from, to) of the weight with tokens of x: y [tokens, rows.count]
template <bool four, int tokens>
TP_MULTIVERSION void products(const uint8_t* q, const float* scales, const float* x,
                              LowBitsRows rows, int64_t from, int64_t to, float* y) {
  for (int64_t r = from; r < to; ++r) {
    float row[tokens];
    product<four, tokens>(q + r * rows.bytes, scales + r * rows.blocks(), x, rows, row);
    for (int t = 0; t < tokens; ++t) y[t * rows.count + r] = row[t];
  }
}

using Products = decltype(&products<false, 1>);
constexpr Products kProducts[2][kTogether] = {
    {products<false, 1>, products<false, 2>, products<false, 3>, products<false, 4>},
    {products<true, 1>, products<true, 2>, products<true, 3>, products<true, 4>}};

using Calls = void (*)(const uint8_t* q, const void* scales, const float* x, LowBitsRows rows,
                       int64_t from, int64_t to, float* y);

template <int tokens, typename S>
void in_groups(const uint8_t* q, const void* scales, const float* x, LowBitsRows rows, int64_t from,
               int64_t to, float* y) {
#if TP_HAS_FP16_AVX512
  rows_of_4_bits<tokens>(q, static_cast<const S*>(scales), x, rows, from, to, y);
#endif
}

// Of scales in fp32 and in bf16
constexpr Calls kInGroups[2][kTogether] = {
    {in_groups<1, float>, in_groups<2, float>, in_groups<3, float>, in_groups<4, float>},
    {in_groups<1, Bf16>, in_groups<2, Bf16>, in_groups<3, Bf16>, in_groups<4, Bf16>}};

Tensor low_bits_product(const Tensor& given, const Tensor& packed, const Tensor& scale,
                        std::optional<int64_t> block) {
  const LowBitsRows rows = check_low_bits_product(given, packed, scale, block);
  const bool grouped = are_in_groups(rows),
             narrow = grouped && scale.scalar_type() == at::kBFloat16;
  Tensor x = given.to(at::kFloat);
  // Each token in the order in which its weights are unpacked
  if (grouped) {
    x = x.unflatten(1, {-1, kGroup / 8, 8}).transpose(2, 3);
  } else if (rows.four()) {
    const Tensor pairs = x.unflatten(1, {rows.bytes, 2});
    x = at::cat({pairs.select(2, 0), pairs.select(2, 1)}, 1);
  }
  x = x.contiguous();
  const Tensor weight = packed.contiguous(),
               scales = (narrow ? scale : scale.to(at::kFloat)).contiguous();
  const int64_t tokens = given.size(0);
  const Tensor y = at::empty({tokens, rows.count}, x.options());
  const auto* const q = in<uint8_t>(weight);
  at::parallel_for(
      0, rows.count, rows_per_thread(tokens * rows.inputs()), [&](int64_t from, int64_t to) {
        for (int64_t t = 0; t < tokens; t += kTogether) {
          const int64_t last = std::min<int64_t>(kTogether, tokens - t) - 1;
          const auto* const of_x = in<float>(x) + t * rows.inputs();
          auto* const of_y = out<float>(y) + t * rows.count;
          if (grouped)
            kInGroups[narrow][last](q, scales.const_data_ptr(), of_x, rows, from, to, of_y);
          else
            kProducts[rows.four()][last](q, in<float>(scales), of_x, rows, from, to, of_y);
        }
      });
  return y.to(given.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_dequantize_low_bits", dequantize_low_bits);
  m.impl("_low_bits_product", low_bits_product);
}

}  // namespace tp_ext
