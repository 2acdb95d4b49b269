#include "attention_rows.h"

#include <cmath>
#include <limits>

#include "cpu/multiversion.h"
#include "kernels/scalar.h"

namespace tp_ext {
namespace {

template <typename A>
constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();

// softcap: by libm's tanh, which rounds an element alike wherever it lies
template <typename A>
void cap(A* products, int64_t n, const ScoreOptions<A>& options) {
  if (options.softcap == A(0)) return;
  const A inverse = options.scale / options.softcap;
  for (int64_t j = 0; j < n; ++j) products[j] = std::tanh(products[j] * inverse);
}

// The score from what `cap` left: the product, or tanh
template <typename A>
A factor(const ScoreOptions<A>& options) {
  return options.softcap == A(0) ? options.scale : options.softcap;
}

template <typename A>
TP_MULTIVERSION A scores_of_tile(A* s, const A* mask, Keys seen, A scale) {
  const int64_t begin = seen.begin, end = seen.end;
  A max = kMinusInfinity<A>;
  if (mask == nullptr) {
#pragma omp simd reduction(max : max)
    for (int64_t j = 0; j < kTileKeys; ++j) {
      const A value = j >= begin && j < end ? s[j] * scale : kMinusInfinity<A>;
      s[j] = value;
      max = value > max ? value : max;
    }
    return max;
  }
  A added[kTileKeys];
  for (int64_t j = 0; j < kTileKeys; ++j) added[j] = 0;
  for (int64_t j = begin; j < end; ++j) added[j] = mask[j];
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < kTileKeys; ++j) {
    const A value = j >= begin && j < end ? s[j] * scale + added[j] : kMinusInfinity<A>;
    s[j] = value;
    max = value > max ? value : max;
  }
  return max;
}

template <typename A>
TP_MULTIVERSION A exponentials_of_tile(A* s, A shift) {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < kTileKeys; ++j) {
    s[j] = exp_down(s[j] - shift);
    sum += s[j];
  }
  return sum;
}

template <typename A>
TP_MULTIVERSION void scale_row(A* x, int64_t n, A factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// A kind per loop, without a branch in it: else it is no vector loop. A mask of zeros is added, so
// that all kinds round alike.
template <typename A, bool Masked, bool Capped>
TP_MULTIVERSION void grads_of_row(A* __restrict p, A* __restrict dp, const A* __restrict mask,
                                  Keys seen, A scale, A lse, A dot, A dscale) {
#pragma omp simd
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    const A raw = p[j];
    A exponent = raw * scale + (Masked ? mask[j] : A(0)) - lse;
    exponent = exponent > A(0) ? A(0) : exponent;  // by rounding alone
    const A weight = exp_down(exponent);
    const A slope = Capped ? A(1) - raw * raw : A(1);
    p[j] = weight;
    dp[j] = weight * (dp[j] - dot) * slope * dscale;
  }
}

}  // namespace

template <typename A>
void tile_weights(A* scores, const A* mask, Keys seen, const ScoreOptions<A>& options,
                  SoftmaxRow<A>& row, A* out, int64_t width) {
  cap(scores, kTileKeys, options);
  const A tile_max = scores_of_tile(scores, mask, seen, factor(options));
  const A max = tile_max > row.max ? tile_max : row.max;
  // Nothing is visible so far: exponentials of -inf - 0 are 0
  const A shift = max == kMinusInfinity<A> ? A(0) : max;
  if (max > row.max && row.sum > A(0)) {
    const A shrink = exp_down(row.max - max);
    row.sum *= shrink;
    scale_row(out, width, shrink);
  }
  row.max = max;
  row.sum += exponentials_of_tile(scores, shift);
}

template <typename A>
void weight_grads(A* products, A* dweights, const A* mask, Keys seen, int64_t n,
                  const ScoreOptions<A>& options, A lse, A dot) {
  cap(products, n, options);
  const bool capped = options.softcap != A(0);
  const auto grads = mask == nullptr
                         ? capped ? grads_of_row<A, false, true> : grads_of_row<A, false, false>
                     : capped ? grads_of_row<A, true, true>
                              : grads_of_row<A, true, false>;
  grads(products, dweights, mask, seen, factor(options), lse, dot, options.scale);
  for (int64_t j = 0; j < n; ++j)
    if (j < seen.begin || j >= seen.end) products[j] = dweights[j] = 0;
}

#define TP_INSTANTIATE(A)                                                                    \
  template void tile_weights(A*, const A*, Keys, const ScoreOptions<A>&, SoftmaxRow<A>&, A*, \
                             int64_t);                                                       \
  template void weight_grads(A*, A*, const A*, Keys, int64_t, const ScoreOptions<A>&, A, A);
TP_INSTANTIATE(float)
TP_INSTANTIATE(double)
#undef TP_INSTANTIATE

}  // namespace tp_ext
