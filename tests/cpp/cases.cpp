// Calls every function and module and writes what it gets, for comparison with Python:
//
//   cases FOLDER    (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; without them one rank)
//
// tests/cpp/cases.py has the same cases.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>
#include <torch/utils.h>
#include <tp_ext/tp_ext.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>

namespace {

using at::Tensor;
namespace tnn = tp_ext::nn;

struct Results : torch::nn::Module {
  void add(std::string name, const Tensor& value) {
    std::replace(name.begin(), name.end(), '.', '/');
    register_buffer(name, value.detach().clone().contiguous());
  }
};

Tensor numbers(at::IntArrayRef shape, uint64_t seed, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::kDouble).to(dtype);
}

// Outputs, gradients, weights and five steps of AdamW
template <typename Module, typename Forward>
void run(Results& results, const std::string& name, Module& module, std::vector<Tensor> inputs,
         const Forward& forward) {
  for (const auto& item : module->named_parameters())
    results.add(name + "/weight/" + item.key(), item.value());
  torch::optim::AdamW optimizer(module->parameters(), torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < 5; ++step) {
    for (Tensor& x : inputs)
      if (x.is_floating_point()) x = x.detach().requires_grad_();
    optimizer.zero_grad();
    const Tensor y = forward(inputs);
    (y * numbers(y.sizes(), 7, y.scalar_type())).sum().backward();
    const auto at = name + "/" + std::to_string(step);
    results.add(at + "/y", y);
    for (size_t i = 0; i < inputs.size(); ++i)
      if (inputs[i].is_floating_point())
        results.add(at + "/dx" + std::to_string(i), inputs[i].grad());
    for (const auto& item : module->named_parameters())
      if (item.value().grad().defined())
        results.add(at + "/grad/" + item.key(), item.value().grad());
    optimizer.step();
  }
  results.add(name + "/norm", tp_ext::clip_grad_norm_(*module, 0.05));
  for (const auto& item : module->named_parameters())
    if (item.value().grad().defined())
      results.add(name + "/clipped/" + item.key(), item.value().grad());
}

struct Setting {
  const tp_ext::Group& group;
  at::ScalarType dtype;
  bool sequence_parallel;
};

Tensor shard_of_tokens(const Tensor& x, const Setting& s) {
  return s.sequence_parallel ? x.tensor_split(s.group.size())[static_cast<size_t>(s.group.rank())]
                             : x;
}

