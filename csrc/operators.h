// The C++ types of the operators that C++ or csrc/python/direct_call.cpp calls, each declared once.
// Schemas: library.cpp.
//
// A public operator is a function, defined in autograd/. A primitive (leading underscore) is a type
// only: cpu/ and cuda/ define one function each, which the dispatcher compares with it.

#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "types.h"

// The typed handle of an operator declared below: TP_OP(_rope).call(x, ..). A lookup takes a lock;
// where a call must be fast: static const auto op = TP_OP(_rope);
#define TP_OP(name) ::tp_ext::find_op<decltype(::tp_ext::name)>("tp_ext::" #name)

namespace tp_ext {

// Regions
Tensor copy_to_region(const Tensor& x, const std::string& group);
Tensor reduce_from_region(const Tensor& x, const std::string& group);
Tensor scatter_to_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes);
Tensor gather_from_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes);
Tensor all_gather_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes);
Tensor reduce_scatter_region(const Tensor& x, const std::string& group, int64_t dim, Sizes sizes);
Tensor all_to_all_region(const Tensor& x, const std::string& group, int64_t split_dim,
                         int64_t concat_dim, Sizes split_sizes, Sizes concat_sizes);
Tensor copy_replicas_to_region(const Tensor& x, const std::string& group,
                               at::IntArrayRef local_starts, at::IntArrayRef lengths,
                               at::IntArrayRef full_starts, int64_t full_size);
Tensor reduce_replicas_from_region(const Tensor& x, const std::string& group,
                                   at::IntArrayRef local_starts, at::IntArrayRef lengths,
                                   at::IntArrayRef full_starts, int64_t full_size);
Tensor _pack_shards(const Tensor& x, int64_t dim, c10::SymIntArrayRef sizes, bool padded);
Tensor _unpack_shards(const Tensor& blocks, int64_t dim, c10::SymIntArrayRef sizes, Sizes shape);

// Products of matrices sharded on both dims
Tensor matmul_2d(const Tensor& a, const Tensor& b, const std::string& rows,
                 const std::string& columns, std::optional<int64_t> k, bool summa);

// Linear layers
Tensor linear_2d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const std::string& group, const std::string& weight_group, c10::SymInt weight_size,
                 bool row, const std::string& activations, Sizes sizes, bool reshard_after_forward);
Tensor column_parallel_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              const std::string& group, bool sequence_parallel, Sizes sizes,
                              const OptionalTensor& main_grad, int64_t overlap_chunks);
Tensor row_parallel_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const std::string& group, bool sequence_parallel, Sizes sizes,
                           const OptionalTensor& main_grad, int64_t overlap_chunks,
                           bool sum_bias_grad);
std::tuple<Tensor, Tensor> all_to_all_linear(const Tensor& rows, const std::string& group,
                                             Sizes split_sizes, Sizes concat_sizes, const Tensor& x,
                                             const Tensor& weight, const OptionalTensor& main_grad);
Tensor grouped_linear(const Tensor& x, const Tensor& weight, at::IntArrayRef counts,
                      const OptionalTensor& main_grad, double grad_scale,
                      std::optional<bool> grouped_gemm);
Tensor block_column_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                           const std::string& group, bool sequence_parallel, Sizes sizes,
                           at::IntArrayRef blocks, at::IntArrayRef segments);
Tensor block_row_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        const std::string& group, bool sequence_parallel, at::IntArrayRef blocks,
                        at::IntArrayRef segments);
std::vector<Tensor> block_copies(const Tensor& x, const std::string& group, at::IntArrayRef blocks);
Tensor block_sum(const Tensor& nodes, const std::string& group, at::IntArrayRef blocks,
                 bool scatter);
Tensor block_bmm(const Tensor& a, const Tensor& b);
Tensor block_softmax(const Tensor& x, bool blind);
Tensor block_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                       const OptionalTensor& mask, const OptionalTensor& padding,
                       at::IntArrayRef kv_heads, bool causal, std::optional<double> scale,
                       std::optional<int64_t> window, std::optional<double> softcap);
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale,
                 bool causal);
Tensor float8_column_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const std::string& group, bool sequence_parallel, Sizes sizes,
                            bool by_row, at::ScalarType forward, at::ScalarType gradient,
                            bool communicate, bool sum_input_grad);
Tensor float8_row_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         const std::string& group, bool sequence_parallel, Sizes sizes, bool by_row,
                         at::ScalarType forward, at::ScalarType gradient, bool communicate,
                         bool sum_bias_grad);
