// The layers, as torch::nn::Modules. Weights of the same seed, outputs and gradients have the bits
// of the Python layers of the same names.

#pragma once

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "tp_ext/export.h"
#include "tp_ext/functions.h"
#include "tp_ext/group.h"

namespace tp_ext {

// Not the distributions of the kernels, which have the same names
inline namespace initialisers {

/// Initialiser: uniform on [low, high).
struct Uniform {
  Uniform(double low, double high) : low(low), high(high) {}
  double low, high;
};

/// Initialiser: normal with this standard deviation, and mean 0 unless it is given.
struct Normal {
  explicit Normal(double std) : std(std) {}
  Normal(double mean, double std) : mean(mean), std(std) {}
  double mean = 0.0, std = 1.0;
};

/// Initialiser: normal, given that the value lies within [low, high].
struct TruncatedNormal {
  double mean = 0.0, std = 1.0, low = -2.0, high = 2.0;
};

/// Initialiser: one value; draws nothing.
struct Constant {
  double value;
};

}  // namespace initialisers

using Init = std::variant<Uniform, Normal, TruncatedNormal, Constant>;

/// A part of a dim that is sharded on its own: q, k or v; gate or up.
struct Part {
  int64_t size;        ///< elements in the full tensor
  int64_t unit = 1;    ///< elements that stay together
  int64_t copies = 1;  ///< neighbouring ranks that hold the same elements
  int64_t groups = 1;  ///< equal groups, each sharded over its own neighbouring ranks
};

namespace nn {

/// How a parameter is sharded: the parts of a dim, one after the other. No parts: it is replicated.
struct Sharding {
  int64_t dim = 0;
  std::vector<Part> parts{};
};

/// The base of the layers: parameters that are shards of full ones, and their initialisers.
class TP_EXT_API ParallelModule : public torch::nn::Module {
 public:
  struct Parameter {
    Sharding sharding;
    std::vector<int64_t> full_shape;
    Init init = Constant{0.0};
  };

  const ParallelGroup& tp_group() const { return group_; }
  bool sequence_parallel() const { return sequence_parallel_; }
  /// Draws all parameters anew, as after manual_seed. Communicates: 8 bytes for each.
  void reset_parameters();
  /// How each parameter of this module is sharded, by its name.
  const std::map<std::string, Parameter>& layout() const { return layout_; }

 protected:
  ParallelModule(std::string name, ParallelGroup group, bool sequence_parallel);

  /// Registers this rank's shard of a parameter, initialised.
  at::Tensor add_parameter(const std::string& name, std::vector<int64_t> full_shape, Init init,
                           Sharding sharding, const at::TensorOptions& options);
  virtual void after_init(const std::string& name, const at::Tensor& shard);
  /// The parameter as forward uses it: its gradient will be complete on every rank.
  at::Tensor used(const std::string& name, const at::Tensor& parameter) const;
  /// Each rank's number of tokens under sequence parallelism; empty: all equal to this rank's.
  std::vector<c10::SymInt> token_sizes(std::optional<int64_t> total_tokens, const at::Tensor& x,
                                       bool whole) const;

 private:
  void reset_parameter(const std::string& name);

