// The memory that the ranks of a group share, and the one protocol by which they exchange.
//
//   header    geometry, and why somebody gave up
//   lanes     2 per group; in each, `slots` slots per rank, used in turn, step by step
//   rings     one per ordered pair of ranks, for send and receive (messages.h)
//
// Step k of a lane: a rank writes into its own slot k % slots, then posts it; whoever reads it does
// so once it is posted, then finishes the step. A slot is written again when all ranks have
// finished the step that it held. Posting is a release and seeing it an acquire, and so is
// finishing: nothing else orders the payload, on any processor.
//
// Torch-free, so that it can be run under a race detector with threads for ranks.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace tp_ext::shm {

constexpr int kMaxRanks = 64;
constexpr int kLanes = 2;
constexpr int kSlots = 4;
constexpr int64_t kLine = 64;  // bytes that no two writers share

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

// What a rank says of a call beside its data, so that ranks in different calls find out
struct Signature {
  uint32_t kind = 0, type = 0, op = 0, root = 0;
  uint64_t count = 0, call = 0;  // elements; number of the call in the group
  uint64_t parts = 0;            // a hash of how the elements are divided, where that is free
  uint64_t history = 0;          // a hash of the calls before: a root does not look at the others

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

// One ordered pair's stream of bytes: positions written and read since the beginning
struct Ring {
  Counter written, read;
};

struct alignas(kLine) Header {
  uint64_t magic, bytes;
  uint32_t ranks;
  std::atomic<uint32_t> given_up;  // 1 + the rank that did so first; the reason is written then
  std::atomic<uint32_t> reason_ready;
  std::atomic<uint64_t> left;  // bit r: rank r has left the group
  char reason[512];
};

constexpr uint64_t kMagic = 0x74705f73686d3031;  // "tp_shm01"

struct Geometry {
  int ranks;
  int64_t slot_bytes, ring_bytes;

  int64_t lines() const { return sizeof(Header); }
  int64_t finished() const { return lines() + kLanes * kSlots * ranks * int64_t(sizeof(Line)); }
  int64_t ring_heads() const { return finished() + kLanes * ranks * int64_t(sizeof(Counter)); }
  int64_t slots() const { return page(ring_heads() + int64_t(ranks) * ranks * sizeof(Ring)); }
  int64_t rings() const { return slots() + kLanes * kSlots * ranks * slot_bytes; }
  // All but the rings is in use from the start; a ring costs nothing before its first message
  int64_t reserved() const { return rings(); }
  int64_t bytes() const { return rings() + int64_t(ranks) * ranks * ring_bytes; }
  // Each rank has a line of every slot at least, and a ring holds a message's head
  bool valid() const {
    return 1 <= ranks && ranks <= kMaxRanks && slot_bytes >= ranks * kLine &&
           slot_bytes % kLine == 0 && ring_bytes >= 16;
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

// One rank's view of a lane: how far it has come
class Lane {
 public:
  Lane(const Shared& shared, int lane, int rank) : shared_(&shared), lane_(lane), rank_(rank) {}

  uint64_t begun = 0;  // steps that calls have taken so far; a call's steps follow it

  // Whether the own slot may be written again
  bool free(uint64_t step) const {
    if (step < kSlots) return true;
    for (int rank = 0; rank < shared_->ranks(); ++rank)
      if (shared_->finished(lane_, rank).load(std::memory_order_acquire) + kSlots < step + 1)
        return false;
    return true;
  }
  void post(uint64_t step, const Signature& signature) const {
    Line& line = shared_->line(lane_, rank_, step);
    line.signature = signature;
    line.posted.store(step + 1, std::memory_order_release);
  }
  bool posted(uint64_t step, int rank) const {
    return shared_->line(lane_, rank, step).posted.load(std::memory_order_acquire) == step + 1;
  }
  bool all_posted(uint64_t step) const {
    for (int rank = 0; rank < shared_->ranks(); ++rank)
      if (!posted(step, rank)) return false;
    return true;
  }
  void finish(uint64_t step) const {
    shared_->finished(lane_, rank_).store(step + 1, std::memory_order_release);
  }
  bool finished(uint64_t step, int rank) const {
    return shared_->finished(lane_, rank).load(std::memory_order_acquire) > step;
  }
  const Signature& signature(uint64_t step, int rank) const {
    return shared_->line(lane_, rank, step).signature;
  }
  char* own(uint64_t step) const { return shared_->slot(lane_, rank_, step); }
  const char* of(uint64_t step, int rank) const { return shared_->slot(lane_, rank, step); }

 private:
  const Shared* shared_;
  int lane_, rank_;
};

}  // namespace tp_ext::shm
