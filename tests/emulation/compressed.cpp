// Compressed gradients: the formula on the host, block by block.

#include "harness.h"

#include "kernels/compressed_blocks.cuh"
#include "kernels/vec.cuh"

using namespace emulation;
using namespace tp_ext;

namespace emulation::compressed {

struct Places {
  std::vector<int64_t> rows;  // first, count, byte of each rank
  int64_t bytes = 0;

  Places(const std::vector<int64_t>& counts, int64_t block, int64_t begin) : bytes(begin) {
    int64_t first = 0;
    for (const int64_t count : counts) {
      rows.insert(rows.end(), {first, count, bytes});
      first += count, bytes += count + (count + block - 1) / block * kScaleBytes;
    }
  }
};

Tensor<uint8_t> zeros(int64_t n) {
  Tensor<uint8_t> result(n);
  std::memset(result.data(), 0, n);
  return result;
}

// f(first value, number, first byte) of each block
template <typename F>
void each_block(const Places& places, int64_t block, F f) {
  for (size_t row = 0; row < places.rows.size(); row += 3)
    for (int64_t at = 0, byte = places.rows[row + 2]; at < places.rows[row + 1];
         at += block, byte += block + kScaleBytes)
      f(places.rows[row] + at, std::min(block, places.rows[row + 1] - at), byte);
}

template <typename Code>
void encode(const Call<float(int64_t)>& value, int64_t n, uint8_t* block, float* error) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude_of(value(i)));
  const float scale = scale_of_block<Code>(largest);
  std::memcpy(block, &scale, sizeof scale);
  for (int64_t i = 0; i < n; ++i) {
    const float x = value(i);
    block[kScaleBytes + i] = code_of<Code>(x / scale);
    error[i] = error_of<Code>(x, block[kScaleBytes + i], scale);
  }
}

template <typename Code>
float decode(const uint8_t* block, int64_t i) {
  float scale;
  std::memcpy(&scale, block, sizeof scale);
  return Code::decode(block[kScaleBytes + i]) * scale;
}

template <typename Code, typename T>
void both_ways(const std::vector<int64_t>& counts, int64_t block, int grid) {
  const Places places(counts, block, 3);
  int64_t n = 0;
  for (const int64_t count : counts) n += count;
  const int ranks = static_cast<int>(counts.size());
  const float sizes[] = {1e-38f, 1e30f, 1e-20f, 1e-3f, 0.f};  // of blocks, and within one
  const auto x = values<T>(n, 1);
  for (int64_t i = 0; i < n; ++i) x[i] = T(to_acc(x[i]) * sizes[i / block % 5]);
  for (int64_t i = 0; i < n; i += 7) x[i] = T(to_acc(x[i]) * 1e-3f);
  const auto error = values<float>(n, 0, 2, -1e-39, 1e-39);
  const int64_t blocks = (n + block - 1) / block + ranks;
  const auto name = std::string("blocks of ") + std::to_string(block) + " " + type_name<T>() +
                    (std::is_same_v<Code, Int8Code> ? " int8, " : " e4m3, ") + std::to_string(n);
  const auto [wire, lost, mean] = run_in_every_order(name, [&] {
    auto wire = zeros(places.bytes);
    auto lost = error.copy();
    Tensor<T> mean(n);
    launch(grid, kBlockThreads, [&] {
      compress_blocks_kernel<Code, T>(x, lost, wire, places.rows.data(), ranks, block, blocks);
    });
    launch(grid, kBlockThreads, [&] {
      decompress_blocks_kernel<Code, T>(wire, mean, places.rows.data(), ranks, block, blocks);
    });
    return results(wire, lost, mean);
  });
  auto want = zeros(places.bytes);
  Tensor<float> want_lost(n);
  Tensor<T> want_mean(n);
  each_block(places, block, [&](int64_t first, int64_t count, int64_t byte) {
    encode<Code>([&](int64_t i) { return to_acc(x[first + i]) + error[first + i]; }, count,
                 &want[byte], &want_lost[first]);
    for (int64_t i = 0; i < count; ++i)
      want_mean[first + i] = from_acc<T>(decode<Code>(&want[byte], i) / static_cast<float>(ranks));
  });
  expect_equal("wire", wire, want);
  expect_equal("error", lost, want_lost);
  expect_equal("mean", mean, want_mean);
}

template <typename Code>
void sums(int64_t n, int64_t block, int ranks, int grid) {
  const Places places({n}, block, 0);
  const int64_t step = places.bytes + 5;
  auto received = zeros(ranks * step);
  Tensor<float> unused(n);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto x = values<float>(n, 0, 7 + rank);
    each_block(places, block, [&](int64_t first, int64_t count, int64_t byte) {
      encode<Code>([&](int64_t i) { return x[first + i]; }, count, &received[rank * step + byte],
                   &unused[first]);
    });
  }
  const auto error = values<float>(n, 0, 2, -0.01, 0.01);
  const auto [wire, lost] = run_in_every_order("sums of " + std::to_string(n), [&] {
    auto wire = zeros(places.bytes);
    auto lost = error.copy();
    launch(grid, kBlockThreads, [&] {
      sum_compressed_kernel<Code>(received, ranks, step, lost, wire, n, block,
                                  (n + block - 1) / block);
    });
    return results(wire, lost);
  });
  auto want = zeros(places.bytes);
  Tensor<float> want_lost(n);
  each_block(places, block, [&](int64_t first, int64_t count, int64_t byte) {
    const auto value = [&](int64_t i) {
      float sum = decode<Code>(&received[byte], i);
      for (int rank = 1; rank < ranks; ++rank)
        sum += decode<Code>(&received[rank * step + byte], i);
      return sum + error[first + i];
    };
    encode<Code>(value, count, &want[byte], &want_lost[first]);
  });
  expect_equal("wire", wire, want);
  expect_equal("error", lost, want_lost);
}

template <typename Code>
void of_code() {
  for_all_types([](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, double>) {
      both_ways<Code, T>({600, 64, 0, 65}, 64, 1);
      both_ways<Code, T>({8, 3}, 2, 2);
      both_ways<Code, T>({300}, 256, 1);
    }
  });
  sums<Code>(200, 64, 3, 1), sums<Code>(63, 64, 1, 1), sums<Code>(1000, 16, 2, 3);
}

int program(int, char**) {
  of_code<Int8Code>(), of_code<E4m3Code>();
  return done();
}

}  // namespace emulation::compressed
