// The loops of bias_act on CPU, one per way of reading and writing a type: directly or through an
// fp32 buffer (half_convert.h), in pairs (bf16_pairs.h), in lanes (fp16_avx512.h).

#pragma once

#include "cpu/activation_loops.h"
#include "cpu/dispatch.h"
#include "cpu/fp16_avx512.h"
#include "cpu/prefetch.h"
#include "kernels/half_math.h"

namespace tp_ext {

// Cache level into which backward prefetches: with column sums the data one row away is used later
template <bool kBias>
constexpr int kBackwardCache = kBias ? 2 : 1;

// One element
template <typename Act, bool kBias, typename Math, typename A>
TP_HD A forward_one(A x, A bias) {
  if constexpr (kBias) x += bias;
  return static_cast<A>(Act::value(Math(x)));
}
template <typename Act, bool kBias, typename Math, typename A>
TP_HD A backward_one(A grad, A x, A bias) {
  if constexpr (kBias) x += bias;
  return static_cast<A>(Act::backward(Math(grad), Math(x)));
}

// One chunk of a row, in the accumulation type, while prefetching memory of type T. bias (and
// sums): those of the chunk's columns, or null.
template <typename Act, bool kBias, typename A, typename T>
TP_MULTIVERSION void forward_loop(const A* __restrict x, const A* __restrict bias, A* __restrict y,
                                  int64_t n, const T* next_x, T* next_y) {
  sweep<1>(
      n,
      [&](int64_t j) TP_INLINED {
        y[j] = forward_one<Act, kBias, activation_t<T>>(x[j], kBias ? bias[j] : A(0));
      },
      next_x, next_y);
}

// What backward prefetches for reading
template <typename T>
struct NextInputs {
  const T *grad, *x;
};

template <typename Act, bool kBias, typename A, typename T>
TP_MULTIVERSION void backward_loop(const A* __restrict grad, const A* __restrict x,
                                   const A* __restrict bias, A* __restrict dx, A* __restrict sums,
                                   int64_t n, NextInputs<T> next, T* next_dx) {
  sweep<kBackwardCache<kBias>>(
      n,
      [&](int64_t j) TP_INLINED {
        const A d =
            backward_one<Act, kBias, activation_t<T>>(grad[j], x[j], kBias ? bias[j] : A(0));
        dx[j] = d;
        if constexpr (kBias) sums[j] += d;
      },
      next.grad, next.x, next_dx);
}

// The bias of the even and of the odd columns
struct PairBias {
  const float* __restrict even, * __restrict odd;
};

// The same for n pairs
template <typename Act, bool kBias>
TP_MULTIVERSION void forward_loop(const Bf16Pair* __restrict x, const float* __restrict even_bias,
                                  const float* __restrict odd_bias, Bf16Pair* __restrict y,
                                  int64_t n, int64_t ahead) {
  sweep<1>(
      n,
      [&](int64_t j) TP_INLINED {
        using Math = activation_t<Bf16>;
        const uint32_t word = word_of(x[j]);
        store_pair(y[j], forward_one<Act, kBias, Math>(even_of(word), kBias ? even_bias[j] : 0.f),
                   forward_one<Act, kBias, Math>(odd_of(word), kBias ? odd_bias[j] : 0.f));
      },
      x + ahead, y + ahead);
}

template <typename Act, bool kBias>
TP_MULTIVERSION void backward_loop(const Bf16Pair* __restrict grad, const Bf16Pair* __restrict x,
                                   PairBias bias, Bf16Pair* __restrict dx,
                                   float* __restrict even_sums, float* __restrict odd_sums,
                                   int64_t n, int64_t ahead) {
  sweep<kBackwardCache<kBias>>(
      n,
      [&](int64_t j) TP_INLINED {
        using Math = activation_t<Bf16>;
        const uint32_t upstream = word_of(grad[j]), word = word_of(x[j]);
        const float even = backward_one<Act, kBias, Math>(even_of(upstream), even_of(word),
                                                          kBias ? bias.even[j] : 0.f);
        const float odd = backward_one<Act, kBias, Math>(odd_of(upstream), odd_of(word),
                                                         kBias ? bias.odd[j] : 0.f);
        store_pair(dx[j], even, odd);
        if constexpr (kBias) even_sums[j] += even, odd_sums[j] += odd;
      },
      grad + ahead, x + ahead, dx + ahead);
}

// The same for fp16, n a multiple of kFp16Lanes
template <typename Act, bool kBias>
TP_FP16_AVX512 void forward_lanes(const Fp16* __restrict x, const float* __restrict bias,
                                  Fp16* __restrict y, int64_t n, int64_t ahead) {
  for (int64_t j = 0; j < n; j += kFp16Lanes) {
    if (j % kSweep == 0) fetch<1, kSweep>(x + j + ahead), fetch<1, kSweep>(y + j + ahead);
    float from[kFp16Lanes], to[kFp16Lanes];
    load_lanes(x + j, from);
#pragma GCC unroll 1
    for (int l = 0; l < kFp16Lanes; ++l)
      to[l] = forward_one<Act, kBias, activation_t<Fp16>>(from[l], kBias ? bias[j + l] : 0.f);
    store_lanes(y + j, to);
  }
}

template <typename Act, bool kBias>
TP_FP16_AVX512 void backward_lanes(const Fp16* __restrict grad, const Fp16* __restrict x,
                                   const float* __restrict bias, Fp16* __restrict dx,
                                   float* __restrict sums, int64_t n, int64_t ahead) {
  for (int64_t j = 0; j < n; j += kFp16Lanes) {
    if (j % kSweep == 0)
      fetch<kBackwardCache<kBias>, kSweep>(grad + j + ahead),
          fetch<kBackwardCache<kBias>, kSweep>(x + j + ahead),
          fetch<kBackwardCache<kBias>, kSweep>(dx + j + ahead);
    float upstream[kFp16Lanes], from[kFp16Lanes], to[kFp16Lanes];
    load_lanes(grad + j, upstream);
    load_lanes(x + j, from);
#pragma GCC unroll 1
    for (int l = 0; l < kFp16Lanes; ++l) {
      to[l] = backward_one<Act, kBias, activation_t<Fp16>>(upstream[l], from[l],
                                                           kBias ? bias[j + l] : 0.f);
      if constexpr (kBias) sums[j + l] += to[l];
    }
    store_lanes(dx + j, to);
  }
}

// n elements, while prefetching the n elements `ahead` of them
template <typename Act, bool kBias, typename T>
void forward_chunk(const T* x, ConstColumns<T> bias, T* y, int64_t n, int64_t ahead) {
  if constexpr (kPaired<T>) {
    const auto loop = [&](const Bf16Pair* from, Bf16Pair* to, int64_t first, int64_t pairs) {
      forward_loop<Act, kBias>(from, kBias ? bias.data + first : nullptr,
                               kBias ? bias.odd() + first : nullptr, to, pairs, ahead / 2);
    };
    loop(pairs_at(x), pairs_at(y), 0, n / 2);
    if (n % 2 != 0) {
      const Bf16Pair last = padded(x[n - 1]);
      Bf16Pair result;
      loop(&last, &result, n / 2, 1);
      y[n - 1] = result.even;
    }
  } else {
    int64_t done = 0;
    if constexpr (std::is_same_v<T, Fp16>) {
      done = in_fp16_lanes(n);
      if (done > 0) forward_lanes<Act, kBias>(x, bias.data, y, done, ahead);
    }
    Fp32Buffer<T> from, to;
    for_each_buffer<T>(done, n, [&](int64_t i, int64_t m) {
      forward_loop<Act, kBias>(from.load(x + i, m), kBias ? bias.data + i : nullptr,
                               to.target(y + i), m, x + i + ahead, y + i + ahead);
      to.store(y + i, m);
    });
  }
}

template <typename Act, bool kBias, typename T>
void backward_chunk(const T* grad, const T* x, ConstColumns<T> bias, T* dx, MutableColumns<T> sums,
                    int64_t n, int64_t ahead) {
  if constexpr (kPaired<T>) {
    const auto loop = [&](const Bf16Pair* upstream, const Bf16Pair* from, Bf16Pair* to,
                          int64_t first, int64_t pairs) {
      backward_loop<Act, kBias>(
          upstream, from,
          {kBias ? bias.data + first : nullptr, kBias ? bias.odd() + first : nullptr}, to,
          kBias ? sums.data + first : nullptr, kBias ? sums.odd() + first : nullptr, pairs,
          ahead / 2);
    };
    loop(pairs_at(grad), pairs_at(x), pairs_at(dx), 0, n / 2);
    if (n % 2 != 0) {
      const Bf16Pair last_grad = padded(grad[n - 1]), last = padded(x[n - 1]);
      Bf16Pair result;
      loop(&last_grad, &last, &result, n / 2, 1);
      dx[n - 1] = result.even;
    }
  } else {
    int64_t done = 0;
    if constexpr (std::is_same_v<T, Fp16>) {
      done = in_fp16_lanes(n);
      if (done > 0) backward_lanes<Act, kBias>(grad, x, bias.data, dx, sums.data, done, ahead);
    }
    Fp32Buffer<T> upstream, from, to;
    for_each_buffer<T>(done, n, [&](int64_t i, int64_t m) {
      backward_loop<Act, kBias>(upstream.load(grad + i, m), from.load(x + i, m),
                                kBias ? bias.data + i : nullptr, to.target(dx + i),
                                kBias ? sums.data + i : nullptr, m,
                                {grad + i + ahead, x + i + ahead}, dx + i + ahead);
      to.store(dx + i, m);
    });
  }
}

}  // namespace tp_ext
