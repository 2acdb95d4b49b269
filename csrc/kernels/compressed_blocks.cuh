// Compressed gradients on CUDA: a warp per block of values, a lane per value, in two passes over
// the block, the second of which reads from the L1 cache. Blocks lie at any byte of the wire.

#pragma once

#include "compressed_blocks.h"
#include "reduce.cuh"

namespace tp_ext {

constexpr int kBlockWarps = 8;
constexpr int kBlockThreads = 32 * kBlockWarps;

__device__ __forceinline__ float load_scale(const uint8_t* block) {
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) bits |= static_cast<uint32_t>(block[k]) << (8 * k);
  return same_bits<float>(bits);
}

// A block of those that a rank owns
struct BlockOfRank {
  int64_t rank, block;
};

// Block i of all, in the order of the ranks; past the last one, of the last rank
__device__ __forceinline__ BlockOfRank owner_of(const int64_t* __restrict__ places, int ranks,
                                                int64_t block, int64_t i) {
  for (int rank = 0;; ++rank) {
    const int64_t own = (places[3 * rank + 1] + block - 1) / block;
    if (i < own || rank + 1 == ranks) return {rank, i};
    i -= own;
  }
}

// x / divisor, rounded as a division rounds it: of two numbers of 24 bits it is no nearer to the
// middle between two others than 2^-49 of itself, where the product in fp64 is off by 2^-52. A
// division would be a call for some operands, for which registers are spilled.
class Quotient {
 public:
  __device__ __forceinline__ explicit Quotient(float divisor) : inverse_(1. / divisor) {}
  __device__ __forceinline__ float operator()(float x) const {
    return static_cast<float>(x * inverse_);
  }

 private:
  double inverse_;
};

// Values value(i), i < n, as a block; a residual gets what each loses
template <typename Code, typename F>
__device__ __forceinline__ void encode_by_warp(F value, float* residual, uint8_t* block, int n) {
  const int lane = threadIdx.x % 32;
  float largest = 0;
  for (int i = lane; i < n; i += 32) largest = Max{}(largest, magnitude_of(value(i)));
  const float scale = scale_of_block<Code>(warp_reduce(largest, Max{}));
  const Quotient quotient(scale);
  if (lane < kScaleBytes)
    block[lane] = static_cast<uint8_t>(same_bits<uint32_t>(scale) >> (8 * lane));
  for (int i = lane; i < n; i += 32) {
    const float v = value(i);
    const uint8_t code = code_of<Code>(quotient(v));
    block[kScaleBytes + i] = code;
    if (residual != nullptr) residual[i] = error_of<Code>(v, code, scale);
  }
}

// Calls f(block of all) for those of this warp
template <typename F>
__device__ __forceinline__ void for_blocks_of_warp(int64_t blocks, F f) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlockWarps;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / 32; i < blocks;
       i += step)
    f(i);
}

__device__ __forceinline__ int values_in(int64_t count, int64_t first, int64_t block) {
  return static_cast<int>(count - first < block ? count - first : block);
}

// Calls f(first value, number of values, first byte) for the blocks of all ranks that this warp has
template <typename F>
__device__ __forceinline__ void for_values_of_warp(const int64_t* __restrict__ places, int ranks,
                                                   int64_t block, int64_t blocks, F f) {
  for_blocks_of_warp(blocks, [&](int64_t i) {
    const BlockOfRank at = owner_of(places, ranks, block, i);
    const int64_t *place = places + 3 * at.rank, within = at.block * block;
    if (within >= place[1]) return;
    f(place[0] + within, values_in(place[1], within, block),
      place[2] + at.block * (block + kScaleBytes));
  });
}

template <typename Code, typename T>
__global__ void __launch_bounds__(kBlockThreads)
    compress_blocks_kernel(const T* __restrict__ x, float* residual, uint8_t* wire,
                           const int64_t* __restrict__ places, int ranks, int64_t block,
                           int64_t blocks) {
  for_values_of_warp(places, ranks, block, blocks, [&](int64_t first, int n, int64_t byte) {
    float* const own = residual == nullptr ? nullptr : residual + first;
    const auto value = [&](int k) {
      const float v = to_acc(x[first + k]);
      return own == nullptr ? v : v + own[k];
    };
    encode_by_warp<Code>(value, own, wire + byte, n);
  });
}

template <typename Code>
__global__ void __launch_bounds__(kBlockThreads)
    sum_compressed_kernel(const uint8_t* __restrict__ received, int ranks, int64_t step,
                          float* residual, uint8_t* wire, int64_t count, int64_t block,
                          int64_t blocks) {
  for_blocks_of_warp(blocks, [&](int64_t i) {
    const int64_t first = i * block, place = i * (block + kScaleBytes);
    float* const own = residual == nullptr ? nullptr : residual + first;
    const auto value = [&](int k) {
      float sum = 0;
      const uint8_t* one = received + place;
#pragma unroll 1
      for (int rank = 0; rank < ranks; ++rank, one += step) {
        const float v = decoded<Code>(one[kScaleBytes + k], load_scale(one));
        sum = rank == 0 ? v : sum + v;
      }
      return own == nullptr ? sum : sum + own[k];
    };
    encode_by_warp<Code>(value, own, wire + place, values_in(count, first, block));
  });
}

template <typename Code, typename T>
__global__ void __launch_bounds__(kBlockThreads)
    decompress_blocks_kernel(const uint8_t* __restrict__ wire, T* __restrict__ out,
                             const int64_t* __restrict__ places, int ranks, int64_t block,
                             int64_t blocks) {
  for_values_of_warp(places, ranks, block, blocks, [&](int64_t first, int n, int64_t byte) {
    const uint8_t* const one = wire + byte;
    const float scale = load_scale(one);
    const Quotient mean(static_cast<float>(ranks));
    for (int k = threadIdx.x % 32; k < n; k += 32)
      out[first + k] = from_acc<T>(mean(decoded<Code>(one[kScaleBytes + k], scale)));
  });
}

}  // namespace tp_ext
