// 16-byte accesses, and the one loop that handles body and tail of an elementwise kernel, with its
// grid.

#pragma once

#include <type_traits>

#include "scalar.h"

namespace tp_ext {

constexpr int kVecBytes = 16;
template <typename T>
constexpr int kVec = kVecBytes / sizeof(T);

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

// N elements at p + i as one access; p must be aligned to the whole vector
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> load(const T* p, int64_t i) {
  return *reinterpret_cast<const Vec<T, N>*>(p + i);
}
template <int N, typename T>
__device__ __forceinline__ void store(T* p, int64_t i, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(p + i) = x;
}
// The same to global memory, always as one access: of elements that were computed one by one nvcc
// makes N stores where p has no __restrict__ that it sees. The kernel must not read them again.
template <int N, typename T>
__device__ __forceinline__ void store_global(T* p, int64_t i, const Vec<T, N>& x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof x == kVecBytes) {
    uint32_t w[4];
    memcpy(w, &x, sizeof w);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p + i)),
                 "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]));
    return;
  }
#endif
  store<N>(p, i, x);
}

// The elements in the type that arithmetic is done in; one instruction each for bfloat16, where a
// conversion of the upper element of a word takes two
template <typename T, int N>
__device__ __forceinline__ Vec<acc_t<T>, N> widen(const Vec<T, N>& x) {
  Vec<acc_t<T>, N> result;
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    uint32_t words[N / 2];
    memcpy(words, &x, sizeof words);
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      result.v[2 * k] = __uint_as_float(words[k] << 16);
      result.v[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
  } else
#endif
  {
#pragma unroll
    for (int e = 0; e < N; ++e) result.v[e] = to_acc(x.v[e]);
  }
  return result;
}

// Whether every pointer can be accessed in whole vectors, and rows of `inner` elements start
// aligned too
template <typename T, typename... P>
inline bool vectorisable(int64_t inner, const P*... pointers) {
  return inner % kVec<T> == 0 && ((reinterpret_cast<uintptr_t>(pointers) % kVecBytes == 0) && ...);
}

constexpr int kThreads = 256;

// Enough blocks to fill any GPU; kernels are grid-stride
inline int grid_for(int64_t items, int threads = kThreads) {
  const int64_t blocks = (items + threads - 1) / threads;
  return static_cast<int>(blocks < 1 ? 1 : blocks > 65535 ? 65535 : blocks);
}

// Calls f(i) for i = 0, step, 2 step, ... < n, grid-stride, 64-bit
template <typename F>
__device__ __forceinline__ void grid_stride(int64_t n, int64_t step, F f) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * step;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * step; i < n;
       i += stride)
    f(i);
}

}  // namespace tp_ext
