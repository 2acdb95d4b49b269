// Attention without a mask on the CPU, in fp32, by oneDNN's products of tiles.
//
// [Note: products by the fastest library]

#pragma once

#include <tuple>

#include "types.h"

namespace tp_ext {

// Whether oneDNN multiplies tiles here: the processor has AVX-512
bool has_tiled_attention_cpu();

// y = softmax(scale q k^T) v and lse [batch, heads, queries], the logarithm of the sums: q [batch,
// heads, queries, width], k and v with as many heads or fewer, v and y with v_width. causal: as many
// keys as queries, each query's up to its own. y's memory has heads behind tokens, as torch's.
std::tuple<Tensor, Tensor> tiled_attention_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                               double scale, bool causal);
// dq, dk and dv
std::tuple<Tensor, Tensor, Tensor> tiled_attention_backward_cpu(const Tensor& dy, const Tensor& q,
                                                                const Tensor& k, const Tensor& v,
                                                                const Tensor& y, const Tensor& lse,
                                                                double scale, bool causal);

}  // namespace tp_ext
