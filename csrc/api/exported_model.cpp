// ExportedModel: the manifest, its checks, the package of this rank and the loop that generates, as
// in tp_ext/export/load.py.

#include "tp_ext/exported_model.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_file.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <sys/utsname.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <unordered_map>

#include "api/compiled_graph.h"
#include "api/group_alias.h"
#include "api/json.h"
#include "api/sha256.h"
#include "comm/collectives.h"
#include "tp_ext/functions.h"

namespace tp_ext {
namespace {

using json::Value;

// The files of a rank begin with it
std::string prefix_of(int64_t rank) {
  char name[64];
  std::snprintf(name, sizeof name, "rank_%05lld.", static_cast<long long>(rank));
  return name;
}

Value read_manifest(const std::filesystem::path& folder) {
  std::ifstream file(folder / "manifest.json");
  TORCH_CHECK_VALUE(file, "folder: ", folder, " has no manifest.json that can be read");
  std::stringstream text;
  text << file.rdbuf();
  return json::parse(text.str());
}

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> dtypes = {
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16},
      {"int64", at::kLong},    {"int32", at::kInt},      {"int16", at::kShort},
      {"int8", at::kChar},     {"uint8", at::kByte},     {"bool", at::kBool}};
  const auto found = dtypes.find(name);
  TORCH_CHECK_VALUE(found != dtypes.end(), "dtype: '", name, "' cannot be loaded");
  return found->second;
}

// The architecture of this processor and all its features
std::set<std::string> processor() {
  std::set<std::string> features;
  utsname system{};
  if (uname(&system) == 0) features.insert(system.machine);
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(std::min(line.find(':') + 1, line.size())));
    for (std::string word; words >> word;) features.insert(word);
  }
  return features;
}

// TORCH_VERSION may be another patch than the library that the program has loaded
std::string running_torch() {
  const uint64_t version = aoti_torch_abi_version();  // a byte for each number
  return c10::str(version >> 56, ".", version >> 48 & 255, ".", version >> 40 & 255);
}

void check_place(const Value& manifest, const Group& group) {
  TORCH_CHECK_VALUE(manifest.at("version").integer() == 1,
                    "folder: its manifest has another version than 1");
  const int64_t p = manifest.at("p").integer();
  TORCH_CHECK_VALUE(p == group.size(), "group: ", group.size(), " ranks must be the ", p,
                    " of the export");
  const std::string& version = manifest.at("torch").string();
  const std::string running = running_torch();
  TORCH_CHECK_VALUE(version.substr(0, version.find('+')) == running, "torch: ", running,
                    " must be the version of the export, ", version);
  const auto here = processor();
  for (const Value& feature : manifest.at("isa").items)
    TORCH_CHECK_VALUE(here.count(feature.string()), "isa: this processor has no ", feature.string(),
                      ", for which the export was compiled");
}

// The bytes of a file, mapped, after a look at their digest
at::Tensor checked_file(const std::filesystem::path& folder, const std::string& name,
                        const std::string& digest) {
  const auto path = folder / name;
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(path), "folder: ", path, " does not exist");
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  const at::Tensor bytes = at::from_file(path.string(), false, size, at::kByte);
  TORCH_CHECK_VALUE(sha256(bytes.const_data_ptr(), size) == digest, "folder: ", path,
                    " is another file than the one that was exported");
  return bytes;
}

std::unordered_map<std::string, at::Tensor> weights_of(const at::Tensor& bytes,
                                                       const Value& stored) {
  std::unordered_map<std::string, at::Tensor> weights;
  for (const Value& entry : stored.items) {
    const auto dtype = dtype_of(entry.at("dtype").string());
    const auto shape = entry.at("shape").integers();
    const int64_t begin = entry.at("offset").integer(),
                  size = c10::multiply_integers(shape) * c10::elementSize(dtype);
    TORCH_CHECK_VALUE(begin >= 0 && size >= 0 && begin <= bytes.numel() - size,
                      "folder: a file of weights is shorter than its weights");
    weights.emplace(entry.at("name").string(),
                    bytes.narrow(0, begin, size).view(dtype).view(shape));
  }
  return weights;
}

