// fp32 products of a few rows, the tokens of a chunk, with a matrix of many: the weight of a
// vocabulary. A library's product first copies the large operand into blocks for its registers,
// which pays off after some hundred rows; at 96 it takes a third of the time. Here each element of
// the large matrix is read where it lies, once, by the instructions that compute, row after row: the
// lines of the next rows are prefetched meanwhile, one at a time.
//
//   logits       y [tokens, vocab] = x w^T        split by rows of w
//   input_grad   dx [tokens, hidden] += dy w      split by columns of w
//   weight_grad  dw [vocab, hidden] (+)= dy^T x   split by rows of dw
//
// All matrices are row-major; w and dw are contiguous. Torch-free; a call computes the rows, or
// columns, from begin to end.
//
// [Note: products of a chunk of tokens with a vocabulary have kernels]

#pragma once

#include <cstdint>

namespace tp_ext::few_rows {

constexpr int64_t kMaxTokens = 96;
constexpr int64_t kRows = 6;      // of a block of registers, which has kRows x kColumns elements
constexpr int64_t kColumns = 64;  // hidden is a multiple

// Whether the machine has the instructions
bool supported();

// x_columns [hidden, kMaxTokens] is x transposed, and 0 beyond the tokens; begin and end are
// multiples of kColumns
void logits(const float* x_columns, const float* w, float* y, int64_t stride, int64_t tokens,
            int64_t hidden, int64_t begin, int64_t end);

// dx_blocks [hidden / kColumns, tokens rounded up to a multiple of kRows, kColumns] is dx in blocks
// of columns; begin and end are multiples of kColumns
void input_grad(const float* dy, int64_t stride, const float* w, float* dx_blocks, int64_t tokens,
                int64_t vocab, int64_t hidden, int64_t begin, int64_t end);

// x_blocks [hidden / kColumns, tokens, kColumns] is x in blocks of columns
void weight_grad(const float* dy, int64_t stride, const float* x_blocks, float* dw, int64_t tokens,
                 int64_t hidden, bool add, int64_t begin, int64_t end);

}  // namespace tp_ext::few_rows
