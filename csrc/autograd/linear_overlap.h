// Linears split into chunks of rows, so that the communication of one chunk overlaps the GEMM of
// another. Eager only; the formulas of linear.cpp, equal up to the blocking of the GEMM.
//
//   gather_linear          gathers x in chunks; GEMM of this rank's rows first, then of each chunk
//   gather_mm              the same without bias; optionally returns the gathered dy
//   linear_reduce_scatter  a chunk of each rank's rows; its sum overlaps the next chunk's GEMM
//   linear_all_reduce      a chunk of all rows; its sum, in place, overlaps the next chunk's GEMM
//
// At most two collectives are in flight besides the chunk being computed. Each is waited for, by
// the destructor of its Pending if an exception is thrown.
//
// [Note: overlapped chunks are collectives of c10d]

#pragma once

#include <ATen/core/Tensor.h>
#include <optional>
#include <string>
#include <utility>

#include "comm/split.h"

namespace tp_ext {

// All dims but the last flattened into one
at::Tensor as_rows(const at::Tensor& x);

// dy weight, and dy^T x, of y = x weight^T
at::Tensor input_grad(const at::Tensor& dy, const at::Tensor& weight);
at::Tensor weight_grad(const at::Tensor& dy, const at::Tensor& x);

// Number of chunks for the tokens of all ranks, given the requested `chunks`: fewer for few tokens,
// 1 if the call is traced. The same on every rank.
int64_t chunks_of(const at::Tensor& x, const c10::SymInt& tokens, int64_t chunks);

// (concatenation of the ranks' x) weight^T + bias; x [tokens, .., in], weight [out, in]
at::Tensor gather_linear(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const std::string& group,
                         const Split& tokens, int64_t chunks);

// The concatenation of the ranks' dy, times weight [out, in]; and, if `keep`, the concatenation
std::pair<at::Tensor, at::Tensor> gather_mm(const at::Tensor& dy, const at::Tensor& weight,
                                            const std::string& group, const Split& tokens,
                                            int64_t chunks, bool keep);

// This rank's tokens of the sum over the ranks of x weight^T
at::Tensor linear_reduce_scatter(const at::Tensor& x, const at::Tensor& weight,
                                 const std::string& group, const Split& tokens, int64_t chunks);

// The sum over the ranks of x weight^T
at::Tensor linear_all_reduce(const at::Tensor& x, const at::Tensor& weight,
                             const std::string& group, int64_t chunks);

}  // namespace tp_ext
