// Linear layers, norms, dropout, embedding and head: parameters, and calls of operators.

#include "tp_ext/nn.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "api/sharding.h"
#include "comm/split.h"
#include "operators.h"

namespace tp_ext::nn {
namespace {

void check_least_one(const char* name, int64_t value) {
  TORCH_CHECK_VALUE(value >= 1, name, ": ", value, " must be at least 1");
}

// That of nn.Linear, weight and bias
Init linear_init(int64_t fan_in) {
  const double bound = 1 / std::sqrt(static_cast<double>(fan_in));
  return Uniform(-bound, bound);
}

template <typename Options>
at::TensorOptions tensor_options(const Options& options) {
  return at::TensorOptions().dtype(options.dtype()).device(options.device());
}

Sharding features(int64_t dim, int64_t size, const std::vector<Part>& parts, int64_t unit,
                  const char* name) {
  check_least_one(name, size);
  if (parts.empty()) return {dim, {{size, unit}}};
  Sharding sharding{dim, parts};
  TORCH_CHECK_VALUE(unit == 1, "unit: ", unit, " must be given in each Part when parts are given");
  TORCH_CHECK_VALUE(full_size(sharding) == size, "parts: their sum, ", full_size(sharding),
                    ", must be ", name, " = ", size);
  return sharding;
}

OptionalTensor given(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

Sizes sizes_or_none(const std::vector<c10::SymInt>& sizes) {
  return sizes.empty() ? Sizes() : Sizes(sizes);
}

}  // namespace

ParallelModule::ParallelModule(std::string name, ParallelGroup group, bool sequence_parallel)
    : Module(std::move(name)), group_(std::move(group)), sequence_parallel_(sequence_parallel) {}

Tensor ParallelModule::add_parameter(const std::string& name, std::vector<int64_t> full_shape,
                                     Init init, Sharding sharding,
                                     const at::TensorOptions& options) {
  auto shape = full_shape;
  if (!sharding.parts.empty())
    shape[static_cast<size_t>(sharding.dim)] = local_size(sharding, group_);
  const Tensor parameter = register_parameter(name, at::empty(shape, options));
  layout_[name] = {std::move(sharding), std::move(full_shape), init};
  order_.push_back(name);
  reset_parameter(name);
  return parameter;
}

void ParallelModule::reset_parameters() {
  for (const std::string& name : order_) reset_parameter(name);
}

void ParallelModule::reset_parameter(const std::string& name) {
  const at::NoGradGuard no_grad;
  const Tensor shard = named_parameters(false)[name];
  initialise(shard, layout_.at(name), group_);
  after_init(name, shard);
}

void ParallelModule::after_init(const std::string&, const Tensor&) {}

Tensor ParallelModule::used(const std::string& name, const Tensor& parameter) const {
  if (!parameter.defined() || group_.size == 1) return parameter;
  const Sharding& sharding = layout_.at(name).sharding;
  if (sharding.parts.empty())
    return sequence_parallel_ ? tp_ext::copy_to_region(parameter, group_.name) : parameter;
  std::vector<int64_t> local_starts, lengths, full_starts;
  int64_t full = 0, part_index = 0;
  for (const Share& share : shares(sharding, group_)) {
    const Part& part = sharding.parts[static_cast<size_t>(part_index++)];
    if (part.copies == 1) continue;
    local_starts.push_back(share.start);
    lengths.push_back(share.length);
    full_starts.push_back(full + span(part, group_).first);
    full += part.size;
  }
  if (lengths.empty()) return parameter;
  return tp_ext::copy_replicas_to_region(parameter, group_.name, local_starts, lengths, full_starts,
                                         full);
}

std::vector<c10::SymInt> ParallelModule::token_sizes(std::optional<int64_t> total_tokens,
                                                     const Tensor& x, bool whole) const {
  if (!sequence_parallel_ || group_.size == 1 || !total_tokens) return {};
  TORCH_CHECK_VALUE(*total_tokens >= 0, "total_tokens: ", *total_tokens, " must be at least 0");
  auto sizes = split_sizes(*total_tokens, group_.size);
  if (x.dim() > 0) {
    const auto own = whole ? *total_tokens : sizes[static_cast<size_t>(group_.rank)].expect_int();
    TORCH_CHECK_VALUE(x.size(0) == own, "total_tokens: ", *total_tokens,
                      " gives this rank an input of ", own, " rows, and dim 0 of it has ",
                      x.size(0));
  }
  return sizes;
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(ColumnParallelLinearOptions options_)
    : ParallelModule("ColumnParallelLinear", options_.group(), options_.sequence_parallel()),
      options(std::move(options_)) {
  const int64_t in = options.in_features(), out = options.out_features();
  check_least_one("in_features", in);
  const auto sharding = features(0, out, options.parts(), options.unit(), "out_features");
  const auto default_init = linear_init(in);
  weight = add_parameter("weight", {out, in}, options.init().value_or(default_init), sharding,
                         tensor_options(options));
  if (options.bias())
    bias = add_parameter("bias", {out}, default_init, sharding, tensor_options(options));
}

Tensor ColumnParallelLinearImpl::product(const Tensor& x, std::optional<int64_t> total_tokens,
                                         const Tensor& added) {
  static const auto op = TP_OP(column_parallel_linear);
  const auto sizes = token_sizes(total_tokens, x, false);
  return op.call(x, used("weight", weight), given(added), tp_group().name, sequence_parallel(),
                 sizes_or_none(sizes), std::nullopt, 1);
}

Tensor ColumnParallelLinearImpl::forward(const Tensor& x, std::optional<int64_t> total_tokens) {
  const Tensor y = product(x, total_tokens, used("bias", bias));
  if (!options.gather_output() || tp_group().size == 1) return y;
  return unshard(y, {-1, layout().at("weight").sharding.parts}, tp_group());
}

std::pair<Tensor, Tensor> ColumnParallelLinearImpl::forward_without_bias(
    const Tensor& x, std::optional<int64_t> total_tokens) {
  const Tensor entered = used("bias", bias);
  return {product(x, total_tokens, Tensor()), entered};
}

RowParallelLinearImpl::RowParallelLinearImpl(RowParallelLinearOptions options_)
    : ParallelModule("RowParallelLinear", options_.group(), options_.sequence_parallel()),
      options(std::move(options_)) {
  const int64_t in = options.in_features(), out = options.out_features();
  check_least_one("out_features", out);
  const auto sharding = features(1, in, options.parts(), options.unit(), "in_features");
  for (const Part& part : sharding.parts)
    TORCH_CHECK_VALUE(part.copies == 1, "parts: copies = ", part.copies,
                      " must be 1: the sum would count them twice");
  const auto default_init = linear_init(in);
  weight = add_parameter("weight", {out, in}, options.init().value_or(default_init), sharding,
                         tensor_options(options));
  if (options.bias())
    bias = add_parameter("bias", {out}, default_init, {}, tensor_options(options));
}

Tensor RowParallelLinearImpl::forward(const Tensor& x, std::optional<int64_t> total_tokens) {
  static const auto op = TP_OP(row_parallel_linear);
  const auto sizes = token_sizes(total_tokens, x, true);
  // The operator sums the gradient of the bias
  return op.call(x, weight, given(bias), tp_group().name, sequence_parallel(), sizes_or_none(sizes),
                 std::nullopt, 1, true);
}

namespace {

Sharding vocabulary(int64_t vocab_size, const ParallelGroup& group) {
  TORCH_CHECK_VALUE(vocab_size >= group.size, "vocab_size: ", vocab_size,
                    " must be at least the number of ranks, p = ", group.size);
  return {0, {{vocab_size}}};
}

}  // namespace

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(VocabParallelEmbeddingOptions options_)
    : ParallelModule("VocabParallelEmbedding", options_.group(), options_.sequence_parallel()),
      options(std::move(options_)) {
  const int64_t n = options.num_embeddings(), dim = options.embedding_dim();
  check_least_one("num_embeddings", n);
  check_least_one("embedding_dim", dim);
  if (options.padding_idx()) {
    const int64_t row = *options.padding_idx();
    TORCH_CHECK_VALUE(-n <= row && row < n, "padding_idx: ", row, " must be in [", -n, ", ", n,
                      ")");
    options.padding_idx(row < 0 ? row + n : row);
  }
  weight = add_parameter("weight", {n, dim}, options.init().value_or(Normal(0.0, 1.0)),
                         vocabulary(n, tp_group()), tensor_options(options));
}

void VocabParallelEmbeddingImpl::after_init(const std::string& name, const Tensor& shard) {
  if (!options.padding_idx()) return;
  const int64_t row =
      *options.padding_idx() - span(layout().at(name).sharding.parts[0], tp_group()).first;
  if (0 <= row && row < shard.size(0)) shard[row].zero_();
}

Tensor VocabParallelEmbeddingImpl::forward(const Tensor& ids) {
  static const auto op = TP_OP(vocab_parallel_embedding);
  const ParallelGroup& group = tp_group();
  const auto [start, stop] = span(layout().at("weight").sharding.parts[0], group);
  const Tensor y = op.call(ids, weight, group.name, start, stop - start, options.num_embeddings(),
                           sequence_parallel(), Sizes());
  if (!options.padding_idx()) return y;
  Tensor padding = ids.eq(*options.padding_idx());
  if (sequence_parallel()) {  // the operator has flattened the ids and split their tokens alike
    const Split split = tensor_split(padding.numel(), group.size);
    padding = padding.flatten().narrow(0, split.start(group.rank).expect_int(),
                                       split.sizes[static_cast<size_t>(group.rank)].expect_int());
  }
  return at::where(padding.unsqueeze(-1), y.detach(), y);
}

VocabParallelLMHeadImpl::VocabParallelLMHeadImpl(VocabParallelLMHeadOptions options_)
    : ParallelModule("VocabParallelLMHead", options_.group(), options_.sequence_parallel()),
      options(std::move(options_)) {
  const int64_t hidden = options.hidden_size(), vocab = options.vocab_size();
  check_least_one("hidden_size", hidden);
  check_least_one("vocab_size", vocab);
  const auto default_init = linear_init(hidden);
  const auto sharding = vocabulary(vocab, tp_group());
  weight = add_parameter("weight", {vocab, hidden}, options.init().value_or(default_init), sharding,
                         tensor_options(options));
  if (options.bias())
    bias = add_parameter("bias", {vocab}, default_init, sharding, tensor_options(options));
}

Tensor VocabParallelLMHeadImpl::forward(const Tensor& x, std::optional<int64_t> total_tokens) {
  static const auto op = TP_OP(column_parallel_linear);
  const auto sizes = token_sizes(total_tokens, x, false);
  return op.call(x, weight, given(bias), tp_group().name, sequence_parallel(), sizes_or_none(sizes),
                 std::nullopt, 1);
}

Tensor VocabParallelLMHeadImpl::loss(const Tensor& x, const Tensor& targets,
                                     const CrossEntropyOptions& loss_options,
                                     std::optional<int64_t> total_tokens) {
  using Signature = std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const std::string&,
      SymInt, SymInt, SymInt, int64_t, double, double, const std::string&, bool, Sizes,
      const OptionalTensor&, bool, std::optional<int64_t>, bool);
  static const auto op = find_op<Signature>("tp_ext::linear_cross_entropy");
  const auto vocab = vocab_columns(weight.size(0), options.vocab_size(), tp_group());
  const auto sizes = token_sizes(total_tokens, x, false);
  return std::get<0>(op.call(x, weight, given(bias), targets, tp_group().name, vocab.start,
                             vocab.local, vocab.full, loss_options.ignore_index,
                             loss_options.label_smoothing, loss_options.z_loss,
                             loss_options.reduction, sequence_parallel(), sizes_or_none(sizes),
                             std::nullopt, false, std::nullopt, true));
}

Tensor VocabParallelLMHeadImpl::argmax(const Tensor& x, std::optional<int64_t> total_tokens) {
  const at::NoGradGuard no_grad;
  return vocab_parallel_argmax(forward(x, total_tokens), tp_group(),
                               {.vocab_size = options.vocab_size()});
}

Tensor VocabParallelLMHeadImpl::sample(const Tensor& x, const SampleOptions& sample_options,
                                       std::optional<int64_t> total_tokens) {
  const at::NoGradGuard no_grad;
  SampleOptions of_vocabulary = sample_options;
  of_vocabulary.vocab_size = options.vocab_size();
  return vocab_parallel_sample(forward(x, total_tokens), tp_group(), of_vocabulary);
}

ParallelMLPImpl::ParallelMLPImpl(ParallelMLPOptions options_)
    : Module("ParallelMLP"), options(std::move(options_)) {
  const std::string& activation = options.activation();
  const bool gated = activation == "swiglu" || activation == "geglu";
  TORCH_CHECK_VALUE(gated || activation == "gelu" || activation == "gelu_tanh" ||
                        activation == "relu" || activation == "silu",
                    "activation: '", activation,
                    "' must be gelu, gelu_tanh, relu, silu, swiglu or geglu");
  const int64_t hidden = options.hidden_size(), ffn = options.ffn_hidden_size();
  check_least_one("hidden_size", hidden);
  check_least_one("ffn_hidden_size", ffn);
  const std::vector<Part> parts(gated ? 2 : 1, Part{ffn});
  up = register_module(
      "up", ColumnParallelLinear(ColumnParallelLinearOptions(hidden, ffn * (gated ? 2 : 1))
                                     .bias(options.bias())
                                     .parts(parts)
                                     .init(options.init())
                                     .group(options.group())
                                     .sequence_parallel(options.sequence_parallel())
                                     .dtype(options.dtype())
                                     .device(options.device())));
  down =
      register_module("down", RowParallelLinear(RowParallelLinearOptions(ffn, hidden)
                                                    .bias(options.bias())
                                                    .init(options.init())
                                                    .group(options.group())
                                                    .sequence_parallel(options.sequence_parallel())
                                                    .dtype(options.dtype())
                                                    .device(options.device())));
}

Tensor ParallelMLPImpl::forward(const Tensor& x, std::optional<int64_t> total_tokens) {
  static const auto plain = TP_OP(bias_act), gated = TP_OP(gated_act);
  const auto& op = up->options.parts().size() == 2 ? gated : plain;
  const auto [h, bias] = up->forward_without_bias(x, total_tokens);
  return down->forward(op.call(h, given(bias), options.activation()), total_tokens);
}

RMSNormImpl::RMSNormImpl(RMSNormOptions options_)
    : ParallelModule("RMSNorm", options_.group(), options_.sequence_parallel()),
      options(std::move(options_)) {
  check_least_one("normalized_shape", options.normalized_shape());
  if (options.elementwise_affine())
    weight = add_parameter("weight", {options.normalized_shape()}, Constant{1.0}, {},
                           tensor_options(options));
}

double RMSNormImpl::epsilon(const Tensor& x) const {
  if (options.eps()) return *options.eps();
  return x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                        : std::numeric_limits<float>::epsilon();
}

namespace {

void check_last_dim(const Tensor& x, int64_t n) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == n, "x: shape ", x.sizes(),
                    " must end in normalized_shape = ", n);
}

void check_residual(const Tensor& x, const Tensor& residual) {
  TORCH_CHECK_VALUE(residual.sizes() == x.sizes(), "residual: shape ", residual.sizes(),
                    " must be that of x, ", x.sizes());
}

}  // namespace

