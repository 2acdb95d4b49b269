// Vectors of 64 bytes in the accumulation type, for dot products of rows: one register with AVX-512,
// two with AVX2.

#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/multiversion.h"
#include "kernels/half.h"

// Vectors are returned by functions that are inlined: no call depends on how they are passed
#pragma GCC diagnostic ignored "-Wpsabi"

namespace tp_ext {

template <typename A, int kBytes>
struct VectorOf {
  using type __attribute__((vector_size(kBytes))) = A;
};
template <typename A>
using Vector = typename VectorOf<A, 64>::type;
template <typename A>
using HalfVector = typename VectorOf<A, 32>::type;
template <typename A>
constexpr int64_t kLanes = 64 / sizeof(A);

template <typename A>
TP_INLINE Vector<A> load(const A* x) {
  Vector<A> result;
  std::memcpy(&result, x, sizeof result);
  return result;
}
TP_INLINE Vector<float> load(const Bf16* x) {
  using Words = VectorOf<uint32_t, 64>::type;
  VectorOf<uint16_t, 32>::type bits;
  std::memcpy(&bits, x, sizeof bits);
  const Words words = __builtin_convertvector(bits, Words) << 16;
  Vector<float> result;
  std::memcpy(&result, &words, sizeof result);
  return result;
}

template <typename A>
TP_INLINE HalfVector<A> halves_added(const Vector<A>& x) {
  HalfVector<A> halves[2];
  std::memcpy(halves, &x, sizeof halves);
  return halves[0] + halves[1];
}

// Sums of neighbouring lanes, those of a and then those of b. Of half vectors: AVX2 has no shuffle
// of longer ones.
TP_INLINE HalfVector<float> fold(const HalfVector<float>& a, const HalfVector<float>& b) {
  using Places = HalfVector<int32_t>;
  constexpr Places kEven = {0, 2, 4, 6, 8, 10, 12, 14};
  return __builtin_shuffle(a, b, kEven) + __builtin_shuffle(a, b, kEven + 1);
}
TP_INLINE HalfVector<double> fold(const HalfVector<double>& a, const HalfVector<double>& b) {
  using Places = HalfVector<int64_t>;
  constexpr Places kEven = {0, 2, 4, 6};
  return __builtin_shuffle(a, b, kEven) + __builtin_shuffle(a, b, kEven + 1);
}

// Exchanges the lanes whose index has the bit half with those of rows whose index has it
template <int half>
TP_INLINE void exchange(Vector<float> (&rows)[kLanes<float>]) {
  using Indices = VectorOf<int32_t, 64>::type;
  Indices low{}, high{};
  for (int n = 0; n < kLanes<float>; ++n) {
    low[n] = n & half ? n - half + kLanes<float> : n;
    high[n] = n & half ? n + kLanes<float> : n + half;
  }
  for (int n = 0; n < kLanes<float>; ++n) {
    if (n & half) continue;
    const Vector<float> a = rows[n], b = rows[n + half];
    rows[n] = __builtin_shuffle(a, b, low);
    rows[n + half] = __builtin_shuffle(a, b, high);
  }
}

// A square of 16 rows
TP_INLINE void transpose(Vector<float> (&rows)[kLanes<float>]) {
  exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

// The sum of the lanes of each of four vectors, in the first four lanes
template <typename A>
TP_INLINE HalfVector<A> sums_of_lanes(const Vector<A>* x) {
  HalfVector<A> halves[4];
  for (int i = 0; i < 4; ++i) halves[i] = halves_added<A>(x[i]);
  const HalfVector<A> sums = fold(fold(halves[0], halves[1]), fold(halves[2], halves[3]));
  if constexpr (sizeof(A) == 4) return fold(sums, sums);  // two of each vector were left
  return sums;
}

}  // namespace tp_ext
