// Collectives as state machines over lanes. advance() makes all progress that needs no waiting, so
// that one thread can serve several of them, and any waiting thread can help.
//
// All ranks take the same steps in the same order. Elements are summed in the order of the ranks,
// by one rank or by all alike, so the result has the same bits everywhere and in every run.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shm/core/layout.h"

namespace tp_ext::shm {

enum class Kind : uint32_t {
  kAllReduce = 1,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kBarrier,
};
const char* name_of(Kind kind);
const char* type_name(uint32_t type);  // name of c10's dtype with this number

// One rank's handle of the shared memory
struct Member {
  const Shared* shared;
  Lane* lanes;  // kLanes of them
  int rank;

  int ranks() const { return shared->ranks(); }
  int64_t slot_bytes() const { return shared->geometry().slot_bytes; }
};

class Collective {
 public:
  Collective(const Member& member, Kind kind) : member_(member), kind_(kind) {}
  virtual ~Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  Kind kind() const { return kind_; }
  // Reserves its steps; `number` counts the group's calls, `history` is a hash of the calls before.
  // The calls of a group begin and end in order.
  virtual void begin(uint64_t number, uint64_t history) = 0;
  // The hash that includes this call, the same on all ranks
  virtual uint64_t history() const = 0;
  // Returns whether the call is complete; raises Failure if another rank makes another call
  virtual bool advance() = 0;
  // The ranks that it waits for
  virtual std::vector<int> missing() const = 0;
  // Whether this rank has contributed everything that the others need
  virtual bool given() const = 0;
  // Grows with every step made
  uint64_t progress() const { return progress_; }

 protected:
  void check(int rank, const Signature& theirs, const Signature& expected) const;
  static uint64_t continued(const Signature& common);

  const Member member_;
  uint64_t progress_ = 0;

 private:
  const Kind kind_;
};

// Steps on one lane: write, post; wait for the sources' posts, read, finish
class SteppedCollective : public Collective {
 public:
  void begin(uint64_t number, uint64_t history) override;
  uint64_t history() const override { return continued(common()); }
  bool advance() override;
  // To write more, a rank needs slots that the others have read
  bool given() const override {
    return sized_ && (!writes_ || written_ == steps_) && steps_ - read_ <= kSlots;
  }
  std::vector<int> missing() const override;

 protected:
  SteppedCollective(const Member& member, Kind kind, int64_t steps, Signature signature);

  virtual void write(int64_t step, char* slot) = 0;
  virtual void read(int64_t step) = 0;
  virtual Signature expected(int) const { return signature_; }
  virtual Signature common() const { return signature_; }
  const Signature& signature() const { return signature_; }
  const char* of(int64_t step, int rank) const { return lane().of(base_ + step, rank); }
  Lane& lane() const { return member_.lanes[0]; }
  void only_from(int root);  // root writes, the others read

  int64_t steps_;
  bool writes_ = true;
  bool sized_ = true;         // whether steps_ is final
  std::vector<int> sources_;  // ranks whose slots are read; initially all

 private:
  Signature signature_;
  uint64_t base_ = 0;
  int64_t written_ = 0, read_ = 0;
};

class Barrier : public SteppedCollective {
 public:
  explicit Barrier(const Member& member) : SteppedCollective(member, Kind::kBarrier, 1, {}) {}

 protected:
  void write(int64_t, char*) override {}
  void read(int64_t) override {}
};

}  // namespace tp_ext::shm
