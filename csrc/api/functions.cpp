// Regions, loss, seeds and clipping, over the operators.

#include "tp_ext/functions.h"

#include <ATen/ops/clamp_max.h>
#include <ATen/ops/zeros.h>
#include <torch/utils.h>

#include <cmath>
#include <set>

#include "api/sharding.h"
#include "operators.h"

namespace tp_ext {
namespace {

// The lengths of an argument `sizes`, none if it is empty
class OptionalSizes {
 public:
  explicit OptionalSizes(at::IntArrayRef sizes) : sizes_(sizes.begin(), sizes.end()) {}
  operator Sizes() const { return sizes_.empty() ? Sizes() : Sizes(sizes_); }

 private:
  std::vector<c10::SymInt> sizes_;
};

}  // namespace

Tensor copy_to_region(const Tensor& x, const ParallelGroup& group) {
  return copy_to_region(x, group.name);
}
Tensor reduce_from_region(const Tensor& x, const ParallelGroup& group) {
  return reduce_from_region(x, group.name);
}
Tensor scatter_to_region(const Tensor& x, const ParallelGroup& group, int64_t dim,
                         at::IntArrayRef sizes) {
  return scatter_to_region(x, group.name, dim, OptionalSizes(sizes));
}
Tensor gather_from_region(const Tensor& x, const ParallelGroup& group, int64_t dim,
                          at::IntArrayRef sizes) {
  return gather_from_region(x, group.name, dim, OptionalSizes(sizes));
}
Tensor all_gather_region(const Tensor& x, const ParallelGroup& group, int64_t dim,
                         at::IntArrayRef sizes) {
  return all_gather_region(x, group.name, dim, OptionalSizes(sizes));
}
Tensor reduce_scatter_region(const Tensor& x, const ParallelGroup& group, int64_t dim,
                             at::IntArrayRef sizes) {
  return reduce_scatter_region(x, group.name, dim, OptionalSizes(sizes));
}
Tensor all_to_all_region(const Tensor& x, const ParallelGroup& group, int64_t split_dim,
                         int64_t concat_dim, at::IntArrayRef split_sizes,
                         at::IntArrayRef concat_sizes) {
  return all_to_all_region(x, group.name, split_dim, concat_dim, OptionalSizes(split_sizes),
                           OptionalSizes(concat_sizes));
}

Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& targets,
                                    const ParallelGroup& group,
                                    const CrossEntropyOptions& options) {
  using Signature =
      Tensor(const Tensor&, const Tensor&, const std::string&, SymInt, SymInt, SymInt, int64_t,
             double, double, const std::string&, bool, bool, at::IntArrayRef, Sizes);
  static const auto op = find_op<Signature>("tp_ext::vocab_parallel_cross_entropy");
  TORCH_CHECK_VALUE(logits.dim() > 0, "logits: a 0-d tensor must have a last dim, the vocabulary");
  const auto vocab = nn::vocab_columns(logits.size(-1), options.vocab_size, group);
  return op.call(logits, targets, group.name, vocab.start, vocab.local, vocab.full,
                 options.ignore_index, options.label_smoothing, options.z_loss, options.reduction,
                 false, options.vocab_size.has_value(), {}, {});
}

namespace {

nn::VocabColumns columns_of(const Tensor& logits, const ParallelGroup& group,
                            const SampleOptions& options) {
  TORCH_CHECK_TYPE(at::isFloatingType(logits.scalar_type()), "logits: dtype ", logits.scalar_type(),
                   " must be a floating point type");
  TORCH_CHECK_VALUE(logits.dim() > 0, "logits: a 0-d tensor must have a last dim, the vocabulary");
  return nn::vocab_columns(logits.size(-1), options.vocab_size, group);
}

}  // namespace

Tensor vocab_parallel_argmax(const Tensor& logits, const ParallelGroup& group,
                             const SampleOptions& options) {
  const auto vocab = columns_of(logits, group, options);
  return vocab_parallel_argmax(logits, group.name, vocab.start, vocab.local, vocab.full, {});
}