// Raises on all ranks if one has a problem, or another export
void agree(const Group& group, const std::string& problem, const std::string& id) {
  if (group.size() > 1) {
    at::Tensor words = at::empty({2}, at::kLong);
    auto* const word = words.data_ptr<int64_t>();
    word[0] = !problem.empty();
    word[1] = static_cast<int64_t>(std::strtoull(id.c_str(), nullptr, 16));
    const ParallelGroup& key = group;
    const at::Tensor all = comm::all_gather_stack(words, key.name);
    const auto* const of_ranks = all.const_data_ptr<int64_t>();
    for (int64_t rank = 0; problem.empty() && rank < group.size(); ++rank) {
      TORCH_CHECK_VALUE(!of_ranks[2 * rank], "folder: rank ", rank, " of ", group.size(),
                        " cannot load its part; its error says why");
    }
    for (int64_t rank = 0; problem.empty() && rank < group.size(); ++rank)
      TORCH_CHECK_VALUE(of_ranks[2 * rank + 1] == of_ranks[1], "folder: rank ", rank,
                        " has another export than rank 0; all must have that of one call");
  }
  TORCH_CHECK_VALUE(problem.empty(), problem);
}

}  // namespace

struct ExportedModel::Parts {
  Value manifest;
  ParallelGroup group;
  std::unique_ptr<GroupAlias> name;
  std::unique_ptr<CompiledGraph> graph;
  std::vector<Value> inputs;  // of this rank, which may have more heads than another
  std::vector<at::Tensor> caches;

  void load(const std::filesystem::path& folder, const Group& of_ranks) {
    group = of_ranks;
    manifest = read_manifest(folder);
    check_place(manifest, of_ranks);
    const std::string prefix = prefix_of(group.rank);
    at::Tensor bytes;  // of the weights
    std::string library;
    for (const auto& [name, digest] : manifest.at("files").members) {
      if (name.rfind(prefix, 0) != 0) continue;
      const at::Tensor file = checked_file(folder, name, digest.string());
      if (name == prefix + "weights") bytes = file;
      if (std::filesystem::path(name).extension() == ".so") library = name;
    }
    TORCH_CHECK_VALUE(bytes.defined() && !library.empty(),
                      "folder: the manifest names no weights or no library of rank ", group.rank);
    graph = std::make_unique<CompiledGraph>((folder / library).string());
    graph->load_weights(weights_of(bytes, manifest.at("weights").items.at(group.rank)));
    if (of_ranks.process_group())
      name = std::make_unique<GroupAlias>("tp_ext.export." + manifest.at("id").string(), of_ranks);
    inputs = manifest.at("inputs").items;
    const auto& shapes = manifest.at("caches").items.at(group.rank).items;  // of the last inputs
    for (size_t i = 0; i < shapes.size(); ++i) {
      Value& spec = inputs.at(inputs.size() - shapes.size() + i);
      spec.members["shape"] = shapes[i];
      caches.push_back(at::zeros(shapes[i].integers(), dtype_of(spec.at("dtype").string())));
    }
  }

  bool generates() const { return manifest.at("max_seq").kind == Value::kInteger; }

  void check(const at::Tensor& tensor, const Value& spec,
             std::map<std::string, int64_t>& lengths) const {
    const std::string& name = spec.at("name").string();
    const auto& shape = spec.at("shape").items;
    TORCH_CHECK_VALUE(tensor.defined() && tensor.is_cpu() &&
                          tensor.scalar_type() == dtype_of(spec.at("dtype").string()),
                      name, ": must be a tensor of ", spec.at("dtype").string(), " on the CPU");
    bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
    for (size_t dim = 0; fits && dim < shape.size(); ++dim) {
      const int64_t length = tensor.size(static_cast<int64_t>(dim));
      if (shape[dim].kind == Value::kInteger) {
        fits = shape[dim].integer() == length;
        continue;
      }
      const auto& bounds = manifest.at("dims").at(shape[dim].string()).items;
      fits = length >= bounds.at(0).integer() &&
             (bounds.at(1).kind != Value::kInteger || length <= bounds.at(1).integer()) &&
             lengths.emplace(shape[dim].string(), length).first->second == length;
    }
    TORCH_CHECK_VALUE(fits, name, ": shape ", tensor.sizes(),
                      " must be the one that the manifest describes");
  }
};

