// GEMMs in pieces of their rows, so that the communication of one piece runs beside the GEMM of
// another. Eager only; the formulas of linear.cpp, the same values up to how the GEMM is blocked.
//
//   gather_linear          gather x in chunks; own rows' GEMM first, then each chunk that has come
//   gather_mm              the same without bias, and keeps what was gathered if asked to
//   linear_reduce_scatter  a chunk of each rank's rows; its summing runs under the next one's GEMM
//   linear_all_reduce      a chunk of all rows, summed in place under the next one's GEMM
//
// At most two chunks are under way, beside the one that is computed with. Every one of them is
// waited for, by the destructor of its Pending if an exception passes.

#pragma once

#include <ATen/core/Tensor.h>
#include <optional>
#include <string>
#include <utility>

#include "comm/split.h"

namespace tp_ext {

// All dims but the last as one
at::Tensor as_rows(const at::Tensor& x);

// Into how many chunks the tokens of all ranks are cut if `chunks` are asked for: fewer if they are
// few, one where somebody watches the operators. The same on every rank.
int64_t chunks_of(const at::Tensor& x, const c10::SymInt& tokens, int64_t chunks);

// (concatenation of the ranks' x) weight^T + bias; x [tokens, .., in], weight [out, in]
at::Tensor gather_linear(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const std::string& group,
                         const Split& tokens, int64_t chunks);

// The concatenation of the ranks' dy, times weight [out, in]; and the concatenation itself, if kept
std::pair<at::Tensor, at::Tensor> gather_mm(const at::Tensor& dy, const at::Tensor& weight,
                                            const std::string& group, const Split& tokens,
                                            int64_t chunks, bool keep);

// Own tokens of the sum over the ranks of x weight^T
at::Tensor linear_reduce_scatter(const at::Tensor& x, const at::Tensor& weight,
                                 const std::string& group, const Split& tokens, int64_t chunks);

// The sum over the ranks of x weight^T
at::Tensor linear_all_reduce(const at::Tensor& x, const at::Tensor& weight,
                             const std::string& group, int64_t chunks);

}  // namespace tp_ext
