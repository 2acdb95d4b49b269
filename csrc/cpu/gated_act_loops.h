// The loops of gated_act on CPU, one per way of reading and writing a type, as in bias_act_loops.h.

#pragma once

#include "cpu/activation_loops.h"
#include "cpu/dispatch.h"
#include "cpu/fp16_avx512.h"
#include "cpu/prefetch.h"
#include "kernels/half_math.h"

namespace tp_ext {

// One element
template <typename Act, bool kBias, typename Math, typename A>
TP_HD A forward_one(A gate, A up, A bias_gate, A bias_up) {
  if constexpr (kBias) gate += bias_gate, up += bias_up;
  return static_cast<A>(Act::value(Math(gate))) * up;
}
template <typename A>
struct GateUp {
  A gate, up;
};
template <typename T>
using RestrictGateUp = GateUp<T* __restrict>;

template <typename Act, bool kBias, typename Math, typename A>
TP_HD GateUp<A> backward_one(A grad, A gate, A up, A bias_gate, A bias_up) {
  if constexpr (kBias) gate += bias_gate, up += bias_up;
  const ValueSlope<Math> act = Act::value_slope(Math(gate));
  return {grad * up * static_cast<A>(act.slope), grad * static_cast<A>(act.value)};
}

// One chunk of a row, in the accumulation type, while prefetching memory of type T; bias and sums
// are null without a bias.
template <typename Act, bool kBias, typename A, typename T>
TP_MULTIVERSION void forward_loop(const A* __restrict gate, const A* __restrict up,
                                  const A* __restrict bias_gate, const A* __restrict bias_up,
                                  A* __restrict y, int64_t n, GateUp<const T*> next, T* next_y) {
  sweep<2>(
      n,
      [&](int64_t j) TP_INLINED {
        y[j] = forward_one<Act, kBias, activation_t<T>>(gate[j], up[j], kBias ? bias_gate[j] : A(0),
                                                        kBias ? bias_up[j] : A(0));
      },
      next.gate, next.up, next_y);
}

// Parameters, not structs as in norm_backward.h: gcc copies pointers of a struct to vector registers,
// and from there to others in every iteration, which takes up to a quarter longer
template <typename Act, bool kBias, typename A, typename T>
TP_MULTIVERSION void backward_loop(const A* __restrict grad, const A* __restrict gate,
                                   const A* __restrict up, const A* __restrict bias_gate,
                                   const A* __restrict bias_up, A* __restrict dgate,
                                   A* __restrict dup, A* __restrict sums_gate,
                                   A* __restrict sums_up, int64_t n, const T* next_grad,
                                   const T* next_gate, const T* next_up, T* next_dgate,
                                   T* next_dup) {
  sweep<2>(
      n,
      [&](int64_t j) TP_INLINED {
        const GateUp<A> d = backward_one<Act, kBias, activation_t<T>>(
            grad[j], gate[j], up[j], kBias ? bias_gate[j] : A(0), kBias ? bias_up[j] : A(0));
        dgate[j] = d.gate;
        dup[j] = d.up;
        if constexpr (kBias) sums_gate[j] += d.gate, sums_up[j] += d.up;
      },
      next_grad, next_gate, next_up, next_dgate, next_dup);
}

// The same for n pairs. bias and sums point to the even columns; the odd ones are `odd` further on.
template <typename Act, bool kBias>
TP_MULTIVERSION void forward_loop(const Bf16Pair* __restrict gate, const Bf16Pair* __restrict up,
                                  const float* __restrict bias_gate,
                                  const float* __restrict bias_up, int64_t odd,
                                  Bf16Pair* __restrict y, int64_t n, int64_t ahead) {
  using Math = activation_t<Bf16>;
  sweep<2>(
      n,
      [&](int64_t j) TP_INLINED {
        const uint32_t a = word_of(gate[j]), b = word_of(up[j]);
        store_pair(
            y[j],
            forward_one<Act, kBias, Math>(even_of(a), even_of(b), kBias ? bias_gate[j] : 0.f,
                                          kBias ? bias_up[j] : 0.f),
            forward_one<Act, kBias, Math>(odd_of(a), odd_of(b), kBias ? bias_gate[odd + j] : 0.f,
                                          kBias ? bias_up[odd + j] : 0.f));
      },
      gate + 2 * ahead, up + 2 * ahead, y + ahead);
}

template <typename Act, bool kBias>
TP_MULTIVERSION void backward_loop(const Bf16Pair* __restrict grad, const Bf16Pair* __restrict gate,
                                   const Bf16Pair* __restrict up, const float* __restrict bias_gate,
                                   const float* __restrict bias_up, int64_t odd,
                                   Bf16Pair* __restrict dgate, Bf16Pair* __restrict dup,
                                   float* __restrict sums_gate, float* __restrict odd_sums_gate,
                                   float* __restrict sums_up, float* __restrict odd_sums_up,
                                   int64_t n, int64_t ahead) {
  using Math = activation_t<Bf16>;
  sweep<2>(
      n,
      [&](int64_t j) TP_INLINED {
        const uint32_t g = word_of(grad[j]), a = word_of(gate[j]), b = word_of(up[j]);
        const GateUp<float> even =
            backward_one<Act, kBias, Math>(even_of(g), even_of(a), even_of(b),
                                           kBias ? bias_gate[j] : 0.f, kBias ? bias_up[j] : 0.f);
        const GateUp<float> last = backward_one<Act, kBias, Math>(odd_of(g), odd_of(a), odd_of(b),
                                                                  kBias ? bias_gate[odd + j] : 0.f,
                                                                  kBias ? bias_up[odd + j] : 0.f);
        store_pair(dgate[j], even.gate, last.gate);
        store_pair(dup[j], even.up, last.up);
        if constexpr (kBias) {
          sums_gate[j] += even.gate, odd_sums_gate[j] += last.gate;
          sums_up[j] += even.up, odd_sums_up[j] += last.up;
        }
      },
      grad + ahead, gate + 2 * ahead, up + 2 * ahead, dgate + 2 * ahead, dup + 2 * ahead);
}

// The same for fp16, n a multiple of kFp16Lanes; `ahead` in elements, twice as far for x
template <typename Act, bool kBias>
TP_FP16_AVX512 void forward_lanes(const Fp16* __restrict gate, const Fp16* __restrict up,
                                  const float* __restrict bias_gate,
                                  const float* __restrict bias_up, Fp16* __restrict y, int64_t n,
                                  int64_t ahead) {
  for (int64_t j = 0; j < n; j += kFp16Lanes) {
    if (j % kSweep == 0)
      fetch<2, kSweep>(gate + j + 2 * ahead), fetch<2, kSweep>(up + j + 2 * ahead),
          fetch<2, kSweep>(y + j + ahead);
    float a[kFp16Lanes], b[kFp16Lanes], to[kFp16Lanes];
    load_lanes(gate + j, a);
    load_lanes(up + j, b);
#pragma GCC unroll 1
    for (int l = 0; l < kFp16Lanes; ++l)
      to[l] = forward_one<Act, kBias, activation_t<Fp16>>(
          a[l], b[l], kBias ? bias_gate[j + l] : 0.f, kBias ? bias_up[j + l] : 0.f);
    store_lanes(y + j, to);
  }
}

template <typename Act, bool kBias>
TP_FP16_AVX512 void backward_lanes(const Fp16* __restrict grad, RestrictGateUp<const Fp16> x,
                                   RestrictGateUp<const float> bias, RestrictGateUp<Fp16> dx,
                                   RestrictGateUp<float> sums, int64_t n, int64_t ahead) {
  for (int64_t j = 0; j < n; j += kFp16Lanes) {
    if (j % kSweep == 0)
      fetch<2, kSweep>(grad + j + ahead), fetch<2, kSweep>(x.gate + j + 2 * ahead),
          fetch<2, kSweep>(x.up + j + 2 * ahead), fetch<2, kSweep>(dx.gate + j + 2 * ahead),
          fetch<2, kSweep>(dx.up + j + 2 * ahead);
    float g[kFp16Lanes], a[kFp16Lanes], b[kFp16Lanes], to_gate[kFp16Lanes], to_up[kFp16Lanes];
    load_lanes(grad + j, g);
    load_lanes(x.gate + j, a);
    load_lanes(x.up + j, b);
#pragma GCC unroll 1
    for (int l = 0; l < kFp16Lanes; ++l) {
      const GateUp<float> d = backward_one<Act, kBias, activation_t<Fp16>>(
          g[l], a[l], b[l], kBias ? bias.gate[j + l] : 0.f, kBias ? bias.up[j + l] : 0.f);
      to_gate[l] = d.gate;
      to_up[l] = d.up;
      if constexpr (kBias) sums.gate[j + l] += d.gate, sums.up[j + l] += d.up;
    }
    store_lanes(dx.gate + j, to_gate);
    store_lanes(dx.up + j, to_up);
  }
}

// gate and up, and their columns of bias and sums, are f apart. `ahead`: prefetch distance in rows,
// 0 or 1.
template <typename Act, bool kBias, typename T>
void forward_chunk(const T* gate, ConstColumns<T> bias, T* y, int64_t f, int64_t n, int64_t ahead) {
  const T* const up = gate + f;
  const auto* const bias_gate = bias.data;
  const auto* const bias_up = kBias ? bias.row(1).data : nullptr;
  if constexpr (kPaired<T>) {
    const auto loop = [&](const Bf16Pair* from_gate, const Bf16Pair* from_up, Bf16Pair* to,
                          int64_t first, int64_t pairs) {
      forward_loop<Act, kBias>(from_gate, from_up, kBias ? bias_gate + first : nullptr,
                               kBias ? bias_up + first : nullptr, columns_size<T>(f) / 2, to, pairs,
                               ahead * f / 2);
    };
    loop(pairs_at(gate), pairs_at(up), pairs_at(y), 0, n / 2);
    if (n % 2 != 0) {
      const Bf16Pair last_gate = padded(gate[n - 1]), last_up = padded(up[n - 1]);
      Bf16Pair result;
      loop(&last_gate, &last_up, &result, n / 2, 1);
      y[n - 1] = result.even;
    }
  } else {
    int64_t done = 0;
    if constexpr (std::is_same_v<T, Fp16>) {
      done = in_fp16_lanes(n);
      if (done > 0) forward_lanes<Act, kBias>(gate, up, bias_gate, bias_up, y, done, f * ahead);
    }
    Fp32Buffer<T> from_gate, from_up, to;
    for_each_buffer<T>(done, n, [&](int64_t i, int64_t m) {
      const T* const next = gate + i + 2 * f * ahead;
      forward_loop<Act, kBias>(from_gate.load(gate + i, m), from_up.load(up + i, m),
                               kBias ? bias_gate + i : nullptr, kBias ? bias_up + i : nullptr,
                               to.target(y + i), m, {next, next + f}, y + i + f * ahead);
      to.store(y + i, m);
    });
  }
}

template <typename Act, bool kBias, typename T>
void backward_chunk(const T* grad, const T* gate, ConstColumns<T> bias, T* dgate,
                    MutableColumns<T> sums, int64_t f, int64_t n, int64_t ahead) {
  const T* const up = gate + f;
  T* const dup = dgate + f;
  const auto* const bias_gate = bias.data;
  const auto* const bias_up = kBias ? bias.row(1).data : nullptr;
  const MutableColumns<T> sums_up = kBias ? sums.row(1) : sums;
  if constexpr (kPaired<T>) {
    const auto loop = [&](const Bf16Pair* upstream, const Bf16Pair* from_gate,
                          const Bf16Pair* from_up, Bf16Pair* to_gate, Bf16Pair* to_up,
                          int64_t first, int64_t pairs) {
      backward_loop<Act, kBias>(upstream, from_gate, from_up, kBias ? bias_gate + first : nullptr,
                                kBias ? bias_up + first : nullptr, columns_size<T>(f) / 2, to_gate,
                                to_up, kBias ? sums.data + first : nullptr,
                                kBias ? sums.odd() + first : nullptr,
                                kBias ? sums_up.data + first : nullptr,
                                kBias ? sums_up.odd() + first : nullptr, pairs, ahead * f / 2);
    };
    loop(pairs_at(grad), pairs_at(gate), pairs_at(up), pairs_at(dgate), pairs_at(dup), 0, n / 2);
    // The last one is copied to a pair of its own: at its place a pair would overwrite what follows
    // the row. The sums have room for the other half.
    if (n % 2 != 0) {
      const Bf16Pair last_grad = padded(grad[n - 1]);
      const Bf16Pair last_gate = padded(gate[n - 1]), last_up = padded(up[n - 1]);
      Bf16Pair result_gate, result_up;
      loop(&last_grad, &last_gate, &last_up, &result_gate, &result_up, n / 2, 1);
      dgate[n - 1] = result_gate.even;
      dup[n - 1] = result_up.even;
    }
  } else {
    int64_t done = 0;
    if constexpr (std::is_same_v<T, Fp16>) {
      done = in_fp16_lanes(n);
      if (done > 0)
        backward_lanes<Act, kBias>(grad, {gate, up}, {bias_gate, bias_up}, {dgate, dup},
                                   {sums.data, sums_up.data}, done, f * ahead);
    }
    // The rest of fp16, fp32 and fp64 [Note: bf16 is processed in pairs, fp16 by 16]
    Fp32Buffer<T> upstream, from_gate, from_up, to_gate, to_up;
    for_each_buffer<T>(done, n, [&](int64_t i, int64_t m) {
      const T* const next = gate + i + 2 * f * ahead;
      T* const next_to = dgate + i + 2 * f * ahead;
      backward_loop<Act, kBias>(upstream.load(grad + i, m), from_gate.load(gate + i, m),
                                from_up.load(up + i, m), kBias ? bias_gate + i : nullptr,
                                kBias ? bias_up + i : nullptr, to_gate.target(dgate + i),
                                to_up.target(dup + i), kBias ? sums.data + i : nullptr,
                                kBias ? sums_up.data + i : nullptr, m, grad + i + f * ahead, next,
                                next + f, next_to, next_to + f);
      to_gate.store(dgate + i, m);
      to_up.store(dup + i, m);
    });
  }
}

}  // namespace tp_ext
