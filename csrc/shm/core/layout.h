// The memory shared by the ranks of a group, and the one protocol by which they exchange data.
//
//   header    magic number, joined ranks, and the reason of an abort
//   lanes     2 per group; in each, `slots` slots per rank, used in turn, step by step
//   rings     one per ordered pair of ranks, for send and receive (point_to_point.h)
//
// Step k of a lane: a rank writes into its slot k % slots, then posts it; readers read it once it
// is posted, then finish the step. A slot is written again when all ranks have finished the step
// that it held. Posting is a release and seeing it an acquire, and so is finishing: nothing else
// orders the payload, on any processor.
//
// A peer is trusted for the payload of a step that it posts, and for having read a step that it
// finishes. Every other word of a peer is read once, checked, and only then used: an impossible one
// raises Failure. A rank never reads back a position of its own.
//
// Torch-free, so that it can be run under a race detector with threads as ranks.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tp_ext::shm {

constexpr int kMaxRanks = 64;
constexpr int kLanes = 2;
constexpr int kSlots = 4;
constexpr int64_t kLine = 64;  // bytes that no two writers share
constexpr int64_t kMessageHead = 16;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raised for a word of the shared memory that no rank can have written
[[noreturn]] inline void damaged(const char* what, int rank, uint64_t value) {
  throw Failure("the shared memory is damaged: " + std::string(what) + " of rank " +
                std::to_string(rank) + " is " + std::to_string(value));
}

// Copies a record that a peer may overwrite at any time. The fence keeps the compiler from reading
// the shared memory again where the copy is used.
template <typename T>
T read_once(const void* shared) {
  T copy;
  std::memcpy(&copy, shared, sizeof copy);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return copy;
}

// Describes a call to the other ranks, so that ranks that make different calls notice it
struct Signature {
  uint32_t kind = 0, type = 0, op = 0, root = 0;
  uint64_t count = 0, call = 0;  // elements; number of the call in the group
  uint64_t parts = 0;    // a hash of the shape, or of the division of the elements over ranks
  uint64_t history = 0;  // a hash of the calls before: a root does not read the others' slots

  bool same_call(const Signature& other) const {
    return kind == other.kind && type == other.type && op == other.op && root == other.root &&
           count == other.count && call == other.call && parts == other.parts;
  }
  bool operator==(const Signature& other) const {
    return same_call(other) && history == other.history;
  }
};

struct alignas(kLine) Line {
  std::atomic<uint64_t> posted;  // 1 + the step that the slot holds
  Signature signature;
};

static_assert(sizeof(Line) == kLine);

struct alignas(kLine) Counter {
  std::atomic<uint64_t> value;
};

// The stream of bytes of one ordered pair: positions written and read since the beginning
struct Ring {
  Counter written, read;
};

struct alignas(kLine) Header {
  uint64_t magic, bytes;
  uint32_t ranks;
  std::atomic<uint32_t> aborted_by;  // 1 + the first rank that gave up; it writes the reason
  std::atomic<uint32_t> reason_ready;
  std::atomic<uint64_t> left;    // bit r: rank r has left the group
  std::atomic<uint64_t> joined;  // bit r: rank r has opened this memory
  std::atomic<uint32_t> made;    // rank 0: all have joined
  char reason[512];              // ends with 0
};

// The first rank that gives up writes the reason; the others fail because of it
inline void abort_group(Header& header, int rank, const std::string& reason) {
  uint32_t none = 0;
  if (!header.aborted_by.compare_exchange_strong(none, static_cast<uint32_t>(rank) + 1)) return;
  std::strncpy(header.reason, reason.c_str(), sizeof header.reason - 1);
  header.reason_ready.store(1, std::memory_order_release);
}

// The reason of the abort, "" until it is written
inline std::string reason_of(const Header& header) {
  if (!header.reason_ready.load(std::memory_order_acquire)) return "";
  return std::string(header.reason, strnlen(header.reason, sizeof header.reason));
}

constexpr uint64_t kMagic = 0x74705f73686d3032;  // "tp_shm02"

struct Geometry {
  int ranks;
  int64_t slot_bytes, ring_bytes;

  int64_t lines() const { return sizeof(Header); }
  int64_t finished() const { return lines() + kLanes * kSlots * ranks * int64_t(sizeof(Line)); }
  int64_t ring_heads() const { return finished() + kLanes * ranks * int64_t(sizeof(Counter)); }
  int64_t slots() const { return page(ring_heads() + int64_t(ranks) * ranks * sizeof(Ring)); }
  int64_t rings() const { return slots() + kLanes * kSlots * ranks * slot_bytes; }
  // Everything but the rings is in use from the start; a ring costs nothing before its first
  // message
  int64_t reserved() const { return rings(); }
  int64_t bytes() const { return rings() + int64_t(ranks) * ranks * ring_bytes; }
  // A rank has at least one line of every slot, and a ring holds at least the head of a message
  bool valid() const {
    return 1 <= ranks && ranks <= kMaxRanks && slot_bytes >= ranks * kLine &&
           slot_bytes % kLine == 0 && ring_bytes >= kMessageHead;
  }

