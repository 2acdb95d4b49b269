// Dropout in portable loops, and in AVX-512 where the machine has it: 64 elements at a time, from the
// counters of their words to the stored result. Where there are fewer, at both ends of a run, loads
// and stores are masked.

#include "cpu/dropout_pass.h"

#include "cpu/clones.h"
#include "cpu/convert.h"
#include "cpu/philox_lanes.h"

namespace tp_ext {
namespace {

template <bool kBias, bool kResidual, bool kSums, typename A>
TP_SIMD void dropout_loop(const A* __restrict x, const A* __restrict bias,
                          const A* __restrict residual, A* __restrict y, A* __restrict sums,
                          const uint32_t* __restrict words, int64_t n, Dropout<A> dropout) {
  for (int64_t i = 0; i < n; ++i) {
    A value = x[i];
    if constexpr (kBias) value += bias[i];
    value *= dropout.factor(words[i]);
    if constexpr (kSums) sums[i] += value;
    if constexpr (kResidual) value += residual[i];
    y[i] = value;
  }
}

// The pass in portable loops: words into a buffer, then half types in fp32
template <bool kBias, bool kResidual, bool kSums, typename T>
void dropout_in_loops(const DropoutPass<T>& pass) {
  WordBuffer buffer;
  const bool draws = !pass.dropout.keeps_all();
  if (!draws) std::fill_n(buffer.words, kWordRun, 0);
  Stage<T> from, from_residual, to;
  for (int64_t i = 0, n; i < pass.n; i += n) {
    const uint64_t first = pass.first + i;
    n = std::min(pass.n - i, kWordRun - static_cast<int64_t>(first % 4));
    if (draws) draw_words(pass.keys, first, n, buffer);
    static_assert(kWordRun <= kStage);
    dropout_loop<kBias, kResidual, kSums>(
        from.load(pass.x + i, n), kBias ? pass.bias + i : nullptr,
        kResidual ? from_residual.load(pass.residual + i, n) : nullptr, to.target(pass.y + i),
        kSums ? pass.sums + i : nullptr, buffer.words + first % 4, n, pass.dropout);
    to.store(pass.y + i, n);
  }
}

// Calls run(bias?, residual?, sums?), each a std::bool_constant, for what the pass has of them
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

#define TP_V4 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

// 16 elements as fp32, those of the mask if not all

template <bool kAll>
TP_V4 TP_INLINE __m512 load(const float* x, __mmask16 mask) {
  return kAll ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(mask, x);
}
template <bool kAll>
TP_V4 TP_INLINE __m256i load_16_bits(const void* x, __mmask16 mask) {
  return kAll ? _mm256_loadu_si256((const __m256i*)x) : _mm256_maskz_loadu_epi16(mask, x);
}
template <bool kAll>
TP_V4 TP_INLINE __m512 load(const Bf16* x, __mmask16 mask) {
  const __m512i wide = _mm512_cvtepu16_epi32(load_16_bits<kAll>(x, mask));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
template <bool kAll>
TP_V4 TP_INLINE __m512 load(const Fp16* x, __mmask16 mask) {
  return _mm512_cvtph_ps(load_16_bits<kAll>(x, mask));
}

// Stores 32 elements

template <bool kAll>
TP_V4 TP_INLINE void store(float* y, __m512 a, __m512 b, __mmask32 mask) {
  _mm512_mask_storeu_ps(y, kAll ? 0xFFFF : mask & 0xFFFF, a);
  _mm512_mask_storeu_ps(y + 16, kAll ? 0xFFFF : mask >> 16, b);
}

// As Bf16(float), the result in the upper half: ties to even, NaN quiet
TP_V4 TP_INLINE __m512i rounded_to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), quiet = _mm512_set1_epi32(0x7fc00000);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  const __m512i half =
      _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
  return _mm512_mask_add_epi32(quiet, number, bits, half);
}
template <bool kAll>
TP_V4 TP_INLINE void store(Bf16* y, __m512 a, __m512 b, __mmask32 mask) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i both =
      _mm512_permutex2var_epi16(rounded_to_bf16(a), _mm512_load_si512(kUpper), rounded_to_bf16(b));
  _mm512_mask_storeu_epi16(y, kAll ? ~__mmask32{0} : mask, both);
}
template <bool kAll>
TP_V4 TP_INLINE void store(Fp16* y, __m512 a, __m512 b, __mmask32 mask) {
  const __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
  _mm256_mask_storeu_epi16(y, kAll ? 0xFFFF : mask & 0xFFFF, low);
  _mm256_mask_storeu_epi16(y + 16, kAll ? 0xFFFF : mask >> 16, high);
}

