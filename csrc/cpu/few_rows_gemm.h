// fp32 products of a few rows, the tokens of a chunk, with a matrix of many: the weight of a
// vocabulary. A library's product first copies the large operand into blocks for its registers,
// which pays off after some hundred rows; at 96 it takes a third of the time. Here each element of
// the large matrix is read where it lies, once, by the instructions that compute, row after row:
// the lines of the next rows are prefetched meanwhile, one at a time.
//
//   logits       y [tokens, vocab] = x w^T        split by rows of w
//   input_grad   dx [tokens, hidden] += dy w      split by columns of w
//   weight_grad  dw [vocab, hidden] (+)= dy^T x   split by rows of dw
//
// All matrices are row-major; w and dw are contiguous, `stride` is that of y and dy. Torch-free; a
// call computes a range of the rows, or columns, by which it is split.
//
// [Note: products of a chunk of tokens with a vocabulary have kernels]

#pragma once

#include <cstdint>

namespace tp_ext::few_rows {

constexpr int64_t kMaxTokens = 96;
constexpr int64_t kRows = 6;      // of a block of registers, which has kRows x kColumns elements
constexpr int64_t kColumns = 64;  // hidden is a multiple

struct Shape {
  int64_t tokens, vocab, hidden;
};
struct Range {
  int64_t begin, end;
};

// Whether the machine has the instructions
bool supported();

// x_columns [hidden, kMaxTokens] is x transposed, and 0 beyond the tokens; the range is in
// multiples of kColumns
void logits(const float* x_columns, const float* w, float* y, int64_t stride, Shape shape,
            Range range);

// dx_blocks [hidden / kColumns, tokens rounded up to a multiple of kRows, kColumns] is dx in blocks
// of columns; the range is in multiples of kColumns
void input_grad(const float* dy, int64_t stride, const float* w, float* dx_blocks, Shape shape,
                Range range);

// x_blocks [hidden / kColumns, tokens, kColumns] is x in blocks of columns
void weight_grad(const float* dy, int64_t stride, const float* x_blocks, float* dw, Shape shape,
                 bool add, Range range);

}  // namespace tp_ext::few_rows
