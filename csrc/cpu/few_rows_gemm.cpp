#include "cpu/few_rows_gemm.h"

#include <algorithm>

#include "cpu/multiversion.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define TP_AVX512 __attribute__((flatten, target("arch=x86-64-v4,prefer-vector-width=512")))
#endif

namespace tp_ext::few_rows {

#ifdef TP_AVX512

namespace {

using Vector = float __attribute__((vector_size(64), aligned(4)));
constexpr int64_t kLanes = 16;

// Prefetches kLines lines of each of rows rows into the second cache. An address beyond the matrix
// does no harm
template <int kLines>
TP_INLINE void fetch_rows(const float* from, int64_t stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    for (int n = 0; n < kLines; ++n)
      __builtin_prefetch(reinterpret_cast<const char*>(from) + (r * stride + n * kLanes) * 4, 0, 2);
}

// c [R, 16 N] (+)= a b over k, in registers: a [R, k] any strides, b [k, 16 N]. The sum over k is
// added to c at its end, which keeps long sums accurate
template <int R, int N, bool add>
TP_INLINE void block(int64_t k_end, const float* a, int64_t a_row, int64_t a_k, const float* b,
                     int64_t b_k, float* c, int64_t c_row) {
  Vector sums[R][N] = {};
#pragma GCC unroll 1
  for (int64_t k = 0; k < k_end; ++k) {
    Vector v[N];
    for (int n = 0; n < N; ++n) v[n] = *reinterpret_cast<const Vector*>(b + k * b_k + n * kLanes);
    for (int r = 0; r < R; ++r) {
      const float factor = a[r * a_row + k * a_k];
      for (int n = 0; n < N; ++n) sums[r][n] += v[n] * factor;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      auto* to = reinterpret_cast<Vector*>(c + r * c_row + n * kLanes);
      *to = add ? *to + sums[r][n] : sums[r][n];
    }
}

}  // namespace

bool supported() { return has_avx512(); }

TP_AVX512 void logits(const float* x_columns, const float* w, float* y, int64_t stride,
                      int64_t tokens, int64_t hidden, int64_t begin, int64_t end) {
  constexpr int64_t rows = 4, deep = 64;  // of w, and of its columns: x_columns stays in L1
  alignas(64) float transposed[kColumns * kMost];
  for (int64_t v = begin; v < end; v += kColumns) {
    for (int64_t k = 0; k < hidden; k += deep)
      for (int64_t t = 0; t < kColumns; t += rows) {
        const float* a = w + (v + t) * hidden + k;
        fetch_rows<4>(t + 2 * rows < kColumns ? a + 2 * rows * hidden
                      : k + deep < hidden     ? a + (2 * rows - kColumns) * hidden + deep
                                              : a + 2 * rows * hidden - k,
                      hidden, rows);
        float* to = transposed + t * kMost;
        const float* b = x_columns + k * kMost;
        if (k == 0)
          block<rows, kMost / kLanes, false>(deep, a, hidden, 1, b, kMost, to, kMost);
        else
          block<rows, kMost / kLanes, true>(deep, a, hidden, 1, b, kMost, to, kMost);
      }
    for (int64_t m = 0; m < tokens; ++m)
      for (int64_t t = 0; t < kColumns; ++t) y[m * stride + v + t] = transposed[t * kMost + m];
  }
}

TP_AVX512 void input_grad(const float* dy, int64_t stride, const float* w, float* dx,
                          int64_t tokens, int64_t vocab, int64_t hidden, int64_t begin,
                          int64_t end) {
  constexpr int64_t deep = 64;  // rows of w
  alignas(64) float packed[kMost * deep];
  const int64_t blocks = (tokens + kRows - 1) / kRows, each = (deep + blocks - 1) / blocks;
  for (int64_t v = 0; v < vocab; v += deep) {
    const int64_t depth = std::min(deep, vocab - v);
    for (int64_t m = 0; m < blocks * kRows; ++m)
      for (int64_t k = 0; k < depth; ++k)
        packed[(m / kRows * deep + k) * kRows + m % kRows] =
            m < tokens ? dy[m * stride + v + k] : 0.0f;
    for (int64_t h = begin; h < end; h += kColumns) {
      const float* b = w + v * hidden + h;
      const float* next = h + kColumns < end ? b + kColumns : b + deep * hidden - h + begin;
      for (int64_t m = 0; m < blocks; ++m) {
        fetch_rows<4>(next + m * each * hidden, hidden, std::min(each, deep - m * each));
        block<kRows, kColumns / kLanes, true>(depth, packed + m * deep * kRows, 1, kRows, b, hidden,
                                              dx + m * kRows * hidden + h, hidden);
      }
    }
  }
}

TP_AVX512 void weight_grad(const float* dy, int64_t stride, const float* x_blocks, float* dw,
                           int64_t tokens, int64_t hidden, bool add, int64_t begin, int64_t end) {
  constexpr int64_t most = 32;  // blocks whose factors are packed at a time
  alignas(64) float packed[most * kRows * kMost];
  for (int64_t v = begin; v < end; v += most * kRows) {
    const int64_t rows = std::min(most * kRows, end - v), blocks = rows / kRows;
    for (int64_t k = 0; k < tokens; ++k)
      for (int64_t r = 0; r < blocks * kRows; ++r)
        packed[(r / kRows * tokens + k) * kRows + r % kRows] = dy[k * stride + v + r];
    for (int64_t h = 0; h < hidden; h += kColumns) {
      const float* b = x_blocks + h * tokens;
      for (int64_t m = 0; m < blocks; ++m) {
        float* c = dw + (v + m * kRows) * hidden + h;
        fetch_rows<4>(
            m + 2 < blocks ? c + 2 * kRows * hidden : c + (2 - blocks) * kRows * hidden + kColumns,
            hidden, kRows);
        const float* a = packed + m * tokens * kRows;
        if (add)
          block<kRows, kColumns / kLanes, true>(tokens, a, 1, kRows, b, kColumns, c, hidden);
        else
          block<kRows, kColumns / kLanes, false>(tokens, a, 1, kRows, b, kColumns, c, hidden);
      }
      for (int64_t r = blocks * kRows; r < rows; ++r)
        if (add)
          block<1, kColumns / kLanes, true>(tokens, dy + v + r, 0, stride, b, kColumns,
                                            dw + (v + r) * hidden + h, hidden);
        else
          block<1, kColumns / kLanes, false>(tokens, dy + v + r, 0, stride, b, kColumns,
                                             dw + (v + r) * hidden + h, hidden);
    }
  }
}

#else

bool supported() { return false; }
void logits(const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t, int64_t) {}
void input_grad(const float*, int64_t, const float*, float*, int64_t, int64_t, int64_t, int64_t,
                int64_t) {}
void weight_grad(const float*, int64_t, const float*, float*, int64_t, int64_t, bool, int64_t,
                 int64_t) {}

#endif

}  // namespace tp_ext::few_rows
