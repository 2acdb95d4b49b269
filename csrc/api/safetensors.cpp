#include "tp_ext/safetensors.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <sstream>

#include "api/json.h"
#include "api/sharding.h"
#include "comm/collectives.h"
#include "types.h"

namespace tp_ext {
namespace {

namespace fs = std::filesystem;
using nn::ParallelModule;

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {
    {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},  {"BF16", at::kBFloat16},
    {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort}, {"I8", at::kChar},
    {"U8", at::kByte},    {"BOOL", at::kBool}};

// A parameter or buffer of a module, and how it is sharded
struct StateEntry {
  std::string name;
  Tensor tensor;
  nn::Sharding sharding;
  ParallelGroup group;
  std::vector<int64_t> full_shape;
};

std::vector<StateEntry> entries_of(const torch::nn::Module& module) {
  std::vector<StateEntry> entries;
  for (const auto& [prefix, layer] : nn::layers_of(module)) {
    const auto* parallel = dynamic_cast<const ParallelModule*>(layer);
    for (const auto& item : layer->named_parameters(false)) {
      StateEntry entry{prefix + item.key(), item.value(), {}, {}, item.value().sizes().vec()};
      if (parallel != nullptr) {
        const auto& known = parallel->layout().at(item.key());
        entry.sharding = known.sharding;
        entry.full_shape = known.full_shape;
        entry.group = parallel->tp_group();
      }
      entries.push_back(std::move(entry));
    }
    for (const auto& item : layer->named_buffers(false))
      entries.push_back({prefix + item.key(), item.value(), {}, {}, item.value().sizes().vec()});
  }
  return entries;
}

// The groups over which the entries are sharded, each once
std::vector<ParallelGroup> groups_of(const torch::nn::Module& module) {
  std::map<std::string, ParallelGroup> groups;
  for (const auto& [prefix, layer] : nn::layers_of(module)) {
    const auto* parallel = dynamic_cast<const ParallelModule*>(layer);
    if (parallel != nullptr && parallel->tp_group().size > 1)
      groups[parallel->tp_group().name] = parallel->tp_group();
  }
  std::vector<ParallelGroup> result;
  for (const auto& [name, group] : groups) result.push_back(group);
  return result;
}

// Raises on all ranks if one has an error
void agree(const std::string& error, const std::vector<ParallelGroup>& groups,
           const at::Device& device, const std::string& path) {
  double failed = error.empty() ? 0 : 1;
  for (const ParallelGroup& group : groups) {
    const Tensor flag =
        at::full({1}, failed, at::TensorOptions().dtype(at::kDouble).device(device));
    failed += comm::all_reduce(flag, group.name).item<double>();
  }
  TORCH_CHECK_VALUE(error.empty(), "path: '", path, "': ", error);
  TORCH_CHECK_VALUE(failed == 0, "path: '", path, "': another rank has an error");
}

// What `step` raises, as a text; empty if nothing
std::string error_of(const std::function<void()>& step) {
  try {
    step();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// A file in memory, read when it is used
class MappedFile {
 public:
  explicit MappedFile(const fs::path& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    TORCH_CHECK_VALUE(file >= 0, "'", path.string(), "' cannot be read: ", std::strerror(errno));
    struct stat status {};
    const bool known = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    size_ = known ? static_cast<uint64_t>(status.st_size) : 0;
    void* data = size_ > 0 ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    ::close(file);
    TORCH_CHECK_VALUE(data != MAP_FAILED, "'", path.string(), "' cannot be read as a file");
    data_ = static_cast<char*>(data);
  }
  ~MappedFile() { ::munmap(data_, size_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  uint64_t size_ = 0;
};

// The tensors of an export by name, in the memory of its files
struct Sources {
  std::vector<std::unique_ptr<MappedFile>> files;
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> tied;  // an entry that is not written -> the one it equals
};

Tensor tensor_at(const json::Value& entry, char* data, uint64_t size) {
  const std::string& name = entry.at("dtype").string();
  const auto* dtype = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                   [&](const auto& known) { return name == known.first; });
  TORCH_CHECK_VALUE(dtype != std::end(kDtypes), "dtype ", name, " is not supported");
  const auto shape = entry.at("shape").integers(), place = entry.at("data_offsets").integers();
  uint64_t bytes = c10::elementSize(dtype->second);
  for (const int64_t n : shape) {
    TORCH_CHECK_VALUE(n >= 0 && (n == 0 || bytes <= size / static_cast<uint64_t>(n)),
                      "a shape of more elements than the file has");
    bytes *= static_cast<uint64_t>(n);
  }
  TORCH_CHECK_VALUE(place.size() == 2 && place[0] >= 0 && place[1] >= place[0] &&
                        static_cast<uint64_t>(place[1]) <= size &&
                        static_cast<uint64_t>(place[1] - place[0]) == bytes,
                    "data_offsets that are not those of the shape, in the file");
  return at::from_blob(data + place[0], shape, at::TensorOptions().dtype(dtype->second));
}

void add_file(const fs::path& path, Sources& sources) {
  sources.files.push_back(std::make_unique<MappedFile>(path));
  const MappedFile& file = *sources.files.back();
  uint64_t head = 0;
  TORCH_CHECK_VALUE(file.size() >= sizeof head, "'", path.string(), "' is no safetensors file");
  std::memcpy(&head, file.data(), sizeof head);
  TORCH_CHECK_VALUE(head <= file.size() - sizeof head, "'", path.string(),
                    "' is no complete safetensors file");
  const auto table = json::parse({file.data() + sizeof head, head});
  char* const data = file.data() + sizeof head + head;
  for (const auto& [name, entry] : table.members) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.members) sources.tied[key] = value.string();
      continue;
    }
    Tensor tensor;
    const auto error =
        error_of([&] { tensor = tensor_at(entry, data, file.size() - sizeof head - head); });
    TORCH_CHECK_VALUE(error.empty(), "'", path.string(), "': '", name, "' has ", error);
    TORCH_CHECK_VALUE(sources.tensors.emplace(name, tensor).second, "'", name, "' is in two files");
  }
}

Sources open_sources(const fs::path& path) {
  fs::path file = path;
  if (fs::is_directory(path)) {
    file = path / "model.safetensors";
    if (!fs::exists(file)) file = path / "model.safetensors.index.json";
  }
  Sources sources;
  if (file.extension() != ".json") {
    add_file(file, sources);
    return sources;
  }
  const MappedFile index(file);
  const json::Value table = json::parse({index.data(), index.size()});
  std::set<std::string> names;
  for (const auto& [name, part] : table.at("weight_map").members) names.insert(part.string());
  for (const auto& name : names) add_file(file.parent_path() / name, sources);
  return sources;
}

std::string joined(const std::set<std::string>& names) {
  std::string result;
  for (const auto& name : names) result += (result.empty() ? "" : ", ") + name;
  return result;
}

void match(const std::vector<StateEntry>& entries, Sources& sources) {
  std::set<std::string> missing, unexpected, known;
  for (const auto& entry : entries) {
    known.insert(entry.name);
    const auto tied = sources.tied.find(entry.name);
    if (sources.tensors.count(entry.name) == 0 && tied != sources.tied.end() &&
        sources.tensors.count(tied->second) == 1)
      sources.tensors[entry.name] = sources.tensors[tied->second];
    if (sources.tensors.count(entry.name) == 0) missing.insert(entry.name);
  }
  for (const auto& [name, tensor] : sources.tensors)
    if (known.count(name) == 0) unexpected.insert(name);
  TORCH_CHECK_VALUE(missing.empty() && unexpected.empty(),
                    "missing names: ", missing.empty() ? "none" : joined(missing),
                    "; unexpected: ", unexpected.empty() ? "none" : joined(unexpected));
  for (const auto& entry : entries) {
    const Tensor& source = sources.tensors.at(entry.name);
    TORCH_CHECK_VALUE(source.sizes() == at::IntArrayRef(entry.full_shape), "'", entry.name,
                      "' has shape ", source.sizes(), " and must have ",
                      at::IntArrayRef(entry.full_shape));
    TORCH_CHECK_VALUE(source.is_floating_point() == entry.tensor.is_floating_point(), "'",
                      entry.name, "' is of ", source.scalar_type(), " and the module's of ",
                      entry.tensor.scalar_type());
  }
}

at::Device device_of(const std::vector<StateEntry>& entries) {
  return entries.empty() ? at::Device(at::kCPU) : entries[0].tensor.device();
}

void write(const fs::path& path, const std::vector<StateEntry>& entries,
           const std::vector<Tensor>& tensors) {
  const fs::path temporary = path.string() + ".tmp";
  std::ostringstream head;
  head << R"({"__metadata__":{"format":"pt"})";
  uint64_t end = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Tensor& t = tensors[i];
    const auto* dtype =
        std::find_if(std::begin(kDtypes), std::end(kDtypes),
                     [&](const auto& known) { return t.scalar_type() == known.second; });
    TORCH_CHECK_VALUE(dtype != std::end(kDtypes), "'", entries[i].name, "' is of ", t.scalar_type(),
                      ", which a file cannot hold");
    head << "," << json::quoted(entries[i].name) << R"(:{"dtype":")" << dtype->first
         << R"(","shape":[)";
    for (int64_t d = 0; d < t.dim(); ++d) head << (d > 0 ? "," : "") << t.size(d);
    head << R"(],"data_offsets":[)" << end << "," << end + t.nbytes() << "]}";
    end += t.nbytes();
  }
  head << "}";
  std::string text = head.str();
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  std::ofstream file(temporary, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file << text;
  for (const Tensor& t : tensors)
    file.write(static_cast<const char*>(t.const_data_ptr()),
               static_cast<std::streamsize>(t.nbytes()));
  file.close();
  TORCH_CHECK_VALUE(file.good(), "'", temporary.string(), "' cannot be written");
  fs::rename(temporary, path);
}

}  // namespace