Tensor RMSNormImpl::forward(const Tensor& x) {
  static const auto op = TP_OP(rms_norm);
  check_last_dim(x, options.normalized_shape());
  return op.call(x, given(used("weight", weight)), epsilon(x));
}

std::tuple<Tensor, Tensor> RMSNormImpl::forward(const Tensor& x, const Tensor& residual) {
  static const auto op = TP_OP(rms_norm_residual);
  check_last_dim(x, options.normalized_shape());
  check_residual(x, residual);
  return op.call(x, residual, given(used("weight", weight)), epsilon(x));
}

LayerNormImpl::LayerNormImpl(LayerNormOptions options_)
    : ParallelModule("LayerNorm", options_.group(), options_.sequence_parallel()),
      options(std::move(options_)) {
  const int64_t n = options.normalized_shape();
  check_least_one("normalized_shape", n);
  if (!options.elementwise_affine()) return;
  weight = add_parameter("weight", {n}, Constant{1.0}, {}, tensor_options(options));
  if (options.bias()) bias = add_parameter("bias", {n}, Constant{0.0}, {}, tensor_options(options));
}

Tensor LayerNormImpl::forward(const Tensor& x) {
  static const auto op = TP_OP(layer_norm);
  check_last_dim(x, options.normalized_shape());
  return op.call(x, given(used("weight", weight)), given(used("bias", bias)), options.eps());
}