void run_modules(Results& r, const std::string& prefix, const Setting& s) {
  constexpr int64_t kTokens = 8;  // 3 ranks do not divide it
  const auto total = std::optional<int64_t>(kTokens);
  const auto dtype = s.dtype;
  const bool sp = s.sequence_parallel;
  const Tensor x = shard_of_tokens(numbers({kTokens, 12}, 3, dtype), s);
  const auto& g = s.group;
  {
    tp_ext::manual_seed(1);
    tnn::ColumnParallelLinear m(
        tnn::ColumnParallelLinearOptions(12, 7).group(g).dtype(dtype).sequence_parallel(sp));
    run(r, prefix + "column", m, {x}, [&](auto& in) { return m->forward(in[0], total); });
  }
  {
    tp_ext::manual_seed(2);
    tnn::ColumnParallelLinear m(tnn::ColumnParallelLinearOptions(12, 14)
                                    .group(g)
                                    .dtype(dtype)
                                    .sequence_parallel(sp)
                                    .bias(false)
                                    .gather_output(true)
                                    .parts({{7}, {7}})
                                    .init(tp_ext::Normal(0.02)));
    r.add(prefix + "truncated",
          tnn::ColumnParallelLinear(tnn::ColumnParallelLinearOptions(12, 7).group(g).init(
                                        tp_ext::TruncatedNormal{0.1, 0.5, -0.4, 0.3}))
              ->weight);
    run(r, prefix + "gathered", m, {x}, [&](auto& in) { return m->forward(in[0], total); });
  }
  {
    tp_ext::manual_seed(3);
    tnn::RowParallelLinear m(
        tnn::RowParallelLinearOptions(7, 12).group(g).dtype(dtype).sequence_parallel(sp));
    const auto parts = numbers({kTokens, 7}, 4, dtype).tensor_split(g.size(), -1);
    const Tensor part = parts[static_cast<size_t>(g.rank())].contiguous();
    run(r, prefix + "row", m, {part}, [&](auto& in) { return m->forward(in[0], total); });
  }
  for (const char* activation : {"gelu", "swiglu"}) {
    tp_ext::manual_seed(4);
    tnn::ParallelMLP m(tnn::ParallelMLPOptions(12, 10)
                           .activation(activation)
                           .group(g)
                           .dtype(dtype)
                           .sequence_parallel(sp));
    run(r, prefix + "mlp_" + activation, m, {x},
        [&](auto& in) { return m->forward(in[0], total); });
  }
  for (const int64_t kv_heads : {1, 6}) {
    tp_ext::manual_seed(5);
    tnn::ParallelAttention m(tnn::ParallelAttentionOptions(12, 6)
                                 .num_kv_heads(kv_heads)
                                 .group(g)
                                 .dtype(dtype)
                                 .sequence_parallel(sp)
                                 .rope(10000.0)
                                 .causal(kv_heads == 1));
    run(r, prefix + "attention_" + std::to_string(kv_heads), m, {x},
        [&](auto& in) { return m->forward(in[0], {.batch_size = 2, .total_tokens = total}); });
  }
  {
    tp_ext::manual_seed(6);
    tnn::RMSNorm m(tnn::RMSNormOptions(12).group(g).dtype(dtype).sequence_parallel(sp));
    run(r, prefix + "rms_norm", m, {x, x * 2}, [&](auto& in) {
      const auto [y, sum] = m->forward(in[0], in[1]);
      return y + sum;
    });
    tnn::LayerNorm n(tnn::LayerNormOptions(12).group(g).dtype(dtype).sequence_parallel(sp));
    run(r, prefix + "layer_norm", n, {x}, [&](auto& in) { return n->forward(in[0]); });
  }
  {
    const Tensor ids = at::arange(kTokens, at::kLong).mul(3).remainder(11);
    tp_ext::manual_seed(7);
    tnn::VocabParallelEmbedding m(tnn::VocabParallelEmbeddingOptions(11, 12)
                                      .padding_idx(3)
                                      .group(g)
                                      .dtype(dtype)
                                      .sequence_parallel(sp));
    run(r, prefix + "embedding", m, {ids}, [&](auto& in) { return m->forward(in[0]); });
    tnn::VocabParallelLMHead h(
        tnn::VocabParallelLMHeadOptions(12, 11).bias(true).group(g).dtype(dtype).sequence_parallel(
            sp));
    run(r, prefix + "head", h, {x}, [&](auto& in) {
      return h->loss(in[0], ids, {.label_smoothing = 0.1, .z_loss = 1e-3}, total);
    });
    r.add(prefix + "head/logits", h->forward(x, total));
    r.add(prefix + "head/argmax", h->argmax(x, total));
    tp_ext::manual_seed(9);
    r.add(prefix + "head/sample", h->sample(x, {.top_k = 5, .top_p = 0.9}, total));
  }
  {
    tp_ext::manual_seed(8);
    tnn::Dropout m(tnn::DropoutOptions(0.3).group(g).sequence_parallel(sp));
    Tensor leaf = x.detach().requires_grad_();
    const Tensor y = m->forward(leaf, x * 3, total);
    y.sum().backward();
    r.add(prefix + "dropout/y", y);
    r.add(prefix + "dropout/dx", leaf.grad());
    r.add(prefix + "dropout/again", m->forward(leaf, {}, total));
    m->eval();
    r.add(prefix + "dropout/eval", m->forward(leaf, x, total));
  }
}