Tensor float8_grouped_linear(const Tensor& x, const Tensor& weight, at::IntArrayRef counts,
                             const std::string& group, bool inputs, bool by_row,
                             at::ScalarType forward, at::ScalarType gradient, double grad_scale);
Tensor _finite_amax(const Tensor& x, std::optional<int64_t> dim);
std::tuple<Tensor, Tensor> _float8_quantize(const Tensor& x, const Tensor& amax,
                                            at::ScalarType dtype);
Tensor _dequantize_low_bits(const Tensor& packed, const Tensor& scale, std::optional<int64_t> block,
                            std::optional<at::ScalarType> dtype);
Tensor _low_bits_product(const Tensor& x, const Tensor& packed, const Tensor& scale,
                         std::optional<int64_t> block);
Tensor _column_sums(const Tensor& x, at::IntArrayRef lengths);
Tensor _tree_total(const Tensor& nodes, at::IntArrayRef joins, at::ScalarType dtype);
void _add_weight_grad_(const Tensor& main_grad, const Tensor& dy, const Tensor& x);
Tensor accumulate_grad_into(const Tensor& x, const Tensor& main_grad);

// Activations
Tensor bias_act(const Tensor& x, const OptionalTensor& bias, std::string_view activation);
Tensor _bias_act_fwd(const Tensor& x, const OptionalTensor& bias, std::string_view activation);
std::tuple<Tensor, Tensor> _bias_act_bwd(const Tensor& grad, const Tensor& x,
                                         const OptionalTensor& bias, std::string_view activation);
Tensor gated_act(const Tensor& x, const OptionalTensor& bias, std::string_view activation);
Tensor _gated_act_fwd(const Tensor& x, const OptionalTensor& bias, std::string_view activation);
std::tuple<Tensor, Tensor> _gated_act_bwd(const Tensor& grad, const Tensor& x,
                                          const OptionalTensor& bias, std::string_view activation);

// Norms
Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps);
std::tuple<Tensor, Tensor> rms_norm_residual(const Tensor& x, const Tensor& residual,
                                             const OptionalTensor& weight, double eps);
std::tuple<Tensor, Tensor> all_reduce_rms_norm(const Tensor& x, const Tensor& residual,
                                               const OptionalTensor& weight, double eps,
                                               const std::string& group);
std::tuple<Tensor, Tensor> _rms_norm_fwd(const Tensor& x, const OptionalTensor& weight, double eps);
std::tuple<Tensor, Tensor, Tensor> _rms_norm_residual_fwd(const Tensor& x, const Tensor& residual,
                                                          const OptionalTensor& weight, double eps);
std::tuple<Tensor, Tensor> _rms_norm_bwd(const Tensor& grad, const Tensor& x,
                                         const OptionalTensor& weight, const Tensor& rstd,
                                         const OptionalTensor& grad_sum,
                                         std::array<bool, 2> output_mask);
Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps);
std::tuple<Tensor, Tensor> layer_norm_residual(const Tensor& x, const Tensor& residual,
                                               const OptionalTensor& weight,
                                               const OptionalTensor& bias, double eps);
std::tuple<Tensor, Tensor, Tensor> _layer_norm_fwd(const Tensor& x, const OptionalTensor& weight,
                                                   const OptionalTensor& bias, double eps);
std::tuple<Tensor, Tensor, Tensor, Tensor> _layer_norm_residual_fwd(const Tensor& x,
                                                                    const Tensor& residual,
                                                                    const OptionalTensor& weight,
                                                                    const OptionalTensor& bias,
                                                                    double eps);
std::tuple<Tensor, Tensor, Tensor> _layer_norm_bwd(const Tensor& grad, const Tensor& x,
                                                   const OptionalTensor& weight, const Tensor& mean,
                                                   const Tensor& rstd,
                                                   const OptionalTensor& grad_sum,
                                                   std::array<bool, 3> output_mask);

Tensor sharded_rms_norm(const Tensor& x, const OptionalTensor& weight, double eps,
                        const std::string& group, int64_t n);
Tensor sharded_layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                          double eps, const std::string& group, int64_t n);

// Rotary embedding
Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
            const OptionalTensor& positions);
Tensor _rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse,
             const OptionalTensor& positions);

