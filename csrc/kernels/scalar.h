// Scalars on host and device: the accumulation type of each storage type, conversions, exp.
// Host code in this folder is written in plain loops that the compiler vectorises
// (cpu/multiversion.h).

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define TP_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Always inlined: a function that is not would not be compiled for its caller's ISA
// (cpu/multiversion.h)
#define TP_HD inline __attribute__((always_inline))
#else
#define TP_HD inline
#endif

namespace tp_ext {

template <typename To, typename From>
TP_HD To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// fp32 arithmetic for half types and fp32, fp64 for fp64
template <typename T>
struct AccType {
  using type = float;
};
template <>
struct AccType<double> {
  using type = double;
};
template <typename T>
using acc_t = typename AccType<T>::type;

template <typename T>
TP_HD acc_t<T> to_acc(T x) {
  return static_cast<acc_t<T>>(x);
}
template <typename T>
TP_HD T from_acc(acc_t<T> x) {
  return static_cast<T>(x);
}
#ifdef __CUDACC__
template <>
TP_HD float to_acc(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <>
TP_HD float to_acc(__half x) {
  return __half2float(x);
}
template <>
TP_HD __nv_bfloat16 from_acc<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}
template <>
TP_HD __half from_acc<__half>(float x) {
  return __float2half(x);
}
#endif

TP_HD double exp_of(double x) {
#ifdef __CUDA_ARCH__
  return ::exp(x);
#else
  return std::exp(x);
#endif
}

// e^x for x = n ln 2 + r with n whole, without the factor 2^n: a polynomial in r
TP_HD float exp_of_rest(float x, float n) {
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float poly = 1.9875691500e-4f;
  poly = poly * r + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  return poly * (r * r) + r + 1.f;
}

// e^x, relative error below 1.2e-7, correct at +-inf and NaN; branch-free on the host so that loops
// vectorise: 2^n is a product of two powers, as n reaches 128 and the subnormals.
TP_HD float exp_of(float x) {
#ifdef __CUDA_ARCH__
  return ::expf(x);
#else
  x = x < -104.f ? -104.f : x;
  x = x > 89.f ? 89.f : x;
  const float shifted =
      x * 1.44269504f + 12582912.f;  // the integer nearest to x / ln 2, in the low bits
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const int32_t n = bits - 0x4b400000;
  const float poly = exp_of_rest(x, shifted - 12582912.f);
  const int32_t half = n >> 1;
  const int32_t bits_a = (half + 127) << 23, bits_b = (n - half + 127) << 23;
  float a, b;
  std::memcpy(&a, &bits_a, sizeof a);
  std::memcpy(&b, &bits_b, sizeof b);
  return poly * a * b;
#endif
}

// e^x for x <= 0, relative error 1.2e-7, 0 below -87.7. Enough for softmax and the activations, and
// without the range above 1 the loops of exp_of shrink by a third: n + 127, of x = n ln 2 + r, is
// the exponent field of 2^n as it stands, and -127 makes it 0.
TP_HD double exp_down(double x) { return exp_of(x); }
TP_HD float exp_down(float x) {
#ifdef __CUDA_ARCH__
  return ::expf(x);
#else
  x = x < -88.0296919f ? -88.0296919f : x;
  const float shifted = x * 1.44269504f + 12583039.f;  // 1.5 * 2^23 + 127: n + 127 in the low bits
  const float poly = exp_of_rest(x, shifted - 12583039.f);
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return poly * scale;
#endif
}

}  // namespace tp_ext
