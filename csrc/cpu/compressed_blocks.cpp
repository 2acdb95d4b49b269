// Compressed gradients on the CPU: values to blocks of codes and back, and the sum of the blocks of
// all ranks as blocks again.

#include "args/compressed_blocks.h"

#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cpu/dispatch.h"
#include "types.h"

namespace tp_ext {
namespace {

TP_INLINE float read_scale(const uint8_t* block) {
  float scale;
  std::memcpy(&scale, block, sizeof scale);
  return scale;
}

// values + residual as a block; what it loses becomes the residual
template <typename Code, bool Feedback, typename T>
TP_INLINE void encode_block(const T* __restrict x, float* __restrict residual,
                            uint8_t* __restrict block, int64_t n) {
  const auto value = [&](int64_t i) TP_INLINED {
    return Feedback ? to_acc(x[i]) + residual[i] : to_acc(x[i]);
  };
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    const float size = magnitude_of(value(i));
    largest = size > largest ? size : largest;
  }
  const float scale = scale_of_block<Code>(largest);
  std::memcpy(block, &scale, sizeof scale);
  uint8_t* __restrict codes = block + kScaleBytes;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float v = value(i);
    codes[i] = code_of<Code>(v / scale);
    if constexpr (Feedback) residual[i] = error_of<Code>(v, codes[i], scale);
  }
}

// Blocks [from, to) of `count` values, the last of which may be shorter
struct Blocks {
  int64_t count, block, from, to;

  int64_t first_of(int64_t b) const { return b * block; }
  int64_t size_of(int64_t b) const { return std::min(block, count - first_of(b)); }
  int64_t byte_of(int64_t b) const { return b * (block + kScaleBytes); }
};

template <typename Code, bool Feedback, typename T>
TP_MULTIVERSION void encode_blocks(const T* x, float* residual, uint8_t* wire, Blocks blocks) {
  for (int64_t b = blocks.from; b < blocks.to; ++b) {
    const int64_t first = blocks.first_of(b);
    encode_block<Code, Feedback>(x + first, Feedback ? residual + first : nullptr,
                                 wire + blocks.byte_of(b), blocks.size_of(b));
  }
}

// Blocks of the ranks, `step` bytes apart
struct Received {
  const uint8_t* wire;
  int64_t ranks, step;
};

// The same of the sums of the blocks of all ranks, added in their order; `sums` holds a block
template <typename Code, bool Feedback>
TP_MULTIVERSION void encode_sums(const Received& received, float* sums, float* residual,
                                 uint8_t* wire, Blocks blocks) {
  for (int64_t b = blocks.from; b < blocks.to; ++b) {
    const int64_t n = blocks.size_of(b), place = blocks.byte_of(b);
    for (int64_t rank = 0; rank < received.ranks; ++rank) {
      const uint8_t* one = received.wire + rank * received.step + place;
      const float scale = read_scale(one);
      const uint8_t* codes = one + kScaleBytes;
      if (rank == 0)
        for (int64_t i = 0; i < n; ++i) sums[i] = decoded<Code>(codes[i], scale);
      else
        for (int64_t i = 0; i < n; ++i) sums[i] += decoded<Code>(codes[i], scale);
    }
    encode_block<Code, Feedback>(sums, Feedback ? residual + blocks.first_of(b) : nullptr,
                                 wire + place, n);
  }
}

template <typename Code, typename T>
TP_MULTIVERSION void decode_blocks(const uint8_t* wire, T* out, float divisor, Blocks blocks) {
  for (int64_t b = blocks.from; b < blocks.to; ++b) {
    const int64_t n = blocks.size_of(b);
    const uint8_t* one = wire + blocks.byte_of(b);
    const float scale = read_scale(one);
    const uint8_t* __restrict codes = one + kScaleBytes;
    T* __restrict to_values = out + blocks.first_of(b);
    for (int64_t i = 0; i < n; ++i)
      to_values[i] = from_acc<T>(decoded<Code>(codes[i], scale) / divisor);
  }
}

