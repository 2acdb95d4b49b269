// Dropout in portable loops, and in AVX-512 where available.

#include "cpu/dropout_pass.h"

#include "cpu/dropout_avx512.h"
#include "cpu/half_convert.h"
#include "cpu/multiversion.h"

namespace tp_ext {
namespace {

// The factors of the elements of whole counters, 2 n of them. Returns whether the lower half of
// some number has to decide.
template <typename A>
TP_MULTIVERSION bool fill_factors(const uint32_t* __restrict words, int64_t n, Dropout<A> dropout,
                                  A* __restrict factors) {
  uint32_t equal = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t even = words[i] & 0xFFFF, odd = words[i] >> 16;
    factors[2 * i] = dropout.factor(even > dropout.upper);
    factors[2 * i + 1] = dropout.factor(odd > dropout.upper);
    equal |= (even == dropout.upper) | (odd == dropout.upper);
  }
  return equal != 0;
}

template <typename A>
void draw_factors(const PhiloxKeys& keys, uint64_t counter, int64_t counters, Dropout<A> dropout,
                  A* factors) {
  WordBuffer buffer;
  draw_words(keys, counter, counters, buffer);
  if (!fill_factors(buffer.words, 4 * counters, dropout, factors)) return;
  for (int64_t c = 0; c < counters; ++c) {
    const uint32_t kept = dropout.kept(keys.seed(), counter + c);
    for (int k = 0; k < kCounterHalves; ++k)
      factors[kCounterHalves * c + k] = dropout.factor(kept >> k & 1);
  }
}

template <bool kBias, bool kResidual, bool kSums, typename A>
TP_MULTIVERSION void dropout_loop(const A* __restrict x, const A* __restrict bias,
                                  const A* __restrict residual, A* __restrict y, A* __restrict sums,
                                  const A* __restrict factors, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    A value = x[i];
    if constexpr (kBias) value += bias[i];
    value *= factors[i];
    if constexpr (kSums) sums[i] += value;
    if constexpr (kResidual) value += residual[i];
    y[i] = value;
  }
}

// The pass in portable loops: factors into a buffer, then half types in fp32
template <bool kBias, bool kResidual, bool kSums, typename T>
void dropout_in_loops(const DropoutPass<T>& pass) {
  alignas(64) acc_t<T> factors[kWordChunk];
  const bool draws = !pass.dropout.keeps_all();
  if (!draws) std::fill_n(factors, kWordChunk, pass.dropout.scale);
  Fp32Buffer<T> from, from_residual, to;
  for (int64_t i = 0, n; i < pass.n; i += n) {
    const uint64_t first = pass.first + i;
    const auto skip = static_cast<int64_t>(first % kCounterHalves);
    n = std::min(pass.n - i, kWordChunk - skip);
    if (draws)
      draw_factors(pass.keys, first / kCounterHalves, counters_over(first, n, kCounterHalves),
                   pass.dropout, factors);
    static_assert(kWordChunk <= kBufferLength);
    dropout_loop<kBias, kResidual, kSums>(
        from.load(pass.x + i, n), kBias ? pass.bias + i : nullptr,
        kResidual ? from_residual.load(pass.residual + i, n) : nullptr, to.target(pass.y + i),
        kSums ? pass.sums + i : nullptr, factors + skip, n);
    to.store(pass.y + i, n);
  }
}

// Calls run(bias?, residual?, sums?), each a std::bool_constant, for the pointers that are not null
template <typename T, typename F>
void with_parts(const DropoutPass<T>& pass, F run) {
  constexpr std::true_type with;
  constexpr std::false_type without;
  if (pass.sums)
    run(without, without, with);
  else if (pass.bias)
    pass.residual ? run(with, with, without) : run(with, without, without);
  else
    pass.residual ? run(without, with, without) : run(without, without, without);
}

template <typename T>
void in_loops(const DropoutPass<T>& pass) {
  with_parts(pass, [&](auto bias, auto residual, auto sums) {
    dropout_in_loops<bias(), residual(), sums()>(pass);
  });
}

#ifdef TP_PHILOX_X86
template <typename T>
void in_vectors(const DropoutPass<T>& pass) {
  with_parts(pass, [&](auto bias, auto residual, auto sums) {
    dropout_in_lanes<bias(), residual(), sums()>(pass);
  });
}
#endif

}  // namespace

template <typename T>
void dropout_pass(const DropoutPass<T>& pass) {
#ifdef TP_PHILOX_X86
  if constexpr (!std::is_same_v<T, double>)  // which is memory-bound in loops too
    if (has_avx512() && !pass.dropout.keeps_all()) return in_vectors(pass);
#endif
  in_loops(pass);
}

template void dropout_pass(const DropoutPass<double>&);
template void dropout_pass(const DropoutPass<float>&);
template void dropout_pass(const DropoutPass<Bf16>&);
template void dropout_pass(const DropoutPass<Fp16>&);

}  // namespace tp_ext