  ParallelGroup group_;
  bool sequence_parallel_;
  std::map<std::string, Parameter> layout_;
  std::vector<std::string> order_;  // of registration, which is that of the draws
};

/// Options that all linear layers have.
#define TP_EXT_LAYER_ARGS                                                             \
  TORCH_ARG(ParallelGroup, group);            /* of the ranks; default: one rank */   \
  TORCH_ARG(bool, sequence_parallel) = false; /* x is sharded on dim 0, the tokens */ \
  TORCH_ARG(std::optional<at::ScalarType>, dtype);                                    \
  TORCH_ARG(std::optional<at::Device>, device)

struct ColumnParallelLinearOptions {
  ColumnParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(std::vector<Part>, parts);     // of the output features; default: one
  TORCH_ARG(int64_t, unit) = 1;            // without parts, features that stay together
  TORCH_ARG(bool, gather_output) = false;  // returns all output features
  TORCH_ARG(std::optional<Init>, init);    // of the weight; default and bias as torch's Linear
  TP_EXT_LAYER_ARGS;
};

/// Linear layer y_local = x W_local^T + b_local with sharded output features.
///
/// x [.., in] replicated (sequence_parallel: [tokens_local, .., in]) -> y [.., out_local], with
/// gather_output [.., out]. weight [out_local, in], bias [out_local]. total_tokens: under
/// sequence_parallel the length of dim 0 over all ranks, if their number does not divide it.
///
/// Communicates: backward, one all-reduce of dx. sequence_parallel: forward, one all-gather of x;
/// backward, one reduce-scatter and one all-gather. Errors: c10::ValueError for sizes that do not
/// fit.
class TP_EXT_API ColumnParallelLinearImpl : public ParallelModule {
 public:
  explicit ColumnParallelLinearImpl(ColumnParallelLinearOptions options);
  at::Tensor forward(const at::Tensor& x, std::optional<int64_t> total_tokens = {});
  /// y without the bias, and the bias as it enters sharded work; undefined without one.
  std::pair<at::Tensor, at::Tensor> forward_without_bias(const at::Tensor& x,
                                                         std::optional<int64_t> total_tokens = {});

  ColumnParallelLinearOptions options;
  at::Tensor weight, bias;

 private:
  at::Tensor product(const at::Tensor& x, std::optional<int64_t> total_tokens,
                     const at::Tensor& added);
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  RowParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(std::vector<Part>, parts);   // of the input features; default: one
  TORCH_ARG(int64_t, unit) = 1;          // without parts, features that stay together
  TORCH_ARG(std::optional<Init>, init);  // of the weight; default and bias as torch's Linear
  TP_EXT_LAYER_ARGS;
};

/// Linear layer y = sum over the ranks of x_local W_local^T, + b, with sharded input features.
///
/// x [.., in_local] -> y [.., out] replicated (sequence_parallel: [tokens_local, .., out]). weight
/// [out, in_local], bias [out]. total_tokens: as of ColumnParallelLinear.
///
/// Communicates: forward, one all-reduce of y. sequence_parallel: forward, one reduce-scatter;
/// backward, one all-gather, and of the bias an all-reduce.
class TP_EXT_API RowParallelLinearImpl : public ParallelModule {
 public:
  explicit RowParallelLinearImpl(RowParallelLinearOptions options);
  at::Tensor forward(const at::Tensor& x, std::optional<int64_t> total_tokens = {});

  RowParallelLinearOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(RowParallelLinear);

struct VocabParallelEmbeddingOptions {
  VocabParallelEmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}
  TORCH_ARG(int64_t, num_embeddings);
  TORCH_ARG(int64_t, embedding_dim);
  TORCH_ARG(std::optional<int64_t>, padding_idx);  // this row begins as zero and gets no gradient
  TORCH_ARG(std::optional<Init>, init);            // default N(0, 1)
  TP_EXT_LAYER_ARGS;
};

/// Embedding y = weight[ids]: each rank looks up its own rows, the ranks add.
///
/// ids of any shape, integers, the same on all ranks -> y [*ids.shape, dim] (sequence_parallel:
/// [tokens_local, dim], ids flattened). weight [vocab_local, dim].
///
/// Communicates: forward, one all-reduce of y (sequence_parallel: a reduce-scatter, and backward an
/// all-gather). Errors: c10::ValueError for fewer rows than ranks; c10::IndexError for an id
/// outside of the vocabulary.
class TP_EXT_API VocabParallelEmbeddingImpl : public ParallelModule {
 public:
  explicit VocabParallelEmbeddingImpl(VocabParallelEmbeddingOptions options);
  at::Tensor forward(const at::Tensor& ids);

  VocabParallelEmbeddingOptions options;
  at::Tensor weight;

