#include "tp_ext/group.h"

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "api/foreign_backends.h"
#include "api/group_alias.h"
#include "shm/backend.h"

namespace tp_ext {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using Stores = std::map<std::pair<std::string, int64_t>, StorePtr>;  // by host and port

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  TORCH_CHECK_VALUE(value != nullptr && *value != '\0', name,
                    ": must be set, as torchrun does, or store, rank and size be given");
  return value;
}

int64_t number(const char* name) {
  const std::string text = variable(name);
  char* end = nullptr;
  const int64_t value = std::strtoll(text.c_str(), &end, 10);
  TORCH_CHECK_VALUE(*end == '\0' && value >= 0, name, ": '", text, "' must be a number");
  return value;
}

int64_t number_or(const char* variable, const char* argument, int64_t value) {
  TORCH_CHECK_VALUE(value >= -1, argument, ": ", value, " must not be negative, or -1 for ",
                    variable);
  return value == -1 ? number(variable) : value;
}

// The store of the job. It lives until the process ends: other ranks may still use rank 0's server
StorePtr store_of_job(std::chrono::milliseconds timeout) {
  static std::mutex mutex;
  static Stores& stores = *new Stores;
  const std::string host = variable("MASTER_ADDR");
  const int64_t port = number("MASTER_PORT");
  TORCH_CHECK_VALUE(port <= 65535, "MASTER_PORT: ", port, " must be at most 65535");
  const std::lock_guard lock(mutex);
  StorePtr& store = stores[{host, port}];
  if (store) return store;
  const char* of_agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer =
      number("RANK") == 0 && (of_agent == nullptr || std::string(of_agent) != "True");
  options.waitWorkers = false;
  options.timeout = timeout;
  store = c10::make_intrusive<c10d::TCPStore>(host, options);
  const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  store = c10::make_intrusive<c10d::PrefixStore>(
      std::string("tp_ext/attempt_") + (attempt == nullptr ? "0" : attempt), store);
  return store;
}

// A name that no other process has, which rank 0 gives the others: these may have other groups
std::string agree_on_name(const StorePtr& store, int64_t rank, int64_t size) {
  const auto rank_of = std::to_string(rank) + "/" + std::to_string(size);
  const auto calls = store->add("calls/" + rank_of, 1);  // the same on all ranks
  const auto key = "name/" + std::to_string(size) + "/" + std::to_string(calls);
  if (rank == 0) {
    std::ostringstream name;
    name << "tp_ext:" << calls << ":" << std::hex << std::random_device()();
    const std::string text = name.str();
    store->set(key, std::vector<uint8_t>(text.begin(), text.end()));
    return text;
  }
  const std::vector<uint8_t> text = store->get(key);
  return {text.begin(), text.end()};
}

// The process group of that name; null if there is none
ProcessGroupPtr registered(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    return {};
  }
}

ParallelGroup key_of(const std::string& name, int64_t rank, int64_t size) {
  return {name + "@" + std::to_string(rank) + "/" + std::to_string(size), rank, size};
}

}  // namespace

Group::Group(Group&& other) noexcept { *this = std::move(other); }

Group& Group::operator=(Group&& other) noexcept {
  if (this == &other) return *this;
  release();
  group_ = std::move(other.group_);
  name_ = std::exchange(other.name_, {});
  key_ = std::exchange(other.key_, {});
  registered_ = std::exchange(other.registered_, false);
  return *this;
}

Group::~Group() { release(); }

void Group::release() noexcept {
  if (!registered_) return;
  registered_ = false;
  try {
    c10d::unregister_process_group(name_);
  } catch (const std::exception&) {  // the program has unregistered it
  }
}

void Group::barrier() const {
  if (group_) group_->barrier()->wait();
}

Group group(ProcessGroupPtr process_group) {
  TORCH_CHECK_VALUE(process_group, "process_group: null must be a process group");
  Group result;
  result.name_ = process_group->getGroupName();
  TORCH_CHECK_VALUE(!result.name_.empty(), "process_group: must have a name, by setGroupName");
  if (!registered(result.name_)) {
    c10d::register_process_group(result.name_, process_group);
    result.registered_ = true;
  }
  TORCH_CHECK_VALUE(registered(result.name_) == process_group, "process_group: '", result.name_,
                    "' must not be the name of another registered group");
  result.key_ = key_of(result.name_, process_group->getRank(), process_group->getSize());
  result.group_ = std::move(process_group);
  return result;
}

Group init_group(GroupOptions options) {
  const std::string& backend = options.backend;
#ifdef TP_EXT_WITH_CUDA
  const bool on_gpu = backend == "nccl";
  const char* const backends = "tp_shm, gloo or nccl";
#else
  const bool on_gpu = false;
  const char* const backends = "tp_shm or gloo (this is a CPU-only build)";
#endif
  TORCH_CHECK_VALUE(backend == "tp_shm" || backend == "gloo" || on_gpu, "backend: '", backend,
                    "' must be ", backends);
  const int64_t rank = number_or("RANK", "rank", options.rank);
  const int64_t size = number_or("WORLD_SIZE", "size", options.size);
  TORCH_CHECK_VALUE(rank < size, "rank: ", rank, " must be less than size = ", size);
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "timeout: ", options.timeout.count(),
                    " ms must be positive");
  const bool named = !options.name.empty();
  TORCH_CHECK_VALUE(!named || !registered(options.name), "name: '", options.name,
                    "' must not be the name of a registered group");
  const StorePtr store = options.store ? options.store : store_of_job(options.timeout);
  store->setTimeout(options.timeout);
  const std::string name = named ? options.name : agree_on_name(store, rank, size);

  const int of = static_cast<int>(size), own = static_cast<int>(rank);
  const StorePtr own_keys = c10::make_intrusive<c10d::PrefixStore>("group/" + name, store);
  auto process_group = c10::make_intrusive<c10d::ProcessGroup>(own_keys, own, of);
  using Type = c10d::ProcessGroup::BackendType;
  auto type = backend == "gloo" ? Type::GLOO : Type::CUSTOM;
  c10::intrusive_ptr<c10d::Backend> ranks;
#ifdef TP_EXT_WITH_CUDA
  if (on_gpu) {
    type = Type::NCCL;
    ranks = make_nccl(own_keys, own, of, options.timeout);
  }
#endif
  if (backend == "gloo") ranks = make_gloo(own_keys, own, of, options.timeout);
  if (backend == "tp_shm") ranks = shm::create_backend(own_keys, own, of, options.timeout, name);
  process_group->setBackend(on_gpu ? c10::DeviceType::CUDA : c10::DeviceType::CPU, type, ranks);
  process_group->setDefaultBackend(type);
  process_group->setGroupName(name);
  return group(std::move(process_group));
}

GroupAlias::GroupAlias(std::string name, const Group& group) : name_(std::move(name)) {
  TORCH_CHECK_VALUE(!registered(name_), "folder: the export is in use; end that model first");
  c10d::register_process_group(name_, group.process_group());
}

GroupAlias::~GroupAlias() {
  try {
    c10d::unregister_process_group(name_);
  } catch (const std::exception&) {  // the program has unregistered it
  }
}

}  // namespace tp_ext
