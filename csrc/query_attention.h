// Attention of a few queries to the keys and values of a cache, on the CPU.

#pragma once

#include "types.h"

namespace tp_ext {

// Up to 8 rows it is 1.2 to 7 times as fast as torch's, at 12 slower with wide heads: more rows are
// products of matrices, for a GEMM
constexpr int64_t kMostQueries = 8;

// Whether query_attention_cpu takes them: fp32, fp64 or bf16 with rows of whole vectors, and as many
// heads in k as in q. What it does not take is torch's, or torch says what is wrong
bool few_queries(const Tensor& q, const Tensor& k, const Tensor& v);

// y = softmax(scale q k^T) v: q [batch, heads, rows, width], k [batch, heads, keys, width], v and y
// with v_width. Reads each key and value once, from memory. In cpu/query_attention.cpp.
Tensor query_attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v, double scale);

}  // namespace tp_ext
