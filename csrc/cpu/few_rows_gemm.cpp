#include "cpu/few_rows_gemm.h"

#include <algorithm>

#include "cpu/multiversion.h"
#include "cpu/vectors.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define TP_AVX512 __attribute__((flatten, target("arch=x86-64-v4,prefer-vector-width=512")))
#endif

namespace tp_ext::few_rows {

#ifdef TP_AVX512

namespace {

using Vector = float __attribute__((vector_size(64), aligned(4)));
constexpr int64_t kLanes = tp_ext::kLanes<float>;

// Prefetches the lines of rows x columns elements, row after row, into the second cache, a few at a
// time between the instructions that compute: in one burst they would wait for each other. An
// address beyond the matrix does no harm
template <bool written = false>
class Ahead {
 public:
  TP_INLINE Ahead(const float* from, int64_t stride, int64_t rows, int64_t columns)
      : row_(from), stride_(stride), rows_(rows), columns_(columns) {}
  TP_INLINE void fetch(int64_t lines) {
    for (int64_t n = 0; n < lines && rows_ > 0; ++n) {
      __builtin_prefetch(row_ + column_, written, 2);
      column_ += kLanes;
      if (column_ < columns_) continue;
      column_ = 0;
      row_ += stride_;
      --rows_;
    }
  }

 private:
  const float* row_;
  const int64_t stride_;
  int64_t rows_;
  const int64_t columns_;
  int64_t column_ = 0;
};

// The lines to fetch in each of calls
TP_INLINE int64_t each_of(int64_t lines, int64_t calls) {
  return std::max<int64_t>(1, (lines + calls / 2) / calls);
}

TP_INLINE Vector& vector_at(float* p) { return *reinterpret_cast<Vector*>(p); }
TP_INLINE const Vector& vector_at(const float* p) { return *reinterpret_cast<const Vector*>(p); }

// A matrix [rows, k] whose rows are `row` elements apart
struct Factor {
  const float* data;
  int64_t row;
};

// c [R, 16 N] (+)= a b over k, in registers: a [R, k], b [k, 16 N]. The sum over k is added to c at
// its end, which keeps long sums accurate. Calls fetch() for each kSteps of k
constexpr int64_t kSteps = 4;
template <int R, int N, bool add, typename Fetch>
TP_INLINE void block(int64_t k_end, Factor a, Factor b, float* c, int64_t c_row,
                     const Fetch& fetch) {
  Vector sums[R][N] = {};
  const auto step = [&](int64_t k) TP_INLINED {
    Vector v[N];
    for (int n = 0; n < N; ++n) v[n] = vector_at(b.data + k * b.row + n * kLanes);
    for (int r = 0; r < R; ++r) {
      const float factor = a.data[r * a.row + k];
      for (int n = 0; n < N; ++n) sums[r][n] += v[n] * factor;
    }
  };
  int64_t k = 0;
#pragma GCC unroll 1
  for (; k + kSteps <= k_end; k += kSteps) {
    fetch();
#pragma GCC unroll 4
    for (int64_t s = 0; s < kSteps; ++s) step(k + s);
  }
#pragma GCC unroll 1
  for (; k < k_end; ++k) step(k);
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      Vector& to = vector_at(c + r * c_row + n * kLanes);
      to = add ? to + sums[r][n] : sums[r][n];
    }
}

}  // namespace

bool supported() { return has_avx512(); }

TP_AVX512 void logits(const float* x_columns, const float* w, float* y, int64_t stride, Shape shape,
                      Range range) {
  const int64_t tokens = shape.tokens, hidden = shape.hidden, begin = range.begin, end = range.end;
  constexpr int64_t rows = 8, ahead = 2 * rows, deep = 256;  // of w, and of its columns
  constexpr int wide = 3;                                    // vectors of tokens
  alignas(64) float columns[kColumns * kMaxTokens];
  for (int64_t v = begin; v < end; v += kColumns) {
    Ahead next(w + (v + ahead) * hidden, hidden, kColumns, hidden);
    Ahead<true> out(y + v, stride, tokens, kColumns);
    bool even = false;
    const auto fetch = [&]() TP_INLINED {
      next.fetch(1);
      if ((even = !even)) out.fetch(1);
    };
    for (int64_t t = 0; t < kColumns; t += rows)
      for (int64_t k = 0; k < hidden; k += deep)
        for (int64_t m = 0; m < kMaxTokens; m += wide * kLanes) {
          const int64_t depth = std::min(deep, hidden - k);
          const float *a = w + (v + t) * hidden + k, *b = x_columns + k * kMaxTokens + m;
          float* to = columns + t * kMaxTokens + m;
          if (k == 0)
            block<rows, wide, false>(depth, {a, hidden}, {b, kMaxTokens}, to, kMaxTokens, fetch);
          else
            block<rows, wide, true>(depth, {a, hidden}, {b, kMaxTokens}, to, kMaxTokens, fetch);
        }
    for (int64_t m = 0; m < tokens; m += kLanes)
      for (int64_t t = 0; t < kColumns; t += kLanes) {
        Vector square[kLanes];
        for (int n = 0; n < kLanes; ++n) square[n] = vector_at(columns + (t + n) * kMaxTokens + m);
        transpose(square);
        for (int n = 0; n < kLanes; ++n)
          if (m + n < tokens) vector_at(y + (m + n) * stride + v + t) = square[n];
      }
  }
}