Tensor vocab_parallel_sample(const Tensor& logits, const ParallelGroup& group,
                             const SampleOptions& options) {
  const auto vocab = columns_of(logits, group, options);
  const double temperature = options.temperature;
  TORCH_CHECK_VALUE(std::isfinite(temperature) && temperature >= 0, "temperature: ", temperature,
                    " must be finite and at least 0");
  TORCH_CHECK_VALUE(!options.top_k || *options.top_k >= 1, "top_k: ", options.top_k.value_or(0),
                    " must be at least 1");
  TORCH_CHECK_VALUE(!options.top_p || (*options.top_p > 0 && *options.top_p <= 1),
                    "top_p: ", options.top_p.value_or(0), " must be in (0, 1]");
  return vocab_parallel_sample(logits, group.name, vocab.start, vocab.local, vocab.full,
                               temperature, options.top_k, options.top_p, {});
}

void manual_seed(int64_t seed) {
  torch::manual_seed(static_cast<uint64_t>(seed) & ((uint64_t{1} << 63) - 1));
}

namespace {

using nn::ParallelModule;
using nn::Share;

// Those elements of a shard's gradient that this rank counts
void add_owned(const Tensor& grad, const nn::Sharding& sharding, const ParallelGroup& group,
               std::vector<Tensor>& owned) {
  bool copies = false;
  for (const Part& part : sharding.parts) copies = copies || part.copies > 1;
  if (!copies) {
    owned.push_back(grad);
    return;
  }
  std::vector<Share> merged;
  for (const Share& next : shares(sharding, group)) {
    if (!next.owned) continue;
    if (!merged.empty() && merged.back().start + merged.back().length == next.start &&
        merged.back().full_start + merged.back().length == next.full_start)
      merged.back().length += next.length;
    else
      merged.push_back(next);
  }
  for (const Share& share : merged)
    if (share.length > 0) owned.push_back(grad.narrow(sharding.dim, share.start, share.length));
}

}  // namespace

Tensor clip_grad_norm_(const torch::nn::Module& module, double max_norm) {
  static const auto squared_norm =
      find_op<Tensor(at::TensorList)>("tp_ext::_multi_tensor_squared_norm");
  static const auto scale_ =
      find_op<void(at::TensorList, const Tensor&)>("tp_ext::_multi_tensor_scale_");
  TORCH_CHECK_VALUE(max_norm >= 0, "max_norm: ", max_norm, " must be at least 0");
  const at::NoGradGuard no_grad;
  ParallelGroup group;
  for (const auto& [prefix, layer] : nn::layers_of(module)) {
    const auto* parallel = dynamic_cast<const ParallelModule*>(layer);
    if (parallel == nullptr || parallel->tp_group().size == 1) continue;
    TORCH_CHECK_VALUE(group.size == 1 || group.name == parallel->tp_group().name, "module: its ",
                      "layers must have one group, and have '", group.name, "' and '",
                      parallel->tp_group().name, "'");
    group = parallel->tp_group();
  }
  std::vector<Tensor> all, owned;
  auto dtype = at::ScalarType::Undefined;
  for (const auto& [prefix, layer] : nn::layers_of(module)) {
    const auto* parallel = dynamic_cast<const ParallelModule*>(layer);
    for (const auto& parameter : layer->named_parameters(false)) {
      const Tensor& grad = parameter.value().grad();
      if (!grad.defined()) continue;
      all.push_back(grad);
      dtype = dtype == at::ScalarType::Undefined ? grad.scalar_type()
                                                 : c10::promoteTypes(dtype, grad.scalar_type());
      const bool sharded = parallel != nullptr && parallel->tp_group().size > 1 &&
                           !parallel->layout().at(parameter.key()).sharding.parts.empty();
      if (sharded)
        add_owned(grad, parallel->layout().at(parameter.key()).sharding, group, owned);
      else if (group.rank == 0)  // all ranks have it: one counts it
        owned.push_back(grad);
    }
  }
  const auto device = all.empty() ? at::Device(at::kCPU) : all[0].device();
  Tensor total = owned.empty()
                     ? at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device))
                     : squared_norm.call(owned).sqrt();
  if (group.size > 1)
    total = reduce_from_region(total.pow(2.0).reshape({1}), group.name)[0].pow(0.5);
  const Tensor scale = total.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  if (!all.empty()) scale_.call(all, scale);
  return total.to(dtype == at::ScalarType::Undefined ? at::kFloat : dtype);
}

}  // namespace tp_ext
