// fp32 buffers for half types: loops without a way of their own to read a half type (bf16_pairs.h,
// fp16_avx512.h) convert it a chunk at a time through a buffer that stays in the L1 cache, so that
// the arithmetic is written and compiled for fp32 alone, and conversions happen where they
// vectorise. fp64 and fp32 are used in place.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/half.h"

namespace tp_ext {

void widen(const Bf16* x, float* y, int64_t n);
void widen(const Fp16* x, float* y, int64_t n);
// The even elements, then as many odd ones (bf16_pairs.h): for odd n a 0 is added
void widen_pairs(const Bf16* x, float* y, int64_t n);
void narrow(const float* x, Bf16* y, int64_t n);
void narrow(const float* x, Fp16* y, int64_t n);

template <typename T>
constexpr bool kIsHalf = !std::is_same_v<T, acc_t<T>>;

constexpr int64_t kBufferLength = 1024;

// Chunks of a tensor of T in the accumulation type
template <typename T>
class Fp32Buffer {
 public:
  using A = acc_t<T>;
  // The n elements from x on
  const A* load(const T* x, int64_t n) {
    if constexpr (kIsHalf<T>) {
      widen(x, buffer_, n);
      return buffer_;
    } else {
      return x;
    }
  }
  // The memory in which to compute the n elements from y on; store() writes them to y
  A* target(T* y) {
    if constexpr (kIsHalf<T>)
      return buffer_;
    else
      return y;
  }
  void store(T* y, int64_t n) {
    if constexpr (kIsHalf<T>) narrow(buffer_, y, n);
  }

 private:
  alignas(64) A buffer_[kIsHalf<T> ? kBufferLength : 1];
};

// Calls f(start, length) for the chunks of [begin, end): one chunk where nothing is buffered
template <typename T, typename F>
void for_each_buffer(int64_t begin, int64_t end, F f) {
  if constexpr (kIsHalf<T>) {
    for (int64_t i = begin; i < end; i += kBufferLength) f(i, std::min(kBufferLength, end - i));
  } else {
    f(begin, end - begin);
  }
}
template <typename T, typename F>
void for_each_buffer(int64_t n, F f) {
  for_each_buffer<T>(0, n, f);
}

}  // namespace tp_ext