void load_safetensors(const std::string& path, torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const auto entries = entries_of(module);
  Sources sources;
  const auto error = error_of([&] {
    sources = open_sources(path);
    match(entries, sources);
  });
  agree(error, groups_of(module), device_of(entries), path);
  for (const auto& entry : entries) {
    const Tensor& full = sources.tensors.at(entry.name);
    if (entry.sharding.parts.empty()) {
      entry.tensor.copy_(full);
      continue;
    }
    const int64_t dim = entry.sharding.dim;
    for (const auto& share : shares(entry.sharding, entry.group))
      entry.tensor.narrow(dim, share.start, share.length)
          .copy_(full.narrow(dim, share.full_start, share.length));
  }
}

void save_safetensors(const std::string& path, const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  auto entries = entries_of(module);
  // Wide dtypes first, for alignment, as the Python side writes them
  std::sort(entries.begin(), entries.end(), [](const StateEntry& a, const StateEntry& b) {
    const auto width = [](const StateEntry& e) {
      return -static_cast<int64_t>(e.tensor.itemsize());
    };
    return std::make_pair(width(a), a.name) < std::make_pair(width(b), b.name);
  });
  const auto groups = groups_of(module);
  bool writes = true;
  for (const auto& group : groups) writes = writes && group.rank == 0;
  std::vector<Tensor> tensors;
  for (const auto& entry : entries) {
    const Tensor full = unshard(entry.tensor.detach(), entry.sharding, entry.group);
    tensors.push_back(writes ? full.cpu().contiguous() : Tensor());
  }
  fs::path file = path;
  if (file.extension() != ".safetensors") file /= "model.safetensors";
  const auto error = error_of([&] {
    if (!writes) return;
    if (file.has_parent_path()) fs::create_directories(file.parent_path());
    write(file, entries, tensors);
  });
  agree(error, groups, device_of(entries), path);
}

}  // namespace tp_ext
