// Collectives as state machines over lanes. advance() does what can be done without waiting, so that
// one thread can serve several of them, and whoever waits can help.
//
// All ranks take the same steps in the same order. Elements are summed in the order of the ranks, by
// one rank or by all alike, so the result has the same bits everywhere and in every run.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "shm/shared.h"

namespace tp_ext::shm {

// out[i] = in[0][i] + in[1][i] + .., or another operation, rounded once; out may be one of in
using Combine = void (*)(void* out, const void* const* in, int n, int64_t count);

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

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
  // Takes its steps; `number` counts the group's calls. The calls of a group begin and end in turn.
  virtual void begin(uint64_t number) = 0;
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

  const Party party_;
  uint64_t moves_ = 0;

 private:
  const Kind kind_;
};

// Steps of one lane: write, post; see the sources' posts, read, finish
class Steps : public Call {
 public:
  void begin(uint64_t number) override;
  bool advance() override;
  bool given() const override { return !writes_ || written_ == steps_; }
  std::vector<int> missing() const override;

 protected:
  Steps(const Party& party, Kind kind, int64_t steps, Signature signature);

  virtual void write(int64_t step, char* slot) = 0;
  virtual void read(int64_t step) = 0;
  virtual Signature expected(int) const { return signature_; }
  const char* of(int64_t step, int rank) const { return lane().of(base_ + step, rank); }
  Lane& lane() const { return party_.lanes[0]; }

  int64_t steps_;
  bool writes_ = true;
  std::vector<int> sources_;  // whose slots are read; at first everybody's

 private:
  Signature signature_;
  uint64_t base_ = 0;
  int64_t written_ = 0, read_ = 0;
};

struct Elements {
  int64_t count, size;  // number, bytes of one
  Combine combine;
  uint32_t type, op;  // for the signature

  int64_t bytes() const { return count * size; }
};

// in -> out on all ranks, combined; may be the same memory. At most a slot.
class AllReduce : public Steps {
 public:
  static constexpr int64_t kMostBytes = 64 << 10;  // above, ChunkedAllReduce is faster
  AllReduce(const Party& party, const void* in, void* out, const Elements& elements);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const char* in_;
  char* out_;
  const Elements elements_;
};

// The same for many elements: chunk by chunk, each rank combines a part of the chunk and spreads it.
// Lane 0 carries the addends, lane 1 the sums; the next chunk is written while this one is waited for.
class ChunkedAllReduce : public Call {
 public:
  ChunkedAllReduce(const Party& party, const void* in, void* out, const Elements& elements);
  void begin(uint64_t number) override;
  bool advance() override;
  bool given() const override { return combined_ == chunks_; }
  std::vector<int> missing() const override;

 private:
  struct Range {
    int64_t begin, end;  // elements of the tensor
  };
  Range chunk(int64_t index) const;
  Range part(int64_t index, int rank) const;
  void write(int64_t index);
  void combine(int64_t index);
  void spread(int64_t index);

  const char* in_;
  char* out_;
  const Elements elements_;
  int64_t per_chunk_, chunks_;
  Signature signature_;
  uint64_t base_[kLanes] = {0, 0};
  int64_t written_ = 0, combined_ = 0, spread_ = 0;
};

// Bytes of rank r -> out[r] on all ranks
class AllGather : public Steps {
 public:
  // root: gather to it, equal lengths (others' are known to nobody else); -1: to all
  AllGather(const Party& party, const void* in, std::vector<void*> out, std::vector<int64_t> bytes,
            int root = -1);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;
  Signature expected(int rank) const override;

 private:
  const char* in_;
  const std::vector<void*> out_;
  const std::vector<int64_t> bytes_;  // of each rank
  const int root_;
};

// Part r of every rank's input, combined -> out on rank r. in[r] has counts[r] elements.
class ReduceScatter : public Steps {
 public:
  ReduceScatter(const Party& party, std::vector<const void*> in, void* out,
                std::vector<int64_t> counts, const Elements& like);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const std::vector<const void*> in_;
  char* out_;
  const std::vector<int64_t> counts_;
  const Elements like_;
  const int64_t share_;  // elements of one destination in a slot
};

// Combined on root alone
class Reduce : public Steps {
 public:
  Reduce(const Party& party, const void* in, void* out, const Elements& elements, int root);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const char* in_;
  char* out_;
  const Elements elements_;
  const int root_;
  const int64_t share_;
};

// data of root -> data of all
class Broadcast : public Steps {
 public:
  Broadcast(const Party& party, void* data, int64_t bytes, int root);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  char* data_;
  const int64_t bytes_;
  const int root_;
};

// in[r] of root -> out of rank r
class Scatter : public Steps {
 public:
  Scatter(const Party& party, std::vector<const void*> in, void* out, int64_t bytes, int root);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const std::vector<const void*> in_;
  char* out_;
  const int64_t bytes_, share_;
  const int root_;
};

// in[r] -> rank r, from rank r -> out[r]. The first step tells who sends how much.
class AllToAll : public Steps {
 public:
  AllToAll(const Party& party, std::vector<const void*> in, std::vector<int64_t> in_bytes,
           std::vector<void*> out, std::vector<int64_t> out_bytes);

 protected:
  void write(int64_t step, char* slot) override;
  void read(int64_t step) override;

 private:
  const std::vector<const void*> in_;
  const std::vector<int64_t> in_bytes_;
  const std::vector<void*> out_;
  const std::vector<int64_t> out_bytes_;
  const int64_t share_;
};

class Barrier : public Steps {
 public:
  explicit Barrier(const Party& party) : Steps(party, Kind::kBarrier, 1, {}) {}

 protected:
  void write(int64_t, char*) override {}
  void read(int64_t) override {}
};

}  // namespace tp_ext::shm