// Randomness by global index
Tensor bias_dropout_residual(const Tensor& x, const OptionalTensor& bias,
                             const OptionalTensor& residual, const Tensor& seed, double p,
                             c10::SymInt local_inner, c10::SymInt full_inner, c10::SymInt offset);
Tensor _bias_dropout_residual_fwd(const Tensor& x, const OptionalTensor& bias,
                                  const OptionalTensor& residual, const Tensor& seed, double p,
                                  c10::SymInt local_inner, c10::SymInt full_inner,
                                  c10::SymInt offset);
Tensor _dropout_bwd(const Tensor& grad, const Tensor& seed, double p, c10::SymInt local_inner,
                    c10::SymInt full_inner, c10::SymInt offset);
std::tuple<Tensor, Tensor> _bias_dropout_bwd(const Tensor& grad, const Tensor& seed, double p,
                                             c10::SymInt local_inner, c10::SymInt full_inner,
                                             c10::SymInt offset);

// Vocabulary
Tensor vocab_parallel_embedding(const Tensor& ids, const Tensor& weight, const std::string& group,
                                c10::SymInt vocab_start, c10::SymInt vocab_local,
                                c10::SymInt vocab_size, bool sequence_parallel, Sizes sizes);
Tensor _vocab_embedding_fwd(const Tensor& weight, const Tensor& ids, c10::SymInt vocab_start,
                            c10::SymInt vocab_local, c10::SymInt vocab_size);
Tensor _vocab_embedding_bwd(const Tensor& grad, const Tensor& ids, c10::SymInt num_rows,
                            c10::SymInt vocab_start, c10::SymInt vocab_local);
Tensor vocab_parallel_argmax(const Tensor& logits, const std::string& group,
                             c10::SymInt vocab_start, c10::SymInt vocab_local,
                             c10::SymInt vocab_size, Sizes sizes);
Tensor vocab_parallel_sample(const Tensor& logits, const std::string& group,
                             c10::SymInt vocab_start, c10::SymInt vocab_local,
                             c10::SymInt vocab_size, double temperature,
                             std::optional<int64_t> top_k, std::optional<double> top_p,
                             Sizes sizes);
Tensor _vocab_ce_stats(const Tensor& logits, const Tensor& target, c10::SymInt vocab_start,
                       c10::SymInt vocab_local, c10::SymInt vocab_size, int64_t ignore_index,
                       bool shard_row, bool vocab_size_given);
std::tuple<Tensor, Tensor> _vocab_ce_loss(const Tensor& stats, const Tensor& target,
                                          c10::SymInt vocab_size, int64_t ignore_index,
                                          double label_smoothing, double z_loss);
Tensor _vocab_ce_bwd(const Tensor& grad, const Tensor& logits, const Tensor& target,
                     const Tensor& lse, c10::SymInt vocab_start, c10::SymInt vocab_local,
                     c10::SymInt vocab_size, int64_t ignore_index, double label_smoothing,
                     double z_loss);
void _vocab_ce_bwd_(const Tensor& grad, const Tensor& logits, const Tensor& target,
                    const Tensor& lse, c10::SymInt vocab_start, c10::SymInt vocab_local,
                    c10::SymInt vocab_size, int64_t ignore_index, double label_smoothing,
                    double z_loss);
void _vocab_chunk_logits_(const Tensor& logits, const Tensor& x, const Tensor& weight,
                          const OptionalTensor& bias);
Tensor _vocab_chunk_input_grad(const Tensor& dlogits, const Tensor& weight);
void _vocab_chunk_weight_grad_(const Tensor& dw, const Tensor& dlogits, const Tensor& x, bool add);

// Mixture of experts
Tensor moe_permute(const Tensor& x, const Tensor& rows, c10::SymInt num_rows,
                   const OptionalTensor& weights);
Tensor _moe_permute(const Tensor& x, const Tensor& rows, c10::SymInt num_rows,
                    const OptionalTensor& weights);
Tensor moe_unpermute(const Tensor& y, const Tensor& rows, const OptionalTensor& weights);
Tensor _moe_unpermute(const Tensor& y, const Tensor& rows, const OptionalTensor& weights);
std::tuple<Tensor, Tensor> _moe_unpermute_bwd(const Tensor& grad, const Tensor& y,
                                              const Tensor& rows, const Tensor& weights);
Tensor moe_dot(const Tensor& x, const Tensor& y, const Tensor& rows);
Tensor _moe_dot(const Tensor& x, const Tensor& y, const Tensor& rows);

}  // namespace tp_ext