void run_functions(Results& r, const std::string& prefix, const Setting& s) {
  const auto& g = s.group;
  const auto rank = static_cast<uint64_t>(g.rank());
  const Tensor x = numbers({6, 6}, 10, s.dtype), own = numbers({6, 6}, 20 + rank, s.dtype);
  const auto record = [&](const std::string& name, const Tensor& input, const auto& region) {
    const Tensor leaf = input.detach().requires_grad_();
    const Tensor y = region(leaf);
    (y * numbers(y.sizes(), 30 + rank, s.dtype)).sum().backward();
    r.add(prefix + name + "/y", y);
    r.add(prefix + name + "/dx", leaf.grad());
  };
  record("copy", x, [&](auto& t) { return tp_ext::copy_to_region(t, g) * 1; });
  record("reduce", own, [&](auto& t) { return tp_ext::reduce_from_region(t, g) * 1; });
  record("scatter", x, [&](auto& t) { return tp_ext::scatter_to_region(t, g) * 1; });
  record("gather", own, [&](auto& t) { return tp_ext::gather_from_region(t, g) * 1; });
  record("all_gather", own, [&](auto& t) { return tp_ext::all_gather_region(t, g) * 1; });
  record("reduce_scatter", own, [&](auto& t) { return tp_ext::reduce_scatter_region(t, g) * 1; });
  record("all_to_all", own, [&](auto& t) { return tp_ext::all_to_all_region(t, g, 0, 1) * 1; });
  const Tensor seven = numbers({7, 7}, 12, s.dtype);  // 2 and 3 ranks do not divide it
  std::vector<int64_t> sizes;
  for (const Tensor& rows : seven.tensor_split(g.size())) sizes.push_back(rows.size(0));
  const Tensor mine = seven.tensor_split(g.size())[rank].contiguous();
  const Tensor part = numbers({7, 7}, 40 + rank, s.dtype);
  record("scatter_uneven", seven, [&](auto& t) { return tp_ext::scatter_to_region(t, g) * 1; });
  record("gather_uneven", mine,
         [&](auto& t) { return tp_ext::gather_from_region(t, g, 0, sizes) * 1; });
  record("all_gather_uneven", mine,
         [&](auto& t) { return tp_ext::all_gather_region(t, g, 0, sizes) * 1; });
  record("reduce_scatter_uneven", part,
         [&](auto& t) { return tp_ext::reduce_scatter_region(t, g, 0, sizes) * 1; });
  record("all_to_all_uneven", mine,
         [&](auto& t) { return tp_ext::all_to_all_region(t, g, 1, 0, sizes, sizes) * 1; });
  const auto columns = numbers({5, 11}, 11, s.dtype).tensor_split(g.size(), -1);
  const Tensor logits = columns[static_cast<size_t>(g.rank())].contiguous();
  const Tensor targets = at::arange(5, at::kLong);
  for (const char* reduction : {"mean", "sum", "none"})
    record(std::string("loss_") + reduction, logits, [&](auto& t) {
      return tp_ext::vocab_parallel_cross_entropy(
          t, targets, g, {.vocab_size = 11, .ignore_index = 2, .reduction = reduction});
    });
  r.add(prefix + "argmax", tp_ext::vocab_parallel_argmax(logits, g, {.vocab_size = 11}));
  tp_ext::manual_seed(3);
  r.add(prefix + "sample", tp_ext::vocab_parallel_sample(logits, g, {.vocab_size = 11}));
  r.add(prefix + "sample_k", tp_ext::vocab_parallel_sample(
                                 logits, g, {.vocab_size = 11, .temperature = 0.7, .top_k = 3}));
  r.add(prefix + "sample_p",
        tp_ext::vocab_parallel_sample(logits, g, {.vocab_size = 11, .top_p = 0.8}));
}

// Full tensors to files and back, a rank's archive, and the norm of gradients
void run_files(Results& r, const std::string& folder, const tp_ext::Group& group) {
  const auto make = [&] {
    return tnn::ParallelAttention(
        tnn::ParallelAttentionOptions(12, 6).num_kv_heads(1).group(group));
  };
  tp_ext::manual_seed(1);
  auto first = make();
  auto second = make();
  tp_ext::save_safetensors(folder + "/attention", *first);
  const std::string index = folder + "/index_" + std::to_string(group.rank()) + ".json";
  std::ofstream(index) << R"({"weight_map": {"qkv.weight": "attention/model.safetensors"}})";
  tp_ext::load_safetensors(index, *second);
  std::stringstream archive;
  auto third = make();
  torch::save(first, archive);
  torch::load(third, archive);
  for (const auto& item : second->named_parameters()) r.add("loaded/" + item.key(), item.value());
  for (const auto& item : third->named_parameters()) r.add("archive/" + item.key(), item.value());
  first->forward(numbers({2, 4, 12}, 3, at::kFloat)).pow(2).sum().backward();
  r.add("norm", tp_ext::clip_grad_norm_(*first, 0.5));
  for (const auto& item : first->named_parameters())
    r.add("clipped/" + item.key(), item.value().grad());
}