ExportedModel::ExportedModel(const std::string& folder, const Group& group)
    : parts_(std::make_unique<Parts>()) {
  std::string problem, id = "0";
  try {
    parts_->load(folder, group);
    id = parts_->manifest.at("id").string();
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  } catch (const std::exception& error) {  // the other ranks wait for an answer
    problem = "folder: '" + folder + "' cannot be loaded: " + error.what();
  }
  agree(group, problem, id);
}

ExportedModel::ExportedModel(ExportedModel&&) noexcept = default;
ExportedModel& ExportedModel::operator=(ExportedModel&&) noexcept = default;
ExportedModel::~ExportedModel() = default;

std::vector<at::Tensor> ExportedModel::operator()(const std::vector<at::Tensor>& inputs) {
  const auto& specs = parts_->inputs;
  TORCH_CHECK_VALUE(inputs.size() == specs.size(), "inputs: ", inputs.size(), " tensors must be ",
                    specs.size());
  std::map<std::string, int64_t> lengths;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < inputs.size(); ++i) {
    parts_->check(inputs[i], specs[i], lengths);
    tensors.push_back(inputs[i].detach().contiguous());
  }
  const c10::NoGradGuard no_graph;
  return parts_->graph->run(tensors);
}

at::Tensor ExportedModel::generate(const at::Tensor& prompt, const GenerateOptions& options,
                                   const std::function<bool(int64_t)>& callback) {
  TORCH_CHECK_VALUE(parts_->generates(), "generate: the model was exported without generate=True");
  TORCH_CHECK_VALUE(options.max_new_tokens >= 1, "max_new_tokens: ", options.max_new_tokens,
                    " must be at least 1");
  std::map<std::string, int64_t> lengths;
  parts_->check(prompt, parts_->inputs.at(0), lengths);
  const int64_t batch = prompt.size(0), length = prompt.size(1),
                max_seq = parts_->manifest.at("max_seq").integer();
  TORCH_CHECK_VALUE(options.max_new_tokens <= max_seq - length, "max_new_tokens: ", length, " + ",
                    options.max_new_tokens, " tokens must not exceed max_seq = ", max_seq);
  TORCH_CHECK_VALUE(batch == 1 || (options.stop.empty() && !callback),
                    "prompt: stop and callback need one sequence, not ", batch);
  const bool sharded = parts_->manifest.at("logits").string() == "sharded";
  const ParallelGroup ranks = sharded ? parts_->group : ParallelGroup();
  const SampleOptions sample{parts_->manifest.at("vocab_size").integer(), options.temperature,
                             options.top_k, options.top_p};
  const c10::NoGradGuard no_graph;
  manual_seed(options.seed);
  for (at::Tensor& cache : parts_->caches) cache.zero_();  // a NaN would pass the mask
  std::vector<at::Tensor> texts{prompt}, inputs{prompt.contiguous(), at::Tensor()};
  inputs.insert(inputs.end(), parts_->caches.begin(), parts_->caches.end());
  int64_t position = 0;
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    inputs[1] = at::scalar_tensor(position, at::kLong);
    const at::Tensor logits = parts_->graph->run(inputs).at(0);
    position += inputs[0].size(1);
    const at::Tensor next = vocab_parallel_sample(logits, ranks, sample).unsqueeze(1);
    texts.push_back(next);
    inputs[0] = next;
    if (batch > 1) continue;
    const auto id = next.item<int64_t>();
    if (callback && !callback(id)) break;
    if (std::find(options.stop.begin(), options.stop.end(), id) != options.stop.end()) break;
  }
  return at::cat(texts, 1);
}

}  // namespace tp_ext
