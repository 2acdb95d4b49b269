// Rotary embedding of one pair: (a, b) rotated by the angle with the given cosine and sine. The
// first r of head_dim elements are rotated, r = 2 * (columns of cos): pairs (i, i + r / 2), or (2i,
// 2i + 1) if interleaved; the rest is copied. The inverse rotates by the negative angle.

#pragma once

#include "cos_sin.h"
#include "divide.h"

namespace tp_ext {

template <typename A>
struct Pair {
  A first, second;
};

template <typename A>
TP_HD Pair<A> rotate(A a, A b, A cos, A sin) {
  return {a * cos - b * sin, b * cos + a * sin};
}

// Rotation of pair i from one position to the next: base^(-2 i / r), half = r / 2
TP_HD double rope_frequency(double base, int64_t i, int64_t half) {
  const double exponent = -static_cast<double>(i) / static_cast<double>(half);
#ifdef __CUDA_ARCH__
  return ::pow(base, exponent);
#else
  return std::pow(base, exponent);
#endif
}

// The frequency of pair i from a list given by the caller: by value, as a kernel argument
struct RopeFrequencies {
  static constexpr int64_t kMax = 256;
  double values[kMax];
  TP_HD double operator()(int64_t i) const { return values[i]; }
};

// The frequency of pair i from a geometric series
struct RopeSeries {
  double base;
  int64_t half;
  TP_HD double operator()(int64_t i) const { return rope_frequency(base, i, half); }
};

// x [batch, seq, heads, head_dim], its head_dim dense and its other dims strided; y contiguous;
// half = r / 2; cos and sin [rows, half]. Tokens are counted over batch and seq.
struct RopeShape {
  int64_t tokens, seq, heads, head_dim, half, rows;
  int64_t batch_stride, token_stride, head_stride;
};

struct RopeToken {
  int64_t start, row;  // start of its first head in x; its row of the tables
};

// Without positions (nullptr) the tokens of every sequence use rows 0, 1, 2, ..
TP_HD RopeToken rope_token(const RopeShape& s, const int64_t* positions, int64_t t) {
  const int64_t sequence = divide(t, s.seq), place = t - sequence * s.seq;
  return {sequence * s.batch_stride + place * s.token_stride,
          positions == nullptr ? place : positions[t]};
}

}  // namespace tp_ext