// f(code, feedback) for the code and whether there is a residual
template <typename F>
void dispatch_code(bool float8, bool feedback, F f) {
  with_code(float8,
            [&](auto code) { feedback ? f(code, std::true_type{}) : f(code, std::false_type{}); });
}

// f(blocks), in parallel
template <typename F>
void for_blocks(int64_t count, int64_t block, F f) {
  at::parallel_for(0, blocks_in(count, block), rows_per_thread(block),
                   [&](int64_t from, int64_t to) {
                     f(Blocks{count, block, from, to});
                   });
}

// f(place) for the elements that each rank owns
template <typename F>
void for_places(const Tensor& places, const Tensor& x, const Tensor& wire, int64_t block, F f) {
  check_places(places, x, block);
  const auto* each = reinterpret_cast<const WirePlace*>(in<int64_t>(places));
  for (int64_t rank = 0; rank < places.size(0); ++rank) {
    const WirePlace& place = each[rank];
    TORCH_CHECK_INDEX(place.first >= 0 && place.count >= 0 && place.byte >= 0 &&
                          place.first + place.count <= x.numel() &&
                          place.byte + wire_bytes(place.count, block) <= wire.numel(),
                      "places: those of rank ", rank, " must be within x and wire");
    f(place);
  }
}

void compress(const Tensor& x, const OptionalTensor& residual, const Tensor& wire,
              const Tensor& places, int64_t block, bool float8) {
  check_values(x, "x");
  check_residual(residual, x.numel(), wire);
  check_wire(wire, "wire", x);
  const bool feedback = residual.has_value();
  float* const errors = feedback ? out<float>(*residual) : nullptr;
  for_places(places, x, wire, block, [&](const WirePlace& place) {
    dispatch_floating(x.scalar_type(), "_compress_blocks_", [&](auto zero) {
      using T = decltype(zero);
      if constexpr (!std::is_same_v<T, double>)
        dispatch_code(float8, feedback, [&](auto code, auto with_feedback) {
          for_blocks(place.count, block, [&](Blocks blocks) {
            encode_blocks<decltype(code), decltype(with_feedback)::value>(
                in<T>(x) + place.first, feedback ? errors + place.first : nullptr,
                out<uint8_t>(wire) + place.byte, blocks);
          });
        });
    });
  });
}

void sum_compressed(const Tensor& received, const OptionalTensor& residual, const Tensor& wire,
                    int64_t byte, int64_t count, int64_t block, bool float8) {
  check_wire(received, "received", wire);
  check_wire(wire, "wire", wire);
  check_residual(residual, count, wire);
  check_sums(received, wire, byte, count, block);
  const Received parts{in<uint8_t>(received) + byte, received.size(0), received.size(1)};
  dispatch_code(float8, residual.has_value(), [&](auto code, auto with_feedback) {
    for_blocks(count, block, [&](Blocks blocks) {
      std::vector<float> sums(block);
      encode_sums<decltype(code), decltype(with_feedback)::value>(
          parts, sums.data(), residual.has_value() ? out<float>(*residual) : nullptr,
          out<uint8_t>(wire) + byte, blocks);
    });
  });
}

void decompress(const Tensor& wire, const Tensor& values, const Tensor& places, int64_t block,
                bool float8) {
  check_values(values, "out");
  check_wire(wire, "wire", values);
  const auto divisor = static_cast<float>(places.size(0));
  for_places(places, values, wire, block, [&](const WirePlace& place) {
    dispatch_floating(values.scalar_type(), "_decompress_blocks_", [&](auto zero) {
      using T = decltype(zero);
      if constexpr (!std::is_same_v<T, double>)
        with_code(float8, [&](auto code) {
          for_blocks(place.count, block, [&](Blocks blocks) {
            decode_blocks<decltype(code)>(in<uint8_t>(wire) + place.byte,
                                          out<T>(values) + place.first, divisor, blocks);
          });
        });
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(tp_ext, CPU, m) {
  m.impl("_compress_blocks_", compress);
  m.impl("_sum_compressed_blocks_", sum_compressed);
  m.impl("_decompress_blocks_", decompress);
}

}  // namespace tp_ext
