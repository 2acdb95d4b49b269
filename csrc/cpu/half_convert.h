// Half types in fp32: loops that do not read them in a way of their own (bf16_pairs.h, fp16_avx512.h) take
// them a chunk at a time through buffers that stay in the L1 cache, so that the arithmetic is written
// and compiled for fp32 alone, and conversions are made where they vectorise. fp64 and fp32 are
// taken as they lie.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/half.h"

namespace tp_ext {

void widen(const Bf16* x, float* y, int64_t n);
void widen(const Fp16* x, float* y, int64_t n);
// The even elements, then the odd ones (bf16_pairs.h), as many of both: for odd n a 0 is added
void widen_pairs(const Bf16* x, float* y, int64_t n);
void narrow(const float* x, Bf16* y, int64_t n);
void narrow(const float* x, Fp16* y, int64_t n);

template <typename T>
constexpr bool kIsHalf = !std::is_same_v<T, acc_t<T>>;

constexpr int64_t kStage = 1024;

// A tensor of T as chunks of the accumulation type
template <typename T>
class Stage {
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
  // Where to write what becomes the n elements from y on; then store them
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
  alignas(64) A buffer_[kIsHalf<T> ? kStage : 1];
};

// Calls f(start, length) for the chunks of [begin, end): one where nothing is staged
template <typename T, typename F>
void for_each_stage(int64_t begin, int64_t end, F f) {
  if constexpr (kIsHalf<T>) {
    for (int64_t i = begin; i < end; i += kStage) f(i, std::min(kStage, end - i));
  } else {
    f(begin, end - begin);
  }
}
template <typename T, typename F>
void for_each_stage(int64_t n, F f) {
  for_each_stage<T>(0, n, f);
}

}  // namespace tp_ext
