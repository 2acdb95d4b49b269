#include "shm/rendezvous.h"

#include <new>

#include "shm/calls.h"

namespace tp_ext::shm {
namespace {

using c10d::Store;

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string key(const char* what, int rank) {
  return std::string("tp_shm/") + what + "/" + std::to_string(rank);
}

// What a rank tells, once it has come; raises with its number if it does not
std::string get(Store& store, const char* what, int rank, std::chrono::milliseconds timeout) {
  const std::string from = key(what, rank);
  try {
    store.wait({from}, timeout);
  } catch (const std::exception& error) {
    throw Failure("tp_shm: waited " + std::to_string(timeout.count()) + " ms for rank " +
                  std::to_string(rank) + ", which has not come to make the group: " + error.what());
  }
  const auto value = store.get(from);
  return {value.begin(), value.end()};
}

// Each rank tells how it fared ("" is well); raises on all if one fared badly
void agree(Store& store, const char* what, int rank, int size, std::chrono::milliseconds timeout,
           const std::string& own, const std::string& name) {
  store.set(key(what, rank), bytes_of("!" + own));
  std::string troubles;
  for (int other = 0; other < size; ++other) {
    const std::string trouble = get(store, what, other, timeout).substr(1);
    if (!trouble.empty()) troubles += " rank " + std::to_string(other) + ": " + trouble + ";";
  }
  if (troubles.empty()) return;
  troubles.pop_back();
  throw Failure("tp_shm: group '" + name + "' cannot be made:" + troubles);
}

void check_hosts(Store& store, int rank, int size, std::chrono::milliseconds timeout,
                 const std::string& name) {
  store.set(key("host", rank), bytes_of(host_identity()));
  // Containers have names of their own, and may share the memory nevertheless
  const auto machine = [](const std::string& h) { return h.substr(0, h.rfind(':')); };
  const std::string first = get(store, "host", 0, timeout);
  for (int other = 1; other < size; ++other) {
    const std::string host = get(store, "host", other, timeout);
    if (machine(host) == machine(first)) continue;
    const auto shown = [](const std::string& h) { return h.substr(h.rfind(':') + 1); };
    throw Failure("tp_shm: group '" + name + "': rank 0 runs on host " + shown(first) + ", rank " +
                  std::to_string(other) + " on host " + shown(host) +
                  ", or they do not share /dev/shm: all ranks must share the memory of one host; "
                  "use gloo between hosts");
  }
}

}  // namespace

Geometry geometry_for(int ranks) { return {ranks, 128 << 10, 256 << 10}; }

Segment meet(const c10::intrusive_ptr<Store>& store, int rank, int size,
             std::chrono::milliseconds timeout, const Geometry& geometry, const std::string& name) {
  check_hosts(*store, rank, size, timeout, name);
  std::unique_ptr<Segment> segment;
  std::string trouble;
  if (rank == 0) {
    try {
      segment = std::make_unique<Segment>(Segment::create(geometry.bytes(), geometry.reserved()));
      Header& header = *static_cast<Header*>(segment->base());
      header.bytes = static_cast<uint64_t>(geometry.bytes());
      header.ranks = static_cast<uint32_t>(size);
      header.magic = kMagic;
    } catch (const std::exception& error) {
      trouble = error.what();
    }
    store->set(key("name", 0), bytes_of(segment ? "!" + segment->name() : "!"));
  }
  const std::string shared_name = get(*store, "name", 0, timeout).substr(1);
  if (rank != 0 && !shared_name.empty()) {
    try {
      segment = std::make_unique<Segment>(Segment::open(shared_name, geometry.bytes()));
      const Header& header = *static_cast<const Header*>(segment->base());
      if (header.magic != kMagic || header.ranks != static_cast<uint32_t>(size))
        throw Failure("shared memory " + shared_name + ": is not of a group of " +
                      std::to_string(size));
    } catch (const std::exception& error) {
      trouble = error.what();
    }
  }
  try {
    if (segment) segment->mark_alive(rank);
    agree(*store, "joined", rank, size, timeout, trouble, name);
  } catch (...) {
    if (segment) segment->unlink();
    throw;
  }
  segment->unlink();  // by whoever comes first
  return std::move(*segment);
}

}  // namespace tp_ext::shm