TP_AVX512 void input_grad(const float* dy, int64_t stride, const float* w, float* dx_blocks,
                          Shape shape, Range range) {
  const int64_t tokens = shape.tokens, vocab = shape.vocab, hidden = shape.hidden;
  const int64_t begin = range.begin, end = range.end;
  constexpr int64_t panel = 2048;  // columns of w, whose next rows stay in the second cache, as dx
  constexpr int64_t deep = 64;     // rows of w
  alignas(64) float packed[kMaxTokens * deep] = {}, tile[deep * kColumns];
  const int64_t blocks = (tokens + kRows - 1) / kRows;
  for (int64_t p = begin; p < end; p += panel) {
    const int64_t until = std::min(p + panel, end), wide = until - p,
                  all = blocks * wide / kColumns;
    const int64_t each = each_of(deep * wide / kLanes, all * deep / kSteps);
    const int64_t each_factor = each_of(tokens * deep / kLanes, all);
    for (int64_t v = 0; v < vocab; v += deep) {
      const int64_t depth = std::min(deep, vocab - v);
      for (int64_t m = 0; m < tokens; ++m)
        std::copy_n(dy + m * stride + v, depth, packed + m * deep);
      Ahead next(w + (v + deep) * hidden + p, hidden, deep, wide);
      Ahead factors(dy + v + deep, stride, tokens, deep);
      for (int64_t h = p; h < until; h += kColumns) {
        for (int64_t k = 0; k < depth; ++k)
          std::copy_n(w + (v + k) * hidden + h, kColumns, tile + k * kColumns);
        for (int64_t m = 0; m < blocks; ++m) {
          factors.fetch(each_factor);
          block<kRows, kColumns / kLanes, true>(depth, {packed + m * kRows * deep, deep},
                                                {tile, kColumns},
                                                dx_blocks + (h * blocks + m * kColumns) * kRows,
                                                kColumns, [&]() TP_INLINED { next.fetch(each); });
        }
      }
    }
  }
}

TP_AVX512 void weight_grad(const float* dy, int64_t stride, const float* x_blocks, float* dw,
                           Shape shape, bool add, Range range) {
  const int64_t tokens = shape.tokens, hidden = shape.hidden, begin = range.begin, end = range.end;
  constexpr int64_t panel = 1024;       // columns; of x they stay in the second cache
  constexpr int64_t deep = 3 * kLanes;  // rows of dw whose factors are packed at a time
  static_assert(deep % kRows == 0);
  alignas(64) float packed[deep * kMaxTokens];
  const auto none = []() TP_INLINED {};
  const int64_t each = each_of(kRows * kColumns / kLanes, tokens / kSteps);
  for (int64_t p = 0; p < hidden; p += panel) {
    const int64_t until = std::min(p + panel, hidden);
    const int64_t each_factor =
        each_of(tokens * deep / kLanes, (until - p) / kColumns * deep / kRows);
    for (int64_t v = begin; v < end; v += deep) {
      const int64_t rows = std::min(deep, end - v), squares = rows / kLanes * kLanes;
      for (int64_t m = 0; m < tokens; m += kLanes)
        for (int64_t t = 0; t < squares; t += kLanes) {
          Vector square[kLanes];
          for (int n = 0; n < kLanes; ++n)
            square[n] = m + n < tokens ? vector_at(dy + (m + n) * stride + v + t) : Vector{};
          transpose(square);
          for (int n = 0; n < kLanes; ++n) vector_at(packed + (t + n) * kMaxTokens + m) = square[n];
        }
      for (int64_t t = squares; t < rows; ++t)
        for (int64_t m = 0; m < tokens; ++m) packed[t * kMaxTokens + m] = dy[m * stride + v + t];
      Ahead factors(dy + v + deep, stride, tokens, deep);
      for (int64_t t = 0; t < rows;) {
        const int64_t some = t + kRows <= rows ? kRows : 1;
        const float* a = packed + t * kMaxTokens;
        for (int64_t h = p; h < until; h += kColumns) {
          const float* b = x_blocks + h * tokens;
          float* c = dw + (v + t) * hidden + h;
          factors.fetch(each_factor);
          Ahead<true> next(c + kRows * hidden, hidden, kRows, kColumns);
          const auto fetch = [&]() TP_INLINED { next.fetch(each); };
          constexpr int wide = kColumns / kLanes;
          if (some == 1 && add)
            block<1, wide, true>(tokens, {a, kMaxTokens}, {b, kColumns}, c, hidden, none);
          else if (some == 1)
            block<1, wide, false>(tokens, {a, kMaxTokens}, {b, kColumns}, c, hidden, none);
          else if (add)
            block<kRows, wide, true>(tokens, {a, kMaxTokens}, {b, kColumns}, c, hidden, fetch);
          else
            block<kRows, wide, false>(tokens, {a, kMaxTokens}, {b, kColumns}, c, hidden, fetch);
        }
        t += some;
      }
    }
  }
}

#else

bool supported() { return false; }
void logits(const float*, const float*, float*, int64_t, Shape, Range) {}
void input_grad(const float*, int64_t, const float*, float*, Shape, Range) {}
void weight_grad(const float*, int64_t, const float*, float*, Shape, bool, Range) {}

#endif

}  // namespace tp_ext::few_rows