 private:
  static int64_t page(int64_t n) { return (n + 4095) / 4096 * 4096; }
};

// Addresses in the shared memory. Zeros are its initial state.
class Shared {
 public:
  Shared(void* base, Geometry geometry) : base_(static_cast<char*>(base)), geometry_(geometry) {}

  const Geometry& geometry() const { return geometry_; }
  int ranks() const { return geometry_.ranks; }
  Header& header() const { return at<Header>(0); }
  Line& line(int lane, int rank, uint64_t step) const {
    return at<Line>(geometry_.lines() + slot_index(lane, rank, step) * int64_t(sizeof(Line)));
  }
  std::atomic<uint64_t>& finished(int lane, int rank) const {
    const int64_t index = int64_t(lane) * ranks() + rank;
    return at<Counter>(geometry_.finished() + index * int64_t(sizeof(Counter))).value;
  }
  char* slot(int lane, int rank, uint64_t step) const {
    return base_ + geometry_.slots() + slot_index(lane, rank, step) * geometry_.slot_bytes;
  }
  Ring& ring(int from, int to) const {
    return at<Ring>(geometry_.ring_heads() + pair(from, to) * int64_t(sizeof(Ring)));
  }
  int64_t ring_offset(int from, int to) const {
    return geometry_.rings() + pair(from, to) * geometry_.ring_bytes;
  }
  char* ring_bytes(int from, int to) const { return base_ + ring_offset(from, to); }

 private:
  int64_t slot_index(int lane, int rank, uint64_t step) const {
    return (int64_t(lane) * ranks() + rank) * kSlots + int64_t(step % kSlots);
  }
  int64_t pair(int from, int to) const { return int64_t(from) * ranks() + to; }
  template <typename T>
  T& at(int64_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }

  char* base_;
  Geometry geometry_;
};

// One rank's view of a lane: its progress
class Lane {
 public:
  Lane(const Shared& shared, int lane, int rank) : shared_(&shared), lane_(lane), rank_(rank) {}

  uint64_t begun = 0;  // steps reserved by calls so far; the steps of a call follow them

  // Whether this rank's slot may be written again. No rank is more than `slots` steps ahead of this
  // rank: to go on, it needs this rank to finish.
  bool free(uint64_t step) const {
    if (step < kSlots) return true;
    for (int rank = 0; rank < shared_->ranks(); ++rank) {
      const uint64_t steps = shared_->finished(lane_, rank).load(std::memory_order_acquire);
      if (steps > step + kSlots) damaged("the number of finished steps", rank, steps);
      if (steps + kSlots < step + 1) return false;
    }
    return true;
  }
  void post(uint64_t step, const Signature& signature) const {
    Line& line = shared_->line(lane_, rank_, step);
    line.signature = signature;
    line.posted.store(step + 1, std::memory_order_release);
  }
  bool posted(uint64_t step, int rank) const { return posted_in(step, rank) == step + 1; }
  // The same if this rank has not finished the step: no later step can be in its slot
  bool arrived(uint64_t step, int rank) const {
    const uint64_t value = posted_in(step, rank);
    if (value > step + 1) damaged("a posted step", rank, value);
    return value == step + 1;
  }
  bool all_arrived(uint64_t step) const {
    for (int rank = 0; rank < shared_->ranks(); ++rank)
      if (!arrived(step, rank)) return false;
    return true;
  }
  void finish(uint64_t step) const {
    shared_->finished(lane_, rank_).store(step + 1, std::memory_order_release);
  }
  bool finished(uint64_t step, int rank) const {
    return shared_->finished(lane_, rank).load(std::memory_order_acquire) > step;
  }
  Signature signature(uint64_t step, int rank) const {
    return read_once<Signature>(&shared_->line(lane_, rank, step).signature);
  }
  char* own(uint64_t step) const { return shared_->slot(lane_, rank_, step); }
  const char* of(uint64_t step, int rank) const { return shared_->slot(lane_, rank, step); }

 private:
  uint64_t posted_in(uint64_t step, int rank) const {
    return shared_->line(lane_, rank, step).posted.load(std::memory_order_acquire);
  }

  const Shared* shared_;
  int lane_, rank_;
};

}  // namespace tp_ext::shm
