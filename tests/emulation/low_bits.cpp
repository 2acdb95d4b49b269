// Frozen weights of 8 and 4 bits: rows by the formula to the bit, products next to sums in fp64.

#include "harness.h"

#include "kernels/low_bits.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::low_bits {

int value_at(const Tensor<uint8_t>& packed, LowBitsRows rows, int64_t row, int64_t input) {
  if (!rows.four()) return static_cast<int8_t>(packed[row * rows.bytes + input]);
  const int byte = packed[row * rows.bytes + input / 2];
  return (input % 2 == 0 ? byte % 16 : byte / 16) - 8;
}

// f(N as a constant), by the choice of the launcher
template <int N, typename F>
void in_vectors(LowBitsRows rows, const void* packed, const void* values, F f) {
  if (low_bits_in_vectors<N>(rows, packed, values))
    f(std::integral_constant<int, N>());
  else
    f(std::integral_constant<int, 1>());
}

template <bool four, typename T>
void both(LowBitsRows rows, int64_t tokens, int64_t shift) {
  const int64_t inputs = rows.inputs();
  Tensor<uint8_t> packed(rows.count * rows.bytes, shift);
  Random random{7};
  for (int64_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<uint8_t>(random() >> 56);
  const auto scale = values<float>(rows.count * rows.blocks(), 0, 2);
  const auto x = values<T>(tokens * inputs, shift, 3);
  const auto weight_of = [&](int64_t row, int64_t input) {
    const int64_t block = input / rows.values / rows.bytes_of_block;
    return static_cast<float>(value_at(packed, rows, row, input)) *
           scale[row * rows.blocks() + block];
  };
  const auto name = std::string(four ? "int4 " : "int8 ") + type_name<T>() + ", " +
                    std::to_string(rows.count) + " rows of " + std::to_string(inputs) + ", " +
                    std::to_string(tokens) + " tokens, shift " + std::to_string(shift);
  const auto [weight, y] = run_in_every_order(name, [&] {
    Tensor<float> weight(rows.count * inputs, shift);
    Tensor<T> y(tokens * rows.count);
    in_vectors<kRowBytes<four>>(rows, packed.data(), weight.data(), [&](auto n) {
      launch(2, kThreads, [&] { low_bits_rows_kernel<four, n()>(packed, scale, weight, rows); });
    });
    in_vectors<kProductBytes>(rows, packed.data(), x.data(), [&](auto n) {
      launch(2, kThreads,
             [&] { low_bits_product_kernel<four, n(), T>(x, packed, scale, y, tokens, rows); });
    });
    return results(weight, y);
  });
  Tensor<float> want(rows.count * inputs);
  for (int64_t i = 0; i < want.size(); ++i) want[i] = weight_of(i / inputs, i % inputs);
  expect_equal("weight", weight, want);
  const auto sum = [&](int64_t i, bool magnitudes) {
    double total = 0;
    for (int64_t k = 0; k < inputs; ++k) {
      const double term =
          as_double(x[i / rows.count * inputs + k]) * want[i % rows.count * inputs + k];
      total += magnitudes ? std::fabs(term) : term;
    }
    return total;
  };
  expect_near<T>(
      "y", y, [&](int64_t i) { return sum(i, false); },
      [&](int64_t i) { return 8 * kEps<float> * sum(i, true); });
}

// Rows of int8 are one block
template <typename T>
void eight(int64_t count, int64_t bytes, int64_t tokens, int64_t shift = 0) {
  both<false, T>({count, bytes, bytes, 1}, tokens, shift);
}
template <typename T>
void four(int64_t count, int64_t bytes, int64_t bytes_of_block, int64_t tokens, int64_t shift = 0) {
  both<true, T>({count, bytes, bytes_of_block, 2}, tokens, shift);
}

int program(int, char**) {
  for_all_types([](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, double>) {
      eight<T>(5, 16, 1), eight<T>(3, 1, 2), eight<T>(2, 560, 6), eight<T>(3, 33, 4);
      eight<T>(3, 32, 3, 1);
      four<T>(5, 16, 16, 1), four<T>(3, 1, 1, 2), four<T>(2, 576, 32, 6), four<T>(3, 36, 6, 4);
      four<T>(3, 32, 16, 3, 1), four<T>(20, 12, 3, 5), four<T>(3, 64, 2, 1);
    }
  });
  return done();
}

}  // namespace emulation::low_bits