std::tuple<Tensor, Tensor> LayerNormImpl::forward(const Tensor& x, const Tensor& residual) {
  static const auto op = TP_OP(layer_norm_residual);
  check_last_dim(x, options.normalized_shape());
  check_residual(x, residual);
  return op.call(x, residual, given(used("weight", weight)), given(used("bias", bias)),
                 options.eps());
}

DropoutImpl::DropoutImpl(DropoutOptions options_)
    : ParallelModule("Dropout", options_.group(), options_.sequence_parallel()),
      options(std::move(options_)) {
  TORCH_CHECK_VALUE(0 <= options.p() && options.p() <= 1, "p: ", options.p(),
                    " must be a probability, in [0, 1]: that of dropping an element");
}

Tensor DropoutImpl::forward(const Tensor& x, const std::optional<Tensor>& residual,
                            std::optional<int64_t> total_tokens) {
  static const auto op = TP_OP(bias_dropout_residual);
  const auto sizes = token_sizes(total_tokens, x, false);
  const bool drops = is_training() && options.p() > 0;
  if (!drops && !has(residual)) return x;
  const int64_t n = std::max<int64_t>(x.numel(), 1);
  int64_t local = n, full = n, first = 0;
  const ParallelGroup& group = tp_group();
  if (sequence_parallel() && group.size > 1) {
    const int64_t rows = x.size(0);
    int64_t inner = 1;
    for (const int64_t length : x.sizes().slice(1)) inner *= length;
    const Split split = sizes.empty()
                            ? Split{std::vector<c10::SymInt>(static_cast<size_t>(group.size), rows)}
                            : Split{sizes};
    local = std::max<int64_t>(rows * inner, 1);
    full = split.total().expect_int() * inner;
    first = split.start(group.rank).expect_int() * inner;
  }
  const Tensor seed = drops ? draw_seed(x.device(), group)
                            : at::zeros({}, x.options().dtype(at::kLong).requires_grad(false));
  return op.call(x, std::nullopt, residual, seed, drops ? options.p() : 0.0, local, full, first);
}

}  // namespace tp_ext::nn
