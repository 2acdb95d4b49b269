// Groups of ranks: process groups of c10d under names that the operators find.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tp_ext/export.h"

namespace tp_ext {

/// What modules and functions keep of a group: its name as operators take it, rank and size. The
/// group itself must live as long as they communicate.
struct ParallelGroup {
  std::string name{};  ///< as in "0@1/4"; empty: one rank
  int64_t rank = 0;
  int64_t size = 1;
};

/// Ranks that compute together. It registers a process group under its name while it lives, and
/// unregisters it at its end; it can be moved, not copied.
class TP_EXT_API Group {
 public:
  /// One rank: nothing is sharded, and nothing communicates.
  Group() = default;
  Group(Group&& other) noexcept;
  Group& operator=(Group&& other) noexcept;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group();

  int64_t rank() const { return key_.rank; }
  int64_t size() const { return key_.size; }
  /// The name of the process group; empty for one rank without a process group.
  const std::string& name() const { return name_; }
  /// Waits until all ranks have called it. Errors: those of the backend (std::exception), after its
  /// timeout.
  void barrier() const;

  /// The process group; null for one rank without one.
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const { return group_; }
  operator const ParallelGroup&() const { return key_; }

 private:
  friend TP_EXT_API Group group(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  void release() noexcept;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
  ParallelGroup key_;
  bool registered_ = false;  // by this object
};

/// Arguments of init_group.
struct GroupOptions {
  /// "tp_shm" (ranks on one host, in shared memory), "gloo", or in a CUDA build "nccl".
  std::string backend = "tp_shm";
  /// Where the ranks meet; default: the store of the job, at MASTER_ADDR and MASTER_PORT, which the
  /// process opens once.
  c10::intrusive_ptr<c10d::Store> store = {};
  int64_t rank = -1;  ///< default: RANK
  int64_t size = -1;  ///< default: WORLD_SIZE
  /// The name, the same on all ranks, by which they meet in the store. Default: a new one, for the
  /// first, second, .. call of the same ranks of a store.
  std::string name = "";
  /// Of the meeting and of every collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Makes a group; all its ranks call this. Without a store, RANK, WORLD_SIZE, MASTER_ADDR and
/// MASTER_PORT must be set, as by `torchrun --no-python`.
///
/// Errors: c10::Error for an unknown backend, a variable that is not set or no number, a rank outside
/// of the group, a name that is in use; std::exception, after the timeout, for ranks that did not
/// come.
TP_EXT_API Group init_group(GroupOptions options = {});

/// Returns the group of a process group that the program has made. Registers it, for as long as the
/// returned object lives, if it is not registered.
///
/// Errors (c10::Error): null, no name, or a name under which another group is registered.
TP_EXT_API Group group(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

}  // namespace tp_ext
