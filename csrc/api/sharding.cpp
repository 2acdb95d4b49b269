#include "api/sharding.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randint.h>

#include <algorithm>

#include "comm/broadcast.h"
#include "comm/split.h"
#include "operators.h"

namespace tp_ext::nn {

std::vector<std::pair<std::string, const torch::nn::Module*>> layers_of(
    const torch::nn::Module& module) {
  std::vector<std::pair<std::string, const torch::nn::Module*>> layers{{"", &module}};
  for (const auto& inside : module.named_children())
    for (const auto& [name, layer] : layers_of(*inside.value()))
      layers.emplace_back(inside.key() + "." + name, layer);
  return layers;
}

std::vector<c10::SymInt> split_sizes(int64_t n, int64_t p) { return tensor_split(n, p).sizes; }

std::pair<int64_t, int64_t> span(const Part& part, const ParallelGroup& group) {
  const int64_t p = group.size;
  TORCH_CHECK_VALUE(p % (part.copies * part.groups) == 0, "copies: ", part.copies, " times groups ",
                    part.groups, " must divide the number of ranks, p = ", p);
  TORCH_CHECK_VALUE(part.size % (part.unit * part.groups) == 0, "size: ", part.size, " must make ",
                    part.groups, " groups of whole units of ", part.unit);
  const int64_t holders = p / (part.copies * part.groups);  // of the shards of one group
  const int64_t place = group.rank / part.copies;
  const int64_t units = part.size / (part.unit * part.groups);
  const Split split = tensor_split(units, holders);
  const auto start = place / holders * units + split.start(place % holders).expect_int();
  return {start * part.unit,
          (start + split.sizes[static_cast<size_t>(place % holders)].expect_int()) * part.unit};
}

int64_t full_size(const Sharding& sharding) {
  int64_t size = 0;
  for (const Part& part : sharding.parts) size += part.size;
  return size;
}

int64_t local_size(const Sharding& sharding, const ParallelGroup& group) {
  int64_t size = 0;
  for (const Part& part : sharding.parts) {
    const auto [start, stop] = span(part, group);
    size += stop - start;
  }
  return size;
}

std::vector<Share> shares(const Sharding& sharding, const ParallelGroup& group) {
  std::vector<Share> result;
  int64_t local = 0, full = 0;
  for (const Part& part : sharding.parts) {
    const auto [start, stop] = span(part, group);
    result.push_back({local, full + start, stop - start, group.rank % part.copies == 0});
    local += stop - start;
    full += part.size;
  }
  return result;
}

Tensor unshard(const Tensor& local, const Sharding& sharding, const ParallelGroup& group) {
  if (sharding.parts.empty() || group.size == 1) return local;
  std::vector<c10::SymInt> sizes;
  ParallelGroup member = group;
  for (member.rank = 0; member.rank < member.size; ++member.rank)
    sizes.emplace_back(local_size(sharding, member));
  const Tensor all = gather_from_region(local, group.name, sharding.dim, Sizes(sizes));
  if (sharding.parts.size() == 1 && sharding.parts[0].copies == 1) return all;
  std::vector<Tensor> ordered;  // of each part the shares of all ranks
  for (size_t part = 0; part < sharding.parts.size(); ++part) {
    int64_t begin = 0;
    for (member.rank = 0; member.rank < member.size; ++member.rank) {
      const Share share = shares(sharding, member)[part];
      if (share.owned)
        ordered.push_back(all.narrow(sharding.dim, begin + share.start, share.length));
      begin += sizes[static_cast<size_t>(member.rank)].expect_int();
    }
  }
  return at::cat(ordered, sharding.dim);
}

std::pair<Part, Part> head_parts(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                 int64_t p) {
  const auto check = [&](bool right, const char* rule) {
    TORCH_CHECK_VALUE(right, rule, "; num_heads = ", num_heads, ", num_kv_heads = ", num_kv_heads,
                      ", p = ", p);
  };
  check(num_kv_heads >= 1 && num_heads % num_kv_heads == 0, "num_kv_heads: must divide num_heads");
  check(num_heads >= p, "num_heads: must be at least the number of ranks");
  const int64_t group = num_heads / num_kv_heads;
  if (num_kv_heads >= p)
    return {{num_heads * head_dim, group * head_dim}, {num_kv_heads * head_dim, head_dim}};
  check(p % num_kv_heads == 0, "num_kv_heads: when fewer than the ranks, must divide their number");
  return {{num_heads * head_dim, head_dim, 1, num_kv_heads},
          {num_kv_heads * head_dim, head_dim, p / num_kv_heads}};
}

Tensor draw_seed(const at::Device& device, const ParallelGroup& group) {
  const at::NoGradGuard no_grad;
  const Tensor seed =
      at::randint(0, int64_t{1} << 62, {}, at::TensorOptions().dtype(at::kLong).device(device));
  if (group.size == 1) return seed;
  return comm::broadcast_async(seed, group.name, 0, {}).wait();
}

namespace {

// Elements of a row of the local tensor, their distance in the full one, and the first one
struct FullIndex {
  int64_t local_inner, full_inner, offset;
};

template <typename... Numbers>
void fill(const char* name, const Tensor& local, const Tensor& seed, const FullIndex& index,
          Numbers... numbers) {
  using Signature = void(Tensor&, const Tensor&, Numbers..., int64_t, int64_t, int64_t);
  Tensor target = local;
  find_op<Signature>(name).call(target, seed, numbers..., index.local_inner, index.full_inner,
                                index.offset);
}

void draw(const Tensor& local, const Init& init, const Tensor& seed, const FullIndex& index) {
  if (const auto* uniform = std::get_if<Uniform>(&init))
    fill("tp_ext::_philox_uniform_", local, seed, index, uniform->low, uniform->high);
  if (const auto* normal = std::get_if<Normal>(&init))
    fill("tp_ext::_philox_normal_", local, seed, index, normal->mean, normal->std);
  if (const auto* cut = std::get_if<TruncatedNormal>(&init))
    fill("tp_ext::_philox_truncated_normal_", local, seed, index, cut->mean, cut->std, cut->low,
         cut->high);
}

}  // namespace

void initialise(const Tensor& local, const ParallelModule::Parameter& parameter,
                const ParallelGroup& group) {
  const at::NoGradGuard no_grad;
  const Init& init = parameter.init;
  if (const auto* constant = std::get_if<Constant>(&init)) {
    local.fill_(constant->value);
    return;
  }
  const Tensor seed = draw_seed(local.device(), group);
  const Sharding& sharding = parameter.sharding;
  if (sharding.parts.empty()) {
    const int64_t n = std::max<int64_t>(local.numel(), 1);
    draw(local, init, seed, {n, n, 0});
    return;
  }
  int64_t inner = 1;
  for (size_t d = static_cast<size_t>(sharding.dim) + 1; d < parameter.full_shape.size(); ++d)
    inner *= parameter.full_shape[d];
  const int64_t full = full_size(sharding) * inner;
  for (const Share& share : shares(sharding, group)) {
    if (share.length == 0 || local.numel() == 0) continue;
    const Tensor chunk = local.narrow(sharding.dim, share.start, share.length);
    const Tensor dense =
        chunk.is_contiguous() ? chunk : at::empty_like(chunk, {}, at::MemoryFormat::Contiguous);
    draw(dense, init, seed, {share.length * inner, full, share.full_start * inner});
    if (!dense.is_same(chunk)) chunk.copy_(dense);
  }
}

VocabColumns vocab_columns(int64_t width, std::optional<int64_t> vocab_size,
                           const ParallelGroup& group) {
  const int64_t p = group.size, rank = group.rank;
  if (!vocab_size) return {rank * width, width, p * width};
  const int64_t size = *vocab_size;
  TORCH_CHECK_VALUE(size >= p, "vocab_size: ", size,
                    " must be at least the number of ranks, p = ", p);
  const Split split = tensor_split(size, p);
  if (split.sizes[static_cast<size_t>(rank)].expect_int() == width)
    return {split.start(rank).expect_int(), width, size};
  TORCH_CHECK_VALUE(p == 1 || width < size, "logits: ", width,
                    " columns must be this rank's shard of vocab_size = ", size,
                    ", not the gathered logits, at p = ", p);
  TORCH_CHECK_VALUE(p * (width + (p > 1 ? 1 : 0)) >= size, "logits: ", width, " columns on rank ",
                    rank, " must be ", split.sizes[static_cast<size_t>(rank)],
                    ", its share of vocab_size = ", size, " at p = ", p);
  const int64_t start = std::min(rank * width, size);
  return {start, std::min(width, size - start), size};
}

}  // namespace tp_ext::nn