 private:
  void after_init(const std::string& name, const at::Tensor& shard) override;
};
TORCH_MODULE(VocabParallelEmbedding);

struct VocabParallelLMHeadOptions {
  VocabParallelLMHeadOptions(int64_t hidden_size, int64_t vocab_size)
      : hidden_size_(hidden_size), vocab_size_(vocab_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, vocab_size);
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(std::optional<Init>, init);  // of the weight; default and bias as torch's Linear
  TP_EXT_LAYER_ARGS;
};

/// Output head logits_local = x weight^T (+ bias), with a sharded vocabulary and logits that are
/// never gathered.
///
/// x [.., hidden] (sequence_parallel: [tokens_local, hidden]) -> [.., vocab_local]. Communicates as
/// ColumnParallelLinear; loss, argmax and sample as the functions of vocab_parallel_*.
class TP_EXT_API VocabParallelLMHeadImpl : public ParallelModule {
 public:
  explicit VocabParallelLMHeadImpl(VocabParallelLMHeadOptions options);
  at::Tensor forward(const at::Tensor& x, std::optional<int64_t> total_tokens = {});
  /// vocab_parallel_cross_entropy of the logits of x, which exist for a chunk of tokens at a time;
  /// targets [..] of all tokens. The vocabulary is the head's.
  at::Tensor loss(const at::Tensor& x, const at::Tensor& targets,
                  const CrossEntropyOptions& loss_options = {},
                  std::optional<int64_t> total_tokens = {});
  at::Tensor argmax(const at::Tensor& x, std::optional<int64_t> total_tokens = {});
  at::Tensor sample(const at::Tensor& x, const SampleOptions& sample_options = {},
                    std::optional<int64_t> total_tokens = {});

  VocabParallelLMHeadOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(VocabParallelLMHead);

struct ParallelMLPOptions {
  ParallelMLPOptions(int64_t hidden_size, int64_t ffn_hidden_size)
      : hidden_size_(hidden_size), ffn_hidden_size_(ffn_hidden_size) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, ffn_hidden_size);
  TORCH_ARG(std::string, activation) = "gelu";  // gelu_tanh, relu, silu; gated: swiglu, geglu
  TORCH_ARG(bool, bias) = true;                 // in both linears
  TORCH_ARG(std::optional<Init>, init);         // of both weights
  TP_EXT_LAYER_ARGS;
};

/// Feed-forward block y = act(x W_up^T + b_up) W_down^T + b_down; gated: y = (act(x W_gate^T +
/// b_gate) * (x W_up^T + b_up)) W_down^T + b_down.
///
/// x [.., hidden] -> y the same (sequence_parallel: both [tokens_local, .., hidden]). up.weight is
/// [ffn_local, hidden], gated [2 ffn_local, hidden] (gate | up); down.weight [hidden, ffn_local].
///
/// Communicates: one all-reduce forward, one backward; sequence_parallel: an all-gather and a
/// reduce-scatter each way. Errors: c10::ValueError for an unknown activation.
class TP_EXT_API ParallelMLPImpl : public torch::nn::Module {
 public:
  explicit ParallelMLPImpl(ParallelMLPOptions options);
  at::Tensor forward(const at::Tensor& x, std::optional<int64_t> total_tokens = {});

  ParallelMLPOptions options;
  ColumnParallelLinear up{nullptr};
  RowParallelLinear down{nullptr};
};
TORCH_MODULE(ParallelMLP);

struct ParallelAttentionOptions {
  ParallelAttentionOptions(int64_t hidden_size, int64_t num_heads)
      : hidden_size_(hidden_size), num_heads_(num_heads) {}
  TORCH_ARG(int64_t, hidden_size);
  TORCH_ARG(int64_t, num_heads);
  TORCH_ARG(std::optional<int64_t>, num_kv_heads);  // default num_heads; fewer: grouped queries
  TORCH_ARG(std::optional<int64_t>, head_dim);      // default hidden_size / num_heads
  TORCH_ARG(bool, bias) = true;                     // in both linears
  TORCH_ARG(std::optional<bool>, qkv_bias);         // overrides it for one
  TORCH_ARG(std::optional<bool>, out_bias);
  TORCH_ARG(bool, causal) = true;           // a token attends to itself and those before it
  TORCH_ARG(std::optional<double>, rope);   // the base of rotary embeddings; default: none
  TORCH_ARG(std::optional<double>, scale);  // of the scores; default head_dim ** -0.5
  TORCH_ARG(std::optional<Init>, init);
  TP_EXT_LAYER_ARGS;
};

/// Of a call of ParallelAttention.
struct AttentionArguments {
  std::optional<int64_t> batch_size = {};    ///< x is this many sequences, one after the other
  std::optional<int64_t> total_tokens = {};  ///< as of ColumnParallelLinear
};

/// Attention softmax(scale q k^T) v per head, between a column linear (q | k | v) and a row linear,
/// with heads sharded over the ranks.
///
/// x [batch, seq, hidden], or [tokens, hidden] with batch_size (sequence_parallel: [tokens_local,
/// hidden], always with it) -> y of x's shape. qkv.weight holds this rank's rows of q, then k, then
/// v; out.weight [hidden, q_local].
///
/// Communicates: one all-reduce forward, one backward; sequence_parallel: an all-gather and a
/// reduce-scatter each way. With fewer KV heads than ranks, backward, one all-reduce of the
/// gradient of k's and v's weights, and of their bias. Errors: c10::ValueError for heads that
/// cannot be shared out, and shapes that do not fit.
class TP_EXT_API ParallelAttentionImpl : public torch::nn::Module {
 public:
  explicit ParallelAttentionImpl(ParallelAttentionOptions options);
  at::Tensor forward(const at::Tensor& x, const AttentionArguments& arguments = {});

