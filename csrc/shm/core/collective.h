// Collectives as state machines over lanes. advance() does what can be done without waiting, so that
// one thread can serve several of them, and whoever waits can help.
//
// All ranks take the same steps in the same order. Elements are summed in the order of the ranks, by
// one rank or by all alike, so the result has the same bits everywhere and in every run.

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
const char* type_name(uint32_t type);  // of c10's dtype with this number

// Who takes part
struct Party {
  const Shared* shared;
  Lane* lanes;  // kLanes of them
  int rank;

  int ranks() const { return shared->ranks(); }
  int64_t slot_bytes() const { return shared->geometry().slot_bytes; }
};

class Call {
 public:
  Call(const Party& party, Kind kind) : party_(party), kind_(kind) {}
  virtual ~Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Kind kind() const { return kind_; }
  // Takes its steps; `number` counts the group's calls, `history` is a hash of those before. The
  // calls of a group begin and end in turn.
  virtual void begin(uint64_t number, uint64_t history) = 0;
  // The hash with this one, which is the same on all ranks
  virtual uint64_t history() const = 0;
  // Whether all is done; raises Failure if another rank makes another call
  virtual bool advance() = 0;
  // The ranks that it waits for
  virtual std::vector<int> missing() const = 0;
  // Whether the others have all that they need of this rank, if only they come
  virtual bool given() const = 0;
  // Grows whenever something has been done
  uint64_t moves() const { return moves_; }

 protected:
  void check(int rank, const Signature& theirs, const Signature& expected) const;
  static uint64_t continued(const Signature& common);

  const Party party_;
  uint64_t moves_ = 0;

 private:
  const Kind kind_;
};

// Steps of one lane: write, post; see the sources' posts, read, finish
class Steps : public Call {
 public:
  void begin(uint64_t number, uint64_t history) override;
  uint64_t history() const override { return continued(common()); }
  bool advance() override;
  // Who writes on needs the slots that the others have read
  bool given() const override {
    return sized_ && (!writes_ || written_ == steps_) && steps_ - read_ <= kSlots;
  }
  std::vector<int> missing() const override;

 protected:
  Steps(const Party& party, Kind kind, int64_t steps, Signature signature);

  virtual void write(int64_t step, char* slot) = 0;
  virtual void read(int64_t step) = 0;
  virtual Signature expected(int) const { return signature_; }
  virtual Signature common() const { return signature_; }
  const Signature& signature() const { return signature_; }
  const char* of(int64_t step, int rank) const { return lane().of(base_ + step, rank); }
  Lane& lane() const { return party_.lanes[0]; }
  void only_from(int root);  // root writes, the others read

  int64_t steps_;
  bool writes_ = true;
  bool sized_ = true;         // whether steps_ is final
  std::vector<int> sources_;  // whose slots are read; at first everybody's

 private:
  Signature signature_;
  uint64_t base_ = 0;
  int64_t written_ = 0, read_ = 0;
};

class Barrier : public Steps {
 public:
  explicit Barrier(const Party& party) : Steps(party, Kind::kBarrier, 1, {}) {}

 protected:
  void write(int64_t, char*) override {}
  void read(int64_t) override {}
};

}  // namespace tp_ext::shm