// The text of the error that a call must raise
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  TORCH_CHECK(false, "there must be an error");
}

void check_says(const std::string& text, const std::string& part) {
  TORCH_CHECK(text.find(part) != std::string::npos, "'", text, "' must say '", part, "'");
}

void check_groups(const tp_ext::Group& first) {
  TORCH_CHECK(tp_ext::Group().size() == 1 && tp_ext::Group().rank() == 0);
  if (!first.process_group()) return;
  const int64_t rank = first.rank(), size = first.size();
  const Tensor ones = at::ones({3}), sums = ones * size;
  std::string name;
  {
    tp_ext::Group second = tp_ext::init_group();
    name = second.name();
    TORCH_CHECK(name != first.name() && second.rank() == rank && second.size() == size);
    tp_ext::Group moved = std::move(second);
    TORCH_CHECK(second.name().empty() && moved.name() == name);
    TORCH_CHECK(at::equal(tp_ext::reduce_from_region(ones, moved), sums));
    const tp_ext::Group same = tp_ext::group(moved.process_group());
    TORCH_CHECK(same.name() == name);
    check_says(error_of([&] { tp_ext::init_group({.name = name}); }), "name: '");
  }
  // Its name is free again
  const tp_ext::Group again = tp_ext::init_group({.name = name});
  TORCH_CHECK(at::equal(tp_ext::reduce_from_region(ones, again), sums));
  again.barrier();
  tp_ext::nn::ColumnParallelLinear gone{nullptr};
  {
    const tp_ext::Group other = tp_ext::init_group({.backend = "gloo", .name = "gone"});
    gone = tnn::ColumnParallelLinear(tnn::ColumnParallelLinearOptions(4, 8).group(other));
    TORCH_CHECK(at::equal(tp_ext::reduce_from_region(ones, other), sums));
    other.barrier();
  }
  check_says(error_of([&] { gone->reset_parameters(); }), "must be the name of a process group");
  check_says(error_of([&] { tp_ext::init_group({.backend = "mpi"}); }), "backend: 'mpi' must be");
  check_says(error_of([&] { tp_ext::init_group({.rank = 3, .size = 2}); }), "rank: 3 must be");
  check_says(error_of([&] { tp_ext::init_group({.size = -3}); }), "size: -3 must not be negative");
  check_says(error_of([&] { tp_ext::group({}); }), "process_group: null");
  const auto wait_for_a_rank_that_never_comes = [&] {
    tp_ext::init_group(
        {.rank = rank, .size = size + 1, .name = "late", .timeout = std::chrono::seconds(1)});
  };
  check_says(error_of(wait_for_a_rank_that_never_comes), "waited 1000 ms for rank");
}

// Generates texts until it is ended
void generate(const std::string& folder, const tp_ext::Group& group) {
  tp_ext::ExportedModel model(folder, group);
  const Tensor prompt = at::ones({1, 1}, at::kLong);
  while (true) std::cout << model.generate(prompt, {.max_new_tokens = 4}).size(1) << std::endl;
}

}  // namespace

// With another argument, FOLDER is an export
int main(int argc, char** argv) {
  const std::string folder = argv[1];
  const tp_ext::Group group = std::getenv("RANK") != nullptr
                                  ? tp_ext::init_group({.timeout = std::chrono::seconds(60)})
                                  : tp_ext::Group();
  if (argc > 2) try {
      generate(folder, group);
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
      return 1;
    }
  Results results;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const std::string name = std::string(c10::toString(dtype)) + "/";
    run_functions(results, name, {group, dtype, false});
    for (const bool sp : {false, true})
      run_modules(results, name + (sp ? "sp/" : "plain/"), {group, dtype, sp});
  }
  run_files(results, folder, group);
  check_groups(group);
  group.barrier();
  tp_ext::save_safetensors(folder + "/rank_" + std::to_string(group.rank()) + ".safetensors",
                           results);
  return 0;
}