template <typename T>
struct Pointers {
  const T* x;
  const float* bias;
  const T* residual;
  T* y;
  float* sums;
};

template <bool kAll, bool kBias, bool kResidual, bool kSums, typename T>
TP_V4 TP_INLINE __m512 value_of(const Pointers<T>& to, int64_t i, __m512i words, __mmask16 mask,
                                const Dropout<float>& dropout) {
  __m512 value = load<kAll>(to.x + i, mask);
  if constexpr (kBias) value = _mm512_add_ps(value, load<kAll>(to.bias + i, mask));
  const __mmask16 kept =
      _mm512_cmpge_epu32_mask(words, _mm512_set1_epi32(static_cast<int>(dropout.threshold)));
  const __m512 factor = _mm512_maskz_mov_ps(kept, _mm512_set1_ps(dropout.scale));
  if constexpr (kResidual) return _mm512_fmadd_ps(value, factor, load<kAll>(to.residual + i, mask));
  value = _mm512_mul_ps(value, factor);
  if constexpr (kSums) {
    const __m512 sum = _mm512_add_ps(load<kAll>(to.sums + i, mask), value);
    _mm512_mask_storeu_ps(to.sums + i, kAll ? 0xFFFF : mask, sum);
  }
  return value;
}

template <bool kAll, bool kBias, bool kResidual, bool kSums, typename T>
TP_V4 TP_INLINE void store_64(const Pointers<T>& to, int64_t i, const Words512& words,
                              uint64_t mask, const Dropout<float>& dropout) {
  const auto m0 = static_cast<__mmask32>(mask), m1 = static_cast<__mmask32>(mask >> 32);
  const auto a = value_of<kAll, kBias, kResidual, kSums>(to, i, words.a, m0, dropout);
  const auto b = value_of<kAll, kBias, kResidual, kSums>(to, i + 16, words.b, m0 >> 16, dropout);
  store<kAll>(to.y + i, a, b, m0);
  const auto c = value_of<kAll, kBias, kResidual, kSums>(to, i + 32, words.c, m1, dropout);
  const auto d = value_of<kAll, kBias, kResidual, kSums>(to, i + 48, words.d, m1 >> 16, dropout);
  store<kAll>(to.y + i + 32, c, d, m1);
}

// The bits [from, to) of 64
inline uint64_t bits_between(int64_t from, int64_t to) {
  return (to >= 64 ? ~uint64_t{0} : (uint64_t{1} << to) - 1) & (~uint64_t{0} << from);
}

template <bool kBias, bool kResidual, bool kSums, typename T>
TP_V4 void dropout_in_vectors(const DropoutPass<T>& pass) {
  const int64_t skip = static_cast<int64_t>(pass.first % 4), end = skip + pass.n;
  const Pointers<T> to{pass.x - skip, kBias ? pass.bias - skip : nullptr,
                       kResidual ? pass.residual - skip : nullptr, pass.y - skip,
                       kSums ? pass.sums - skip : nullptr};
  const PhiloxKeys& keys = pass.keys;
  const Dropout<float> dropout = pass.dropout;
  const uint64_t counter = pass.first / 4;
  const SharedRounds shared(keys, counter >> 32);
  U64x8 p = first_products512(counter);
  for (int64_t i = 0; i < end; i += 64, p += 16 * kMul0) {
    const Words512 words = words_of_16(p, keys, shared);
    const int64_t from = i ? 0 : skip;
    if (from == 0 && i + 64 <= end)
      store_64<true, kBias, kResidual, kSums>(to, i, words, 0, dropout);
    else
      store_64<false, kBias, kResidual, kSums>(to, i, words, bits_between(from, end - i), dropout);
  }
}

template <typename T>
void in_vectors(const DropoutPass<T>& pass) {
  with_parts(pass, [&](auto bias, auto residual, auto sums) {
    dropout_in_vectors<bias(), residual(), sums()>(pass);
  });
}

#undef TP_V4
#endif

}  // namespace

template <typename T>
void dropout_pass(const DropoutPass<T>& pass) {
#ifdef TP_PHILOX_X86
  if constexpr (!std::is_same_v<T, double>)  // which is bound by memory in loops too
    if (has_avx512() && !pass.dropout.keeps_all()) return in_vectors(pass);
#endif
  in_loops(pass);
}

template void dropout_pass(const DropoutPass<double>&);
template void dropout_pass(const DropoutPass<float>&);
template void dropout_pass(const DropoutPass<Bf16>&);
template void dropout_pass(const DropoutPass<Fp16>&);

}  // namespace tp_ext