  ParallelAttentionOptions options;
  ColumnParallelLinear qkv{nullptr};
  RowParallelLinear out{nullptr};

 private:
  int64_t head_dim_, heads_local_, kv_heads_local_;
};
TORCH_MODULE(ParallelAttention);

struct RMSNormOptions {
  RMSNormOptions(int64_t normalized_shape) : normalized_shape_(normalized_shape) {}
  TORCH_ARG(int64_t, normalized_shape);   // of the last dim
  TORCH_ARG(std::optional<double>, eps);  // default: the epsilon of the dtype of the statistics
  TORCH_ARG(bool, elementwise_affine) = true;
  TP_EXT_LAYER_ARGS;
};

/// RMS norm y = x / sqrt(mean(x^2) + eps) * weight, over the last dim. With a residual: total = x +
/// residual, y = norm(total), in one pass. Statistics in fp32 (fp64 for fp64). Communicates: under
/// sequence_parallel, backward, one all-reduce of the weight's gradient.
class TP_EXT_API RMSNormImpl : public ParallelModule {
 public:
  explicit RMSNormImpl(RMSNormOptions options);
  at::Tensor forward(const at::Tensor& x);
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& residual);

  RMSNormOptions options;
  at::Tensor weight;

 private:
  double epsilon(const at::Tensor& x) const;
};
TORCH_MODULE(RMSNorm);

struct LayerNormOptions {
  LayerNormOptions(int64_t normalized_shape) : normalized_shape_(normalized_shape) {}
  TORCH_ARG(int64_t, normalized_shape);  // of the last dim
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(bool, elementwise_affine) = true;
  TORCH_ARG(bool, bias) = true;
  TP_EXT_LAYER_ARGS;
};

/// Layer norm y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dim; otherwise
/// as RMSNorm.
class TP_EXT_API LayerNormImpl : public ParallelModule {
 public:
  explicit LayerNormImpl(LayerNormOptions options);
  at::Tensor forward(const at::Tensor& x);
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& residual);

  LayerNormOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(LayerNorm);

struct DropoutOptions {
  DropoutOptions(double p = 0.5) : p_(p) {}
  TORCH_ARG(double, p);  // the probability of dropping an element
  TORCH_ARG(ParallelGroup, group);
  TORCH_ARG(bool, sequence_parallel) = false;
};

/// Dropout with the masks of the unsharded model: y = residual + mask * x / (1 - p). The mask is a
/// function of a fresh seed and of each element's index in the full tensor. Communicates: the
/// seed, 8 bytes. Errors: c10::ValueError for a p outside of [0, 1].
class TP_EXT_API DropoutImpl : public ParallelModule {
 public:
  explicit DropoutImpl(DropoutOptions options = {});
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& residual = {},
                     std::optional<int64_t> total_tokens = {});

  DropoutOptions options;
};
TORCH_MODULE(Dropout);

#undef TP_EXT_LAYER_ARGS

}  // namespace nn
}  // namespace tp_ext
